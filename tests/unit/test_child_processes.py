"""The launcher's processes: what fails is restarted or reported, and a signal ends all of them."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

import pytest

from streamrl.cli.display.numbers import summary_rows
from streamrl.cli.processes import command, daemons, restarts
from streamrl.cli.processes.daemons import make_children, supervise
from streamrl.cli.processes.fork_server import ForkServer, forking
from streamrl.cli.processes.restarts import Child
from streamrl.config import RunConfig
from streamrl.errors import (
    ConfigError,
    FencedError,
    Interrupted,
    RolloutError,
    StreamRLError,
    TransportError,
)
from streamrl.placement.hosts import this_machine
from streamrl.placement.make_plan import make_plan
from tests.standins.streamrl_command import DEAF, WAIT, starts_of, write_command
from tests.waiting import block_until, until


class Launch:
    """A run of stand-ins; `notices` are the sentences that the launcher prints."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.notices: list[str] = []
        self.children: Sequence[Child] = ()
        self.lost: StreamRLError | None = None
        self.config = RunConfig.model_validate(
            {
                "run": {"folder": folder, "max_restarts": 3},
                "model": {"path": "m"},
                "data": {"source": "addition"},
                "generator": {"count": 1},
            }
        )
        self.config.run.path.mkdir()
        self.stop_s = self.config.stop_within_s
        self._monkeypatch = monkeypatch

    def run(
        self,
        scripts: Mapping[str, str],
        *,
        then: Callable[[], Awaitable[None]] | None = None,
        strict: bool = False,
        fork_server: ForkServer | None = None,
    ):
        """Runs the roles' scripts; those that are not given wait to be stopped."""
        scripts = {"buffer": WAIT, "learner": WAIT, "generator": WAIT, **scripts}
        file = write_command(self.folder, scripts)
        self._monkeypatch.setattr(restarts, "executable", lambda: str(file))

        async def view(children: Sequence[Child]) -> None:
            self.children = children
            await (asyncio.Event().wait() if then is None else then())
            await asyncio.Event().wait()

        plan = make_plan(self.config, [this_machine()])
        children = make_children(Child, plan, self.notices.append, lambda _: {})
        for one in children:
            one.fork_server = fork_server
        running = supervise(
            children,
            view=view,
            notify=self.notices.append,
            stop_s=self.stop_s,
            strict=strict,
        )
        try:
            self.lost = asyncio.run(running)
        except Interrupted as interruption:
            return interruption.number
        return None

    async def until(self, *files: str) -> None:
        await until(lambda: all((self.folder / file).exists() for file in files))

    def assert_no_process_is_left(self) -> None:
        for one in self.children:
            if one.process is not None:
                with pytest.raises(ProcessLookupError):
                    os.kill(one.process.pid, 0)


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launch:
    monkeypatch.setattr(restarts, "FIRST_DELAY_S", 0.01)
    return Launch(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("exit_code", "kind"), [(2, ConfigError), (3, FencedError), (4, RolloutError)]
)
def test_what_a_restart_cannot_change_ends_the_launch_with_the_process_own_sentence(
    launched: Launch, exit_code, kind
):
    others = "wait_for('buffer.ready', 'learner.ready'); "
    script = others + f"fail({exit_code}, 'reward r.py:score: KeyError: 1 (r.py:2)')"
    sentence = r"^generator-0: reward r\.py:score: KeyError: 1 \(r\.py:2\)"
    with pytest.raises(kind, match=sentence):
        launched.run({"generator": script})
    assert len(starts_of(launched.folder, "generator")) == 1
    assert launched.notices == []
    assert (launched.folder / "learner.ended").exists()
    assert (launched.folder / "buffer.ended").exists()
    launched.assert_no_process_is_left()


def test_what_raises_at_the_same_line_at_once_is_started_twice(launched: Launch):
    with pytest.raises(StreamRLError, match=r"^learner: ValueError: oops \(see .*learner\.log\)$"):
        launched.run({"learner": "fail(1, 'ValueError: oops')"})
    assert len(starts_of(launched.folder, "learner")) == 2
    assert launched.notices == ["learner: ValueError: oops; started again in 0.01 s"]


def test_a_process_that_is_killed_is_started_again_and_continues(launched: Launch, monkeypatch):
    monkeypatch.setattr(daemons, "GRACE_PERIOD_S", 1.5)
    script = "starts < 3 and os.kill(os.getpid(), signal.SIGKILL)"
    assert launched.run({"learner": script}) is None
    first, *others = starts_of(launched.folder, "learner")
    assert "--resume" not in first
    assert [line.endswith("--resume") for line in others] == [True, True]
    assert ["killed by SIGKILL" in notice for notice in launched.notices] == [True, True]
    log = (launched.config.run.path / "logs" / "learner.log").read_text()
    assert log.count("launcher: learner was killed by SIGKILL") == 2


def test_a_buffer_that_a_signal_ends_alone_is_started_again(launched: Launch, monkeypatch):
    monkeypatch.setattr(daemons, "GRACE_PERIOD_S", 1.5)
    again = "open(os.path.join(folder, 'again'), 'w').close(); time.sleep(600)"
    buffer = f"starts < 2 and os.kill(os.getpid(), signal.SIGTERM); {again}"
    assert launched.run({"buffer": buffer, "learner": "wait_for('again')"}) is None
    assert launched.notices == ["buffer: ended with exit code 0; started again in 0.01 s"]
    assert len(starts_of(launched.folder, "buffer")) == 2
    log = (launched.config.run.path / "logs" / "buffer.log").read_text()
    assert log.count("launcher: buffer ended") == 1


def test_the_summary_says_what_was_started_again_how_often_and_why(launched: Launch, monkeypatch):
    monkeypatch.setattr(daemons, "GRACE_PERIOD_S", 1.5)
    learner = "starts < 3 and os.kill(os.getpid(), signal.SIGKILL)"
    second = "open(os.path.join(folder, 'second'), 'w').close(); time.sleep(600)"
    generator = f"starts < 2 and fail(5, 'the buffer is silent'); {second}"
    others = "wait_for('second'); "
    launched.run({"learner": others + learner, "generator": generator})
    rows = dict(summary_rows(launched.config, []))
    assert rows["restarts of learner"] == (
        "2: was killed by SIGKILL, as when memory runs out (2 times)"
    )
    assert rows["restarts of generator-0"] == "1: the buffer is silent"


@pytest.mark.parametrize(
    ("script", "kind", "sentence"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", StreamRLError, "was killed by SIGKILL, as when"),
        ("fail(5, 'the buffer is silent')", TransportError, "the buffer is silent"),
        ("fail(1, 'ValueError: oops')", StreamRLError, "ValueError: oops"),
    ],
)
def test_a_strict_launch_ends_at_the_first_failure(launched: Launch, script, kind, sentence):
    with pytest.raises(kind) as failed:
        launched.run({"learner": script}, strict=True)
    assert str(failed.value).startswith(f"learner: {sentence}")
    assert str(failed.value).endswith("not started again, since the launch is --strict")
    assert len(starts_of(launched.folder, "learner")) == 1
    assert launched.notices == []
    launched.assert_no_process_is_left()


@pytest.mark.parametrize("is_read", [False, True])
def test_a_validator_that_fails_for_good_is_the_exit_code_of_the_launch(
    launched: Launch, monkeypatch, is_read
):
    """In the end, or at once where the run ends by what it finds."""
    monkeypatch.setattr(daemons, "GRACE_PERIOD_S", 1.5)
    validation = {"every": 1, "early_stop": {"patience": int(is_read)}}
    tree = launched.config.model_dump(exclude_unset=True) | {"validation": validation}
    launched.config = RunConfig.model_validate(tree)
    validator = "wait_for('learner.ready'); fail(4, 'no reward has the row')"
    scripts = {"validator": validator, "learner": WAIT if is_read else "wait_for('noticed')"}

    async def notice() -> None:
        await until(lambda: bool(launched.notices))
        (launched.folder / "noticed").touch()

    if is_read:
        with pytest.raises(RolloutError, match="validator: no reward has the row"):
            launched.run(scripts)
        return
    assert launched.run(scripts, then=notice) is None
    assert isinstance(launched.lost, RolloutError)
    (notice,) = launched.notices
    assert notice.startswith("validator: no reward has the row")
    assert notice.endswith("the run goes on without it")


def test_a_strict_launch_that_is_stopped_has_not_failed(launched: Launch):
    async def interrupt() -> None:
        await launched.until("buffer.ready", "learner.ready", "generator.ready")
        os.kill(os.getpid(), signal.SIGTERM)

    assert launched.run({}, then=interrupt, strict=True) is signal.SIGTERM


def test_what_the_launcher_writes_into_a_log_has_the_format_of_the_run(
    launched: Launch, monkeypatch
):
    monkeypatch.setattr(daemons, "GRACE_PERIOD_S", 1.5)
    settings = launched.config.run.model_copy(update={"log_format": "json"})
    launched.config = launched.config.model_copy(update={"run": settings})
    launched.run({"learner": "starts < 2 and os.kill(os.getpid(), signal.SIGKILL)"})
    log = (launched.config.run.path / "logs" / "learner.log").read_text()
    (line,) = map(json.loads, log.splitlines())
    assert line["message"].startswith("was killed by SIGKILL")
    assert (line["role"], line["logger"], line["level"]) == ("learner", "launcher", "error")


def test_a_process_without_a_reason_says_its_exit_code_and_its_log(launched: Launch):
    with pytest.raises(StreamRLError, match=r"^buffer: ended with exit code 9; started again 3 .*"):
        launched.run({"buffer": "sys.exit(9)"})
    assert len(starts_of(launched.folder, "buffer")) == 4


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_stops_every_process(launched: Launch, number):
    async def interrupt() -> None:
        await launched.until("buffer.ready", "learner.ready", "generator.ready")
        os.kill(os.getpid(), number)

    assert launched.run({}, then=interrupt) is number
    ended = [(launched.folder / f"{role}.ended").exists() for role in ("learner", "generator")]
    assert ended == [True, True]
    launched.assert_no_process_is_left()


def test_the_second_signal_kills_what_does_not_stop(launched: Launch):
    async def interrupt_twice() -> None:
        await launched.until("buffer.ready", "learner.ready", "generator.ready")
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0)
        await launched.until("generator.ended")
        states.update({one.role: one.state for one in launched.children})
        os.kill(os.getpid(), signal.SIGINT)

    states: dict[str, str] = {}
    launched.stop_s = 3600.0
    assert launched.run({"learner": DEAF}, then=interrupt_twice) is signal.SIGINT
    assert states["learner"] == "stopping"
    launched.assert_no_process_is_left()


@pytest.mark.parametrize(
    "roles", [("learner",), ("generator",), ("buffer",), ("learner", "buffer")]
)
def test_what_does_not_stop_is_killed_in_time(launched: Launch, monkeypatch, roles):
    monkeypatch.setattr(daemons, "_OTHERS_S", 19.0)
    monkeypatch.setattr(daemons, "_BUFFER_S", 18.5)
    left_s: list[float] = []

    async def interrupt() -> None:
        await launched.until("buffer.ready", "learner.ready", "generator.ready")
        left_s.append(time.monotonic() + launched.config.stop_within_s)
        os.kill(os.getpid(), signal.SIGTERM)

    assert launched.run(dict.fromkeys(roles, DEAF), then=interrupt) is signal.SIGTERM
    assert time.monotonic() < left_s[0]
    launched.assert_no_process_is_left()


def test_a_view_that_fails_is_said_and_the_run_goes_on(launched: Launch, caplog, monkeypatch):
    monkeypatch.setattr(daemons, "GRACE_PERIOD_S", 1.5)

    async def fail() -> None:
        await launched.until("learner.ready")
        (launched.folder / "failed").touch()
        raise IndexError("list index out of range")

    assert launched.run({"learner": "wait_for('failed')"}, then=fail) is None
    (record,) = caplog.records
    assert record.message == "the view of the run has failed; the run goes on"
    assert isinstance(record.exc_info[1], IndexError)


def test_a_signal_at_the_very_start_stops_what_is_being_started(launched: Launch):
    async def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    launched.stop_s = 3600.0
    assert launched.run({}, then=interrupt) is signal.SIGINT
    launched.assert_no_process_is_left()


def test_a_signal_ends_the_wait_before_a_restart(launched: Launch, monkeypatch):
    monkeypatch.setattr(restarts, "FIRST_DELAY_S", 600.0)
    monkeypatch.setattr(restarts, "LONGEST_DELAY_S", 600.0)

    async def interrupt() -> None:
        async with asyncio.timeout(120):
            while not launched.notices:
                await asyncio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    assert launched.run({"generator": "sys.exit(9)"}, then=interrupt) is signal.SIGTERM
    assert len(starts_of(launched.folder, "generator")) == 1


CALL = """
import sys
from streamrl.cli.main import main
from streamrl.cli.processes import command
command.executable = lambda: {file!r}
from streamrl.cli.check import command as check
check.main = lambda arguments: command.call("evaluate", "it")
sys.exit(main(["check", "unused"]))
"""


def calling(folder: Path, script: str) -> "subprocess.Popen[str]":
    """A command of `streamrl` that calls another one, which runs the script."""
    code = CALL.format(file=str(write_command(folder, {"evaluate": script})))
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code], stdout=pipe, stderr=pipe, text=True)


@pytest.mark.parametrize(
    ("script", "kind", "sentence"),
    [
        ("fail(2, 'run.x: is wrong')", ConfigError, "evaluate: run.x: is wrong"),
        ("fail(5, 'Redis is down')", TransportError, "evaluate: Redis is down"),
        ("sys.exit(9)", StreamRLError, "evaluate: ended with exit code 9"),
    ],
)
def test_a_command_that_another_one_calls_fails_in_one_sentence(
    tmp_path, monkeypatch, script, kind, sentence
):
    file = write_command(tmp_path, {"evaluate": script})
    monkeypatch.setattr(command, "executable", lambda: str(file))
    with pytest.raises(kind) as failed:
        command.call("evaluate", "it")
    assert (type(failed.value), str(failed.value)) == (kind, sentence)
    write_command(tmp_path, {"evaluate": "print(0.5)"})
    assert command.call("evaluate", "it") == "0.5\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_command_that_another_one_calls(tmp_path, number):
    caller = calling(tmp_path, WAIT)
    block_until((tmp_path / "evaluate.ready").exists)
    caller.send_signal(number)
    with contextlib.closing(caller.stderr):
        caller.communicate(timeout=120)
    assert caller.returncode == 128 + number
    assert (tmp_path / "evaluate.ended").exists()


@pytest.mark.parametrize(
    ("number", "again"), [(signal.SIGINT, "Ctrl-C again"), (signal.SIGTERM, "a second signal")]
)
def test_the_first_signal_says_what_it_does_and_what_a_second_one_would(
    launched: Launch, number, again
):
    async def interrupt() -> None:
        await launched.until("buffer.ready", "learner.ready", "generator.ready")
        os.kill(os.getpid(), number)

    assert launched.run({}, then=interrupt) is number
    assert launched.notices == [f"finishing the step and saving it; {again} stops now"]


def test_a_signal_while_the_libraries_are_imported_ends_the_launch_at_once(launched: Launch):
    async def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    with forking() as server:
        assert server is not None
        os.kill(server._process.pid, signal.SIGSTOP)
        # Whoever waited for it would wait for good.
        assert launched.run({}, then=interrupt, fork_server=server) is signal.SIGINT
    assert [one.process for one in launched.children] == [None, None, None]
