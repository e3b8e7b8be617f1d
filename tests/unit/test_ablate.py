"""An ablation: what is planned, what is repeated, and what the table says."""

import argparse
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from streamrl.config import RunConfig, load_config, to_yaml
from streamrl.errors import ConfigError
from streamrl.tracking.jsonl import JsonlTracker
from streamrl.types import LearnerActivity, LearnerStatus
from tests.research.ablate import main, make_parser, markdown, outcome, plan
from tests.research.script import run_script

ROOT = Path(__file__).parents[2]
ABLATION = str(ROOT / "configs" / "ablation" / "stale_bf16.yaml")


def arguments(
    folder: Path, vary: str, seeds: str = "0,1", variants: Path | None = None
) -> argparse.Namespace:
    return argparse.Namespace(
        file=ABLATION,
        config=None,
        vary=vary.split(";"),
        variants=variants and str(variants),
        seeds=seeds,
        overrides=[f"run.folder={folder}", "run.max_steps=20"],
        lag=None,
        jobs=1,
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
        ("run.seed=1,2", "0", "run.seed: cannot be varied; give the seeds as --seeds 0,1,2"),
        ("algorithm.rollout_is=off", "0,0", "off, seed 0 and off, seed 0 would be in one folder"),
        ("algorithm.reward.difficulty_low=-1,1", "0", "-1, seed 0 and 1, seed 0 would be in one"),
    ],
)
def test_a_mistake_is_refused_before_anything_runs(tmp_path, vary, seeds, sentence):
    with pytest.raises(ConfigError, match=sentence):
        main(arguments(tmp_path, vary, seeds))
    assert not any(tmp_path.iterdir())


def write_run(config: RunConfig, rewards: list[float], greedy: float) -> None:
    path = config.run.path
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(to_yaml(config))
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
    write_run(runs[0].config, [0.0] * 18 + [0.5, 0.7], greedy=0.8)
    write_run(runs[1].config, [0.0] * 18 + [0.9, 0.9], greedy=1.0)
    assert all(run.is_complete(None) for run in runs)
    found = outcome("token_is", runs)
    assert found.final_rewards == pytest.approx((0.6, 0.9))
    assert found.greedy_rewards == (0.8, 1.0)
    assert (found.staleness, found.largest_staleness) == (2.0, 4)
    row = list(markdown("algorithm.rollout_is", [found]))[-1]
    assert row == (
        "| token_is | 0.750 (0.600, 0.900) | 0.900 (0.800, 1.000) | 2.0 / 4 | 0.50 | 0.25 |"
    )


def test_a_run_that_stopped_early_is_complete(tmp_path):
    (run,) = planned(arguments(tmp_path, "algorithm.rollout_is=token_is", seeds="0"))
    write_run(run.config, [0.5] * 12, greedy=0.8)
    assert not run.is_complete(None)
    ended = LearnerStatus(
        policy_version=12,
        learner_term=1,
        activity=LearnerActivity.ENDED,
        activity_s=0.0,
        time_s=0.0,
        ended_early="stopped early at version 12 of 20",
    )
    (run.config.run.path / "learner.json").write_bytes(msgspec.json.encode(ended))
    assert run.is_complete(None)


def test_complete_runs_are_not_repeated(tmp_path, capsys, monkeypatch):
    given = arguments(tmp_path, "algorithm.rollout_is=token_is")
    for run in planned(given):
        write_run(run.config, [0.5] * 20, greedy=0.8)
    monkeypatch.setattr("tests.research.ablate._launch", lambda *_: pytest.fail("launched again"))
    assert main(given) == 0
    assert "0.500 (0.500, 0.500)" in capsys.readouterr().out
    assert (tmp_path / "stale_bf16" / "ablation.png").stat().st_size > 10_000
    assert "token_is" in (tmp_path / "stale_bf16" / "ablation.md").read_text()


def test_a_run_without_its_evaluation_is_not_complete(tmp_path):
    (run,) = planned(arguments(tmp_path, "algorithm.rollout_is=token_is", seeds="0"))
    write_run(run.config, [0.5] * 20, greedy=0.8)
    assert run.is_complete(None)
    (run.config.run.path / "evaluation.json").unlink()
    assert not run.is_complete(None)


@pytest.mark.parametrize(
    ("made", "asked", "sentence"),
    [
        ({}, {"overrides": ["learner.optimizer.lr=1e-9"]}, "learner.optimizer.lr .*, not 1e-09"),
        ({}, {"lag": "even"}, "--lag None, not even"),
        ({"overrides": ["run.max_steps=21"]}, {}, "run.max_steps 21, not 20"),
    ],
)
def test_runs_of_other_settings_are_not_taken_for_these(tmp_path, made, asked, sentence):
    given = arguments(tmp_path, "algorithm.rollout_is=token_is")

    def changed(changes: dict[str, Any]) -> argparse.Namespace:
        overrides = [*given.overrides, *changes.get("overrides", ())]
        return argparse.Namespace(**{**vars(given), **changes, "overrides": overrides})

    for run in planned(changed(made)):
        write_run(run.config, [0.5] * 20, greedy=0.8)
    with pytest.raises(ConfigError, match=f"is complete and was made with {sentence}"):
        main(changed(asked))


def test_a_run_that_fails_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("tests.research.ablate.executable", lambda: "/bin/false")
    command = [ABLATION, "--vary", "algorithm.rollout_is=token_is", "--seeds", "3"]
    assert run_script(make_parser(), main, [*command, "--set", f"run.folder={tmp_path}"]) == 1
    assert "token_is-seed3 ended with exit code 1" in capsys.readouterr().err


LAG = str(ROOT / "configs" / "ablation" / "lag.yaml")
SHIPPED = sorted((ROOT / "configs" / "ablation").glob("*.variants.yaml"))


@pytest.mark.parametrize("variants", SHIPPED, ids=lambda path: path.name)
def test_the_variants_that_are_shipped_are_each_a_run_at_each_lag(tmp_path, variants):
    """Each a configuration that can run, none the same as another."""
    given = arguments(tmp_path, "buffer.max_staleness=0,8", "0", variants)
    base = load_config(LAG, given.overrides).config
    runs = list(plan(base, LAG, given))
    names = list(yaml.safe_load(variants.read_text()))
    assert [run.value for run in runs] == [f"{name}, {lag}" for name in names for lag in (0, 8)]
    assert len({run.config.run.path for run in runs}) == 2 * len(names)
    settings = [(str(r.config.algorithm), str(r.config.learner)) for r in runs[::2]]
    assert len(set(settings)) == len(names)


def test_two_axes_make_a_grid_of_final_rewards(tmp_path, capsys):
    variants = tmp_path / "of_mine.yaml"
    variants.write_text('plain: {algorithm.rollout_is: "off"}\nvespo: {algorithm.loss: vespo}\n')
    given = arguments(tmp_path, "buffer.max_staleness=0,8", variants=variants)
    runs = planned(given)
    for run, reward in zip(runs, (0.8, 0.4, 0.8, 0.6, 0.8, 0.4, 0.8, 0.8), strict=True):
        write_run(run.config, [reward] * 20, greedy=reward)
    assert main(given) == 0
    *_, head, _, plain, vespo = capsys.readouterr().out.strip().splitlines()
    assert head == "| final reward (spread), % of the first | 0 | 8 |"
    assert plain == "| plain | 0.800 (0.000), 100 % | 0.400 (0.000), 50 % |"
    assert vespo == "| vespo | 0.800 (0.000), 100 % | 0.700 (0.141), 88 % |"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("- off\n", "must be a mapping of names to settings"),
        ("vespo: algorithm.loss=vespo\n", "vespo was 'algorithm.loss=vespo'; must be a mapping"),
        ("vespo: {algorithm.loss: vespoo}\n", "did you mean 'vespo'"),
        ("{", "cannot be read"),
    ],
)
def test_a_mistake_in_the_variants_is_refused_before_anything_runs(tmp_path, text, sentence):
    file = tmp_path / "variants.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        planned(arguments(tmp_path, "buffer.max_staleness=0,8", variants=file))


def test_nothing_to_vary_is_refused(tmp_path):
    given = argparse.Namespace(**{**vars(arguments(tmp_path, "a=b")), "vary": []})
    with pytest.raises(ConfigError, match=r"give --vary .* or --variants FILE"):
        planned(given)
