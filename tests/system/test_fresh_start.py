"""Daemons started one by one: a learner that died, the same command again, and --resume."""

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamrl.cli.verification.run_audit import audit_run
from streamrl.config import RunConfig, load_config, to_yaml
from streamrl.run_folder import LEARNER_FILE
from tests.ports import free_port
from tests.system.conftest import CONFIG, DEADLINE_S, STREAMRL, RunFolder, slow_reward
from tests.waiting import block_until

NUM_STEPS = 8


@pytest.fixture
def config(tmp_path: Path, model: Path) -> RunConfig:
    """Of a run that saves no checkpoint before its end."""
    file = tmp_path / "run.yaml"
    file.write_text(CONFIG.format(folder=tmp_path, model=model))
    settings = (
        f"run.max_steps={NUM_STEPS}",
        "buffer.max_staleness=1",
        "learner.checkpoint.every=99",
        f"data.reward={slow_reward(tmp_path, seconds=0.2)}",
        f"buffer.url=zmq://127.0.0.1:{free_port()}",
        f"weights.address=tcp://127.0.0.1:{free_port()}",
    )
    config = load_config(file, settings).config
    file.write_text(to_yaml(config))
    return config


@pytest.fixture
def daemons(tmp_path: Path, config: RunConfig) -> Iterator["Daemons"]:
    with Daemons(tmp_path / "run.yaml") as started:
        yield started


class Daemons:
    """Commands as a person types them, each on a terminal of its own; killed in the end."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._started: list[subprocess.Popen[str]] = []

    def __enter__(self) -> "Daemons":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._started:
            process.kill()
            process.communicate()

    def start(self, role: str, *arguments: str) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [STREAMRL, role, "--config", str(self._file), *arguments],
            stderr=subprocess.PIPE,
            text=True,
        )
        self._started.append(process)
        return process


def test_a_learner_that_died_without_a_checkpoint_goes_on_only_with_resume(
    config: RunConfig, daemons: Daemons
):
    run = RunFolder(config.run.path)
    buffer = daemons.start("buffer")
    daemons.start("generator", "--id", "mine")
    first = daemons.start("learner")
    block_until(lambda: len(run.lines) >= 3, DEADLINE_S)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    status = (run.folder / LEARNER_FILE).read_bytes()
    version = len(run.lines)

    again = daemons.start("learner")
    _, said = again.communicate(timeout=DEADLINE_S)
    assert again.returncode == 2, said
    assert f"the buffer holds a run run at version {version} already" in said
    assert f"goes on at version 0, since {run.folder} has no checkpoint" in said
    assert len(said.splitlines()[-1]) < 500
    assert (run.folder / LEARNER_FILE).read_bytes() == status
    assert len(run.lines) == version

    resumed = daemons.start("learner", "--resume")
    _, said = resumed.communicate(timeout=DEADLINE_S)
    assert resumed.returncode == 0, said
    buffer.communicate(timeout=DEADLINE_S)
    assert [line["step"] for line in run.lines] == list(range(1, NUM_STEPS + 1))
    # The learner that was refused has not attached.
    assert run.books["learner_term"] == 2
    assert audit_run(run.folder, complete=config).faults == ()
