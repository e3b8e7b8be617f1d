"""SIGTERM to real daemons, state by state: they save and end in time, whatever they wait for.

The states that a small process or a clock of the test's own reaches are in
`tests/unit/test_shutdown.py`, `test_stopped_learner.py` and `test_child_processes.py`.
"""

import contextlib
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from streamrl.checkpoints.find import list_checkpoints
from tests.ports import free_port
from tests.settings import set_options
from tests.system.conftest import CONFIG, DEADLINE_S, STOP_S, STREAMRL, RunFolder
from tests.system.test_launch import (
    assert_audit_passes,
    assert_books_close,
    assert_every_step_once,
)

UNANSWERED = "no answer from the buffer"
ENDLESS = ("run.max_steps=100000", "learner.checkpoint.every=1000")


class Daemons(RunFolder):
    """Those of one run, each started by itself; their output is in logs/."""

    def __init__(self, folder: Path, model: Path, *settings: str) -> None:
        super().__init__(folder / "run")
        text = CONFIG.format(folder=folder, model=model)
        for _ in range(2):
            text = text.replace("127.0.0.1:0", f"127.0.0.1:{free_port()}", 1)
        self._config = folder / "run.yaml"
        self._config.write_text(text)
        self._settings = settings
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, role: str, *arguments: str, settings: tuple[str, ...] = ()) -> psutil.Popen:
        command = [STREAMRL, role, "--config", str(self._config), *arguments]
        output = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = psutil.Popen([*command, *set_options(*self._settings, *settings)], **output)
        self._started.append(process)
        return process

    def end(self) -> None:
        for process in self._started:
            with contextlib.suppress(psutil.NoSuchProcess):
                for one in [*psutil.Process(process.pid).children(recursive=True), process]:
                    one.kill()
            process.wait()


@pytest.fixture
def daemons(tmp_path: Path, model: Path) -> Iterator[Callable[..., Daemons]]:
    made: list[Daemons] = []

    def make(*settings: str) -> Daemons:
        made.append(Daemons(tmp_path, model, *settings))
        return made[-1]

    yield make
    for one in made:
        one.end()


def terminate(process: psutil.Popen) -> int:
    """Exit code of a daemon that ends in time."""
    process.send_signal(signal.SIGTERM)
    return process.wait(STOP_S)


def last_line(run: RunFolder, role: str) -> str:
    return run.log(role).splitlines()[-1]


def assert_all_is_saved(run: RunFolder) -> None:
    newest = list_checkpoints(run.folder)[-1].name
    assert newest == f"step-{run.lines[-1]['step']:08d}"


def test_a_learner_whose_buffer_is_gone_saves_and_goes_on_later(daemons):
    run = daemons()
    endless = ENDLESS
    buffer = run.start("buffer", settings=endless)
    generator = run.start("generator", "--id", "one", settings=endless)
    learner = run.start("learner", settings=endless)
    run.until_step(6)
    # It may have waited for the buffer's start.
    before = run.log("learner").count(UNANSWERED)
    buffer.kill()
    # In the step, or as it tells the buffer of it.
    run.until(lambda: run.log("learner").count(UNANSWERED) > before)
    assert terminate(learner) == 5
    assert "does not answer; stopped at step" in last_line(run, "learner")
    assert_all_is_saved(run)
    assert terminate(generator) == 5
    assert "does not answer; stopped, and its leases expire" in last_line(run, "one")

    num_steps = len(run.lines) + 4
    ending = (f"run.max_steps={num_steps}", *ENDLESS[1:])
    again = [
        run.start("buffer", settings=ending),
        run.start("learner", "--resume", settings=ending),
    ]
    again.append(run.start("generator", "--id", "two", settings=ending))
    assert [process.wait(DEADLINE_S) for process in again] == [0, 0, 0]
    assert_every_step_once(run, num_steps)
    assert_books_close(run)
    assert run.books["acknowledged"] == num_steps * 4
    assert_audit_passes(run)


@pytest.mark.long
def test_daemons_whose_buffer_never_was(daemons):
    run = daemons(*ENDLESS)
    learner, generator = run.start("learner"), run.start("generator", "--id", "one")
    validator = run.start("validator", settings=("validation.every=1",))
    for role in ("learner", "one"):
        run.until(lambda role=role: UNANSWERED in run.log(role))
    run.until(lambda: "waiting for the first step" in run.log("validator"))
    # It has not begun: it asks the buffer whose run it holds before it changes anything.
    assert terminate(learner) == 0
    assert last_line(run, "learner").endswith("learner: done")
    assert terminate(generator) == 5
    assert terminate(validator) == 0


STARTING = {
    "begins": lambda run, process, name: True,
    "imports": lambda run, process, name: "numpy" in maps_of(process),
    "loads": lambda run, process, name: bool(run.log(name)) or "libtorch" in maps_of(process),
    "says something": lambda run, process, name: bool(run.log(name)),
}


def maps_of(process: psutil.Popen) -> str:
    return Path(f"/proc/{process.pid}/maps").read_text()


@pytest.mark.long
@pytest.mark.parametrize(
    ("role", "state"),
    [
        # Until a daemon says something, no code of its role has a part in it but what it imports.
        *(("learner", state) for state in STARTING),
        *((role, "says something") for role in ("buffer", "generator", "validator")),
    ],
)
def test_a_daemon_that_starts(daemons, role: str, state: str):
    run = daemons(*ENDLESS, "validation.every=1")
    process = run.start(role, *(["--id", "generator"] if role == "generator" else []))
    run.until(lambda: STARTING[state](run, process, role))
    assert terminate(process) in (0, 5, -signal.SIGTERM)


@pytest.mark.long
def test_a_learner_of_two_ranks_whose_buffer_is_frozen(daemons):
    run = daemons(*ENDLESS, "learner.num_ranks=2")
    buffer = run.start("buffer")
    run.start("generator", "--id", "one")
    learner = run.start("learner")
    run.until_step(3)

    def num_unanswered() -> int:
        # A group's own rank fetches it.
        return sum(run.log(name).count(UNANSWERED) for name in ("learner", "learner-1"))

    before = num_unanswered()
    buffer.send_signal(signal.SIGSTOP)
    run.until(lambda: num_unanswered() > before)
    assert terminate(learner) == 5
    assert_all_is_saved(run)


@pytest.mark.long
def test_a_rank_that_is_told_alone_ends_the_learner(daemons):
    run = daemons(*ENDLESS, "learner.num_ranks=2")
    run.start("buffer")
    run.start("generator", "--id", "one")
    learner = run.start("learner")
    run.until_step(3)
    _, second = sorted(psutil.Process(learner.pid).children(), key=lambda p: p.environ()["RANK"])
    second.send_signal(signal.SIGTERM)
    assert learner.wait(STOP_S) == 0
    assert_all_is_saved(run)


@pytest.mark.long
def test_a_learner_whose_receiver_is_frozen(daemons):
    run = daemons(*ENDLESS, "weights.deadline_s=60")
    run.start("buffer")
    generator = run.start("generator", "--id", "one")
    learner = run.start("learner")
    run.until_step(3)
    generator.suspend()
    run.until(lambda: "waiting for 4 groups" in run.log("learner"))
    assert terminate(learner) == 0
    assert_all_is_saved(run)


HANGING = """
import pathlib

def score(episodes):
    pathlib.Path({file!r}).touch()
    while True:
        pass
"""


@pytest.mark.long
def test_a_generator_whose_reward_hangs(daemons, tmp_path: Path):
    file, called = tmp_path / "hanging.py", tmp_path / "called"
    file.write_text(HANGING.format(file=str(called)))
    run = daemons(*ENDLESS, f"data.reward={file}:score")
    run.start("buffer")
    run.start("learner")
    generator = run.start("generator", "--id", "one")
    run.until(called.exists)
    assert terminate(generator) == 0


@pytest.mark.long
def test_a_launch_with_a_frozen_learner(launch):
    run = launch(*set_options(*ENDLESS))
    run.until_step(3)
    frozen = run.child("learner")
    processes = psutil.Process(run.process.pid).children(recursive=True)
    frozen.suspend()
    run.process.send_signal(signal.SIGTERM)
    assert not psutil.wait_procs(processes, STOP_S)[1]
    # The summary takes as long as the machine takes for it.
    run.output = run.process.communicate(timeout=DEADLINE_S)[0]
    assert run.process.returncode == 128 + signal.SIGTERM, run.output
    assert "to continue: streamrl launch" in run.output
