"""Runs whose lag is a setting: how old each group is, that they repeat, and what is refused."""

import asyncio
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from streamrl.config import RunConfig, load_config
from streamrl.run_folder import read_json
from streamrl.service import processes_with
from streamrl.tracking.jsonl import read_metrics
from tests.research import ablate as ablation_script, steer as steer_script
from tests.research.exact_lag import LaggedRun, main as exact_lag
from tests.research.lag import Lag
from tests.research.script import run_script
from tests.system.conftest import CONFIG, DEADLINE_S, script
from tests.waiting import block_until

TIMES = ("_s", "_per_s")
K3 = "mismatch/mismatch_k3_kl"


@pytest.fixture
def file(tmp_path: Path, model: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG.format(folder=tmp_path, model=model))
    return path


def config_of(file: Path, name: str, max_staleness: int, *more: str) -> RunConfig:
    settings = (f"run.name={name}", "run.max_steps=6", f"buffer.max_staleness={max_staleness}")
    return load_config(str(file), [*settings, "data.num_eval_prompts=8", *more]).config


def made(config: RunConfig, lag: Lag) -> list[dict[str, Any]]:
    """The lines of the run, without what a clock says."""

    async def run() -> None:
        await LaggedRun(config, lag).run()

    asyncio.run(run())
    lines = read_metrics(config.run.path / "metrics.jsonl")
    return [{k: v for k, v in line.items() if not k.endswith(TIMES)} for line in lines]


def test_every_group_is_as_old_as_it_is_set_and_a_run_repeats(file: Path):
    first = made(config_of(file, "first", 2), Lag.EVEN)
    ages = [(line["buffer/staleness_mean"], line["buffer/staleness_max"]) for line in first]
    assert ages == [(0, 0), (1, 1), (2, 2), (2, 2), (2, 2), (2, 2)]
    assert json.dumps(made(config_of(file, "second", 2), Lag.EVEN)) == json.dumps(first)
    # Weights of another version make other log-probabilities, those of the same one do not.
    on_policy = made(config_of(file, "on_policy", 0), Lag.EVEN)
    assert max(line[K3] for line in on_policy) < 1e-8 < min(line[K3] for line in first[1:])
    scores = read_json(file.parent / "first" / "evaluation.json")
    assert scores["num_prompts"] == 8


def test_an_adapter_that_is_sent_alone_is_in_what_samples(file: Path):
    adapter = ("learner.lora={rank: 4, publish: adapter}", "learner.optimizer.lr=1e-2")
    same = made(config_of(file, "same", 0, *adapter), Lag.EVEN)
    stale = made(config_of(file, "stale", 2, *adapter), Lag.EVEN)
    assert max(line[K3] for line in same) < 1e-8 < min(line[K3] for line in stale[2:])


def test_the_engine_samples_with_weights_as_they_are_sent(file: Path):
    gaps = {
        dtype: [
            line[K3] for line in made(config_of(file, dtype, 0, f"weights.dtype={dtype}"), Lag.EVEN)
        ]
        for dtype in ("float32", "bfloat16", "float8_e4m3fn")
    }
    assert max(gaps["float32"]) < 1e-8 < min(gaps["bfloat16"])
    assert max(gaps["bfloat16"]) < min(gaps["float8_e4m3fn"])


def test_uneven_ages_lie_between_none_and_twice_the_mean(file: Path):
    lines = made(config_of(file, "uneven", 1, "run.max_steps=12"), Lag.UNEVEN)
    assert max(line["buffer/staleness_max"] for line in lines) == 2
    means = [line["buffer/staleness_mean"] for line in lines[2:]]
    assert 0 < min(means) < max(means) < 2
    assert 0.5 < sum(means) / len(means) < 1.5


def test_fixed_and_steered_bounds_are_compared_at_equal_simulated_time(file: Path, capsys):
    """A group takes one step, and from the middle of the run on two."""
    settings = [str(file), "--set", "data.num_eval_prompts=8", "--latency", "1"]
    steered = "{min: 0, max: 3, ess: 0.2}"
    bounds = ["--bounds", f"[0, 3, '{steered}']"]
    command = [*settings, *bounds, "--time", "48"]
    assert run_script(steer_script.make_parser(), steer_script.main, command) == 0
    printed = capsys.readouterr()
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in printed.out.splitlines()[2:]]
    assert [row[0] for row in rows] == ["0", "3", steered]
    few, most, between = (int(row[1]) for row in rows)
    assert few < between < most <= 48
    assert few <= 24 / 2 + 24 / 3, "under a bound of 0 the time of a step follows that of a group"
    assert [float(row[2]) for row in rows][:1] == [0.0]
    assert "from 0 to 1: the effective sample size of the last 8 steps" in printed.err
    assert run_script(steer_script.make_parser(), steer_script.main, command) == 0
    assert capsys.readouterr().out == printed.out, "runs that are complete are kept"
    other = [*settings, *bounds, "--time", "49"]
    assert run_script(steer_script.make_parser(), steer_script.main, other) == 2
    assert "choose another run.name" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("generator.engine=vllm", "generator.engine: was 'vllm'; --lag samples by hf"),
        ("algorithm.dynamic_sampling={}", "algorithm.dynamic_sampling: --lag trains every group"),
        ("learner.num_ranks=2", "learner.num_ranks: was 2; --lag has one"),
    ],
)
def test_what_one_process_cannot_do_is_refused(file: Path, capsys, setting, sentence):
    with pytest.raises(SystemExit, match="2"):
        exact_lag(Lag.EVEN, str(file), [setting])
    assert sentence in capsys.readouterr().err


@pytest.mark.long
def test_an_ablation_that_is_killed_leaves_no_run_behind(file: Path):
    mark, folder = "STREAMRL_TEST_ABLATION", file.parent
    command = [*script("ablate"), str(file), "--vary", "learner.optimizer.lr=1e-3", "--seeds", "0"]
    command += ["--lag", "even", "--set", "run.name=killed", "--set", "run.max_steps=100000"]
    ablation = subprocess.Popen(
        command, env={**os.environ, mark: str(folder)}, stdout=subprocess.DEVNULL
    )

    def left() -> list[int]:
        return processes_with(mark, lambda value: value == str(folder))

    try:
        block_until(lambda: any(folder.glob("killed/*/metrics.jsonl")), DEADLINE_S)
        assert len(left()) > 1
        ablation.kill()
        ablation.wait()
        block_until(lambda: not left(), DEADLINE_S)
    finally:
        ablation.kill()
        ablation.wait()
        for pid in left():
            os.kill(pid, signal.SIGKILL)


def ablate(*words: str) -> int:
    return run_script(ablation_script.make_parser(), ablation_script.main, words)


def test_several_runs_at_once_are_for_those_in_one_process(file: Path, capsys):
    vary = ("--vary", "buffer.max_staleness=0,3", "--seeds", "0")
    assert ablate(str(file), *vary, "--jobs", "2") == 2
    assert "--jobs: several runs at once are for --lag" in capsys.readouterr().err
