"""Every command of the README, run as it stands there; only the sizes come from the environment."""

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from streamrl.cli.main import main
from streamrl.tracking.jsonl import read_metrics
from tests.ports import free_port
from tests.system.conftest import DEADLINE_S, STREAMRL, slow_reward

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
START, DAEMONS, LAUNCH, OPERATE, MEMBERS, ABLATE = (block.strip().splitlines() for block in BLOCKS)


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short run in a folder of its own, on free ports."""
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    monkeypatch.chdir(tmp_path)
    settings = {
        "RUN__MAX_STEPS": 3,
        "MODEL__RECIPE__WARM_START_STEPS": 5,
        "DATA__NUM_EVAL_PROMPTS": 8,
        "GENERATOR__COUNT": 1,
        "LEARNER__GROUPS_PER_STEP": 4,
        "LEARNER__OPTIMIZER__WARMUP_STEPS": 0,
        "BUFFER__URL": f"zmq://127.0.0.1:{free_port()}",
        "WEIGHTS__ADDRESS": f"tcp://127.0.0.1:{free_port()}",
    }
    for name, value in settings.items():
        monkeypatch.setenv(f"STREAMRL__{name}", str(value))


@pytest.fixture
def with_model(environment: None) -> None:
    """The model as `streamrl make-model` makes it, in this process, which has imported torch."""
    assert main(["make-model", "configs/quickstart.yaml"]) == 0


def _words(command: str) -> list[str]:
    program, *words = command.split()
    assert program == "streamrl", command
    return [STREAMRL, *words]


def test_the_two_commands_of_the_start_are_targets_of_make():
    makefile = (ROOT / "Makefile").read_text()
    assert [command.split()[0] for command in START] == ["make", "make"]
    for command in START:
        assert re.search(rf"^{command.split()[1]}:", makefile, re.MULTILINE)


@pytest.mark.usefixtures("environment")
def test_the_daemons_find_each_other_in_the_order_of_the_readme():
    make_model, *daemons = DAEMONS
    subprocess.run(_words(make_model), check=True, timeout=DEADLINE_S, capture_output=True)
    running = {
        command.split()[1]: subprocess.Popen(_words(command), env=os.environ) for command in daemons
    }
    try:
        assert running["learner"].wait(DEADLINE_S) == 0
        assert running["generator"].wait(DEADLINE_S) == 0
        # By itself: the run is over, and everybody has left.
        assert running["buffer"].wait(DEADLINE_S) == 0
    finally:
        for process in running.values():
            process.kill()
    assert len(read_metrics(Path("runs/quickstart/metrics.jsonl"))) == 3


@pytest.mark.usefixtures("with_model")
def test_a_launch_and_what_follows_it(monkeypatch: pytest.MonkeyPatch):
    # One of the commands is `evaluate`; that a launch ends with it is shown in test_launch.py.
    monkeypatch.setenv("STREAMRL__RUN__EVALUATE", "false")
    told = ""
    for command in LAUNCH:
        done = subprocess.run(
            _words(command), capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        told += done.stdout
    assert "the books close" in told
    assert "by position in the response" in told
    assert Path("runs/quickstart/report.png").exists()
    assert Path("runs/quickstart/evaluation.json").exists()


@pytest.mark.usefixtures("environment")
def test_the_ablation_ends_with_a_table_and_a_plot():
    (command,) = ABLATE
    given = "token_is,sequence_clip,token_is_veto --seeds 0,1,2"
    words = _words(command.replace(f"metrics_only,{given}", "token_is --seeds 1"))
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=2 * DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    folder = Path("runs/ablation/stale_bf16")
    rows = (folder / "ablation.md").read_text().splitlines()[2:]
    assert [row.split("|")[1].strip() for row in rows] == ["token_is"]
    assert (folder / "ablation.png").exists()


@pytest.mark.usefixtures("with_model")
def test_a_running_buffer_is_inspected_and_drained_and_a_run_survives_chaos(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    status, inspect, drain, chaos = OPERATE
    monkeypatch.setenv("STREAMRL__RUN__MAX_STEPS", "100000")
    monkeypatch.setenv("STREAMRL__DATA__REWARD", slow_reward(tmp_path, seconds=0.3))
    launch = [STREAMRL, "launch", "configs/quickstart.yaml", "--new", "--no-view"]
    running = subprocess.Popen(launch, stdout=subprocess.DEVNULL)
    folder = Path("runs/quickstart")
    try:
        _until(lambda: len(read_metrics(folder / "metrics.jsonl")) >= 3)
        assert "\nhealthy\n" in _output(status)
        told = _output(inspect)
        assert "leased" in told
        assert "the books close" in told
        assert "generator-0" in told
        assert "trained/s" in told
        _restart_a_generator()
        assert "drained at version" in _output(drain)
        assert "0 groups, at most 8; draining" in _output(inspect)
    finally:
        running.send_signal(signal.SIGINT)
        running.wait(DEADLINE_S)
    monkeypatch.setenv("STREAMRL__RUN__MAX_STEPS", "6")
    monkeypatch.delenv("STREAMRL__DATA__REWARD")
    told = _output(chaos.replace("--kills 5", "--kills 1"))
    assert "1 of 1 kills" in told
    assert "6 steps trained 24 prompts" in told


def _restart_a_generator() -> None:
    listing, cordon, uncordon, drain, start = MEMBERS
    assert "generator-0" in _output(listing)
    assert "granted no leases" in _output(cordon)
    assert "cordoned" in _output(listing)
    assert "is granted leases" in _output(uncordon)
    assert "generator-0 has left" in _output(drain)
    again = subprocess.Popen(_words(start))
    try:
        log = Path("runs/quickstart/logs/generator-0.log")
        _until(lambda: log.read_text().count("generator-0 serves") == 2)
        _until(lambda: _output(listing).count(" active ") == 1)
    finally:
        again.send_signal(signal.SIGTERM)
        assert again.wait(DEADLINE_S) == 0


def _output(command: str) -> str:
    done = subprocess.run(
        _words(command), capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def _until(condition: Callable[[], bool]) -> None:
    """Waits for the condition; unblocked by it or the deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
