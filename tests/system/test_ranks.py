"""A learner of two ranks under torchrun: it trains, ends as one, and goes on where it was."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from streamrl.checkpoints.find import list_checkpoints
from streamrl.cli.buffer.audit import audit_run
from streamrl.run_folder import config_of
from tests.ports import free_port
from tests.system.conftest import CONFIG, DEADLINE_S, STREAMRL, Launched, RunFolder
from tests.system.test_docs import RUN_BY
from tests.system.test_launch import (
    COLUMNS,
    assert_audit_passes,
    assert_books_close,
    assert_every_step_once,
)
from tests.waiting import block_until

TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
QUICKSTART = "configs/quickstart.yaml"
MAX_STEPS = 100_000


class Ranks(RunFolder):
    """The daemons of a run, each started as a person would."""

    def __init__(self, folder: Path, config: Path) -> None:
        super().__init__(folder)
        self.config = str(config)
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, *command: str) -> "subprocess.Popen[bytes]":
        with (self.folder.parent / "output.log").open("ab") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output)
        self._started.append(process)
        return process

    def learner(self) -> "subprocess.Popen[bytes]":
        """Started as the documents say, on this run's configuration."""
        (command,) = (c for c, runs_it in RUN_BY.items() if runs_it == Path(__file__).name)
        ours = {"torchrun": TORCHRUN, "streamrl": STREAMRL, QUICKSTART: self.config}
        return self.start(*(ours.get(word, word) for word in command.split()))

    @property
    def output(self) -> str:
        return (self.folder.parent / "output.log").read_text()

    def until(self, condition: Callable[[], bool]) -> None:
        block_until(condition, DEADLINE_S, explain=lambda: self.output)

    def rank(self, learner: "subprocess.Popen[bytes]", index: int) -> psutil.Process:
        for child in psutil.Process(learner.pid).children():
            if child.environ().get("RANK") == str(index):
                return child
        raise AssertionError(f"no rank {index} is running")

    def kill(self) -> None:
        for process in self._started:
            if process.poll() is None:
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
                process.kill()
            process.wait()


@pytest.fixture
def ranks(tmp_path: Path, model: Path) -> Iterator[Ranks]:
    config = tmp_path / "run.yaml"
    text = CONFIG.format(folder=tmp_path, model=model)
    text = text.replace("zmq://127.0.0.1:0", f"zmq://127.0.0.1:{free_port()}")
    text = text.replace("tcp://127.0.0.1:0", f"tcp://127.0.0.1:{free_port()}")
    config.write_text(text.replace("max_steps: 12", f"max_steps: {MAX_STEPS}"))
    started = Ranks(tmp_path / "run", config)
    started.start(STREAMRL, "buffer", str(config))
    started.start(STREAMRL, "generator", str(config), "--id", "generator-0")
    yield started
    started.kill()


@pytest.mark.long
def test_a_launch_starts_ranks_again_when_one_has_died(launch: Callable[..., Launched]):
    run = launch("--set", "learner.num_ranks=2", "--set", "run.max_steps=100000", strict=False)
    run.until_step(6)
    (killed,) = (
        child for child in run.child("learner").children() if child.environ().get("RANK") == "1"
    )
    killed.kill()
    run.until(lambda: run.log("learner").count("attached at version") == 2)
    run.until_step(run.newest["step"] + 5)
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130, run.output
    sentence = f"learner: rank 1 of the learner (process {killed.pid}) has ended; started again"
    assert sentence in run.output
    assert_every_step_once(run, len(run.lines))
    assert_books_close(run)
    assert_audit_passes(run)


def test_two_ranks_train_end_as_one_and_go_on(ranks: Ranks, model: Path):
    learner = ranks.learner()
    ranks.until_step(8)
    killed, survivor = (ranks.rank(learner, index) for index in (1, 0))
    killed.kill()
    assert learner.wait(DEADLINE_S) == 1
    assert not survivor.is_running()
    sentence = f"rank 1 of the learner (process {killed.pid}) has ended"
    assert f"learner E streamrl.service: {sentence}" in ranks.log("learner")

    step = len(ranks.lines)
    saved = max(int(path.name.partition("-")[2]) for path in list_checkpoints(ranks.folder))
    learner = ranks.learner()
    ranks.until_step(step + 8)
    assert f"checkpoints/step-{saved:08d} at version {saved}" in ranks.log("learner-1")
    learner.send_signal(signal.SIGTERM)
    assert learner.wait(DEADLINE_S) == 1
    assert "learner: done" in ranks.log("learner")
    assert "learner-1: done" in ranks.log("learner-1")
    version = len(ranks.lines)
    assert list_checkpoints(ranks.folder)[-1].name == f"step-{version:08d}"
    assert [line["step"] for line in ranks.lines] == list(range(1, version + 1))
    for line in ranks.lines:
        dropped = sum(v for name, v in line.items() if name.startswith("buffer/dropped_"))
        columns = sum(line[f"buffer/{column}"] for column in COLUMNS)
        assert line["buffer/granted"] == columns + dropped, line["step"]
    config = config_of(ranks.folder)
    ended = config.run.model_copy(update={"max_steps": version})
    complete = config.model_copy(update={"run": ended})
    assert audit_run(ranks.folder, complete=complete).faults == ()
    before, after = (
        load_file(folder / "model.safetensors")
        for folder in (model, list_checkpoints(ranks.folder)[-1])
    )
    assert before.keys() == after.keys()
    assert all(not before[name].equal(tensor) for name, tensor in after.items())


@pytest.mark.long
def test_a_signal_to_torchrun_drains_the_ranks(ranks: Ranks):
    words = (STREAMRL, "learner", "--config", ranks.config)
    learner = ranks.start(
        *(STREAMRL, "torchrun", "--standalone", "--nproc-per-node=2", "--no-python", *words)
    )
    ranks.until_step(2)
    learner.send_signal(signal.SIGTERM)
    assert learner.wait(DEADLINE_S) == 128 + signal.SIGTERM
    assert "learner: done" in ranks.log("learner")
    version = len(ranks.lines)
    assert list_checkpoints(ranks.folder)[-1].name == f"step-{version:08d}"
