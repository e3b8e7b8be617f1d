"""`streamrl ablate`: what is planned, what is repeated, and what the table says."""

import argparse
import json
from pathlib import Path

import pytest

from streamrl.cli.ablate import main, markdown, outcome, plan
from streamrl.cli.main import main as streamrl
from streamrl.config import load_config
from streamrl.errors import ConfigError
from streamrl.tracking.jsonl import JsonlTracker

ROOT = Path(__file__).parents[2]
ABLATION = str(ROOT / "configs" / "ablation" / "stale_bf16.yaml")


def arguments(folder: Path, vary: str, seeds: str = "0,1") -> argparse.Namespace:
    return argparse.Namespace(
        command="ablate",
        file=ABLATION,
        config=None,
        vary=vary,
        seeds=seeds,
        overrides=[f"run.folder={folder}", "run.max_steps=20"],
    )


def planned(given: argparse.Namespace):
    return list(plan(load_config(ABLATION, given.overrides).config, ABLATION, given))


def test_every_value_runs_with_every_seed_in_a_folder_of_its_own(tmp_path):
    runs = planned(arguments(tmp_path, "algorithm.rollout_is=off,token_is"))
    assert [(run.value, run.seed) for run in runs] == [
        ("off", 0),
        ("token_is", 0),
        ("off", 1),
        ("token_is", 1),
    ]
    assert len({run.config.run.path for run in runs}) == 4
    assert all(run.config.run.path.parent == tmp_path / "stale_bf16" for run in runs)
    assert [run.config.algorithm.rollout_is.threshold for run in runs[:2]] == [None, 2.0]
    assert [run.config.run.seed for run in runs] == [0, 0, 1, 1]


def test_a_users_own_code_can_be_a_value(tmp_path):
    runs = planned(arguments(tmp_path, "algorithm.loss=ppo,./my losses.py:mine", seeds="0"))
    assert [run.config.run.name for run in runs] == ["ppo-seed0", "my-losses.py-mine-seed0"]
    assert runs[1].config.algorithm.loss == "./my losses.py:mine"


@pytest.mark.parametrize(
    ("vary", "seeds", "sentence"),
    [
        ("algorithm.rollout_is", "0", "must look like section.key=first,second"),
        ("algorithm.rollout_is=", "0", "must look like section.key=first,second"),
        ("algorithm.rollout_is=off", "zero", "--seeds zero: must look like 0,1,2"),
        ("algorithm.rollout_is=off,token_iss", "0", "did you mean 'token_is'"),
        ("algorithm.rollout=off", "0", "did you mean 'rollout_is'"),
    ],
)
def test_a_mistake_is_refused_before_anything_runs(tmp_path, vary, seeds, sentence):
    with pytest.raises(ConfigError, match=sentence):
        planned(arguments(tmp_path, vary, seeds))
    assert not any(tmp_path.iterdir())


def write_run(path: Path, rewards: list[float], greedy: float) -> None:
    tracker = JsonlTracker(path / "metrics.jsonl", first_step=1)
    for step, reward in enumerate(rewards, 1):
        metrics = {
            "reward/mean": reward,
            "buffer/staleness_mean": 2.0,
            "buffer/staleness_max": step % 5,
            "mismatch/rollout_is_eff_sample_size": 0.5,
            "mismatch/mismatch_k3_kl": 0.25,
        }
        tracker.log(metrics, step)
    tracker.close()
    (path / "evaluation.json").write_text(json.dumps({"greedy_reward_mean": greedy}))


def test_an_outcome_is_the_end_of_each_run_and_the_mean_of_the_rest(tmp_path):
    runs = planned(arguments(tmp_path, "algorithm.rollout_is=token_is"))
    write_run(runs[0].config.run.path, [0.0] * 18 + [0.5, 0.7], greedy=0.8)
    write_run(runs[1].config.run.path, [0.0] * 18 + [0.9, 0.9], greedy=1.0)
    assert all(run.is_complete for run in runs)
    found = outcome("token_is", runs)
    assert found.final_rewards == pytest.approx((0.6, 0.9))
    assert found.greedy_rewards == (0.8, 1.0)
    assert (found.staleness, found.largest_staleness) == (2.0, 4)
    row = list(markdown("algorithm.rollout_is", [found]))[-1]
    assert row == (
        "| token_is | 0.750 (0.600, 0.900) | 0.900 (0.800, 1.000) | 2.0 / 4 | 0.50 | 0.25 |"
    )


def test_complete_runs_are_not_repeated(tmp_path, capsys, monkeypatch):
    given = arguments(tmp_path, "algorithm.rollout_is=token_is")
    for run in planned(given):
        write_run(run.config.run.path, [0.5] * 20, greedy=0.8)
    monkeypatch.setattr("streamrl.cli.ablate._launch", lambda *_: pytest.fail("launched again"))
    assert main(given) == 0
    assert "0.500 (0.500, 0.500)" in capsys.readouterr().out
    assert (tmp_path / "stale_bf16" / "ablation.png").stat().st_size > 10_000
    assert "token_is" in (tmp_path / "stale_bf16" / "ablation.md").read_text()


def test_a_run_that_fails_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("streamrl.cli.ablate.executable", lambda: "/bin/false")
    command = ["ablate", ABLATION, "--vary", "algorithm.rollout_is=token_is", "--seeds", "3"]
    assert streamrl([*command, "--set", f"run.folder={tmp_path}"]) == 1
    assert "token_is-seed3 ended with exit code 1" in capsys.readouterr().err
