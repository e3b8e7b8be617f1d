"""Daemons started one by one: a learner that died, the same command again, and --resume."""

import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from streamrl.cli.buffer.audit import audit_run
from streamrl.config import RunConfig, load_config, to_yaml
from streamrl.run_folder import LEARNER_FILE
from tests.ports import free_port
from tests.system.conftest import CONFIG, DEADLINE_S, STREAMRL, RunFolder, allow_groups, held_reward
from tests.waiting import block_until

NUM_STEPS = 8

Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def config(tmp_path: Path, model: Path) -> RunConfig:
    """Of a run that saves no checkpoint before its end, which groups are held back from."""
    file = tmp_path / "run.yaml"
    file.write_text(CONFIG.format(folder=tmp_path, model=model))
    settings = (
        f"run.max_steps={NUM_STEPS}",
        "buffer.max_staleness=1",
        "learner.checkpoint.every=99",
        # Three steps at least, and five at most.
        f"data.reward={held_reward(tmp_path, num_groups=5 * 4)}",
        f"buffer.url=zmq://127.0.0.1:{free_port()}",
        f"weights.address=tcp://127.0.0.1:{free_port()}",
    )
    config = load_config(file, settings).config
    file.write_text(to_yaml(config))
    return config


@pytest.fixture
def start(tmp_path: Path, config: RunConfig) -> Iterator[Start]:
    """Commands as a person types them, each on a terminal of its own; killed in the end."""
    started: list[subprocess.Popen[bytes]] = []

    def run(role: str, *arguments: str) -> "subprocess.Popen[bytes]":
        command = [STREAMRL, role, "--config", str(tmp_path / "run.yaml"), *arguments]
        with (tmp_path / "terminal").open("wb") as terminal:
            started.append(subprocess.Popen(command, stderr=terminal))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.long
def test_a_learner_that_died_without_a_checkpoint_goes_on_only_with_resume(
    tmp_path: Path, config: RunConfig, start: Start
):
    run = RunFolder(config.run.path)
    buffer = start("buffer")
    start("generator", "--id", "mine")
    first = start("learner")
    learner_file = run.folder / LEARNER_FILE
    block_until(lambda: len(run.lines) >= 3 and learner_file.exists(), DEADLINE_S)
    first.send_signal(signal.SIGKILL)
    first.wait()
    status = learner_file.read_bytes()
    num_lines = len(run.lines)

    assert start("learner").wait(DEADLINE_S) == 2
    said = (tmp_path / "terminal").read_text().splitlines()[-1]
    # A step that the buffer knows may have died before its line was written.
    version = re.search(r"the buffer holds a run run at version (\d+) already", said)
    assert version, said
    assert int(version[1]) - num_lines in (0, 1)
    assert "go on with --resume, or, to start anew" in said
    assert learner_file.read_bytes() == status
    assert len(run.lines) == num_lines

    allow_groups(tmp_path, 1000)
    assert start("learner", "--resume").wait(DEADLINE_S) == 0
    assert buffer.wait(DEADLINE_S) == 0
    assert [line["step"] for line in run.lines] == list(range(1, NUM_STEPS + 1))
    # The learner that was refused has not attached.
    assert run.books["learner_term"] == 2
    assert audit_run(run.folder, complete=config).faults == ()
