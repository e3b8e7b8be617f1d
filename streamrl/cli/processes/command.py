"""Commands of `streamrl` in processes of their own: what they import is freed when they end."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from streamrl.cli.arguments.commands import COMMANDS
from streamrl.cli.processes.fork_server import Descriptors, ForkedProcess, ForkServer
from streamrl.errors import ErrorPipe, Interrupted, StreamRLError, error_of, sentence_of

GRACE_PERIOD_S = 10.0
T = TypeVar("T")


def call(*arguments: str, fork_server: ForkServer | None = None) -> str:
    """Run `streamrl` with these arguments to its end; its standard output.

    Waits as long as the command runs; its messages go to standard error. A signal that ends this
    process ends the command, too.

    Raises:
        StreamRLError: it failed; of the failure's kind, with the command's own sentence.
    """
    with sigterm_raises(), ErrorPipe() as pipe, tempfile.TemporaryFile("w+") as output:
        process = _start((executable(), *arguments), output.fileno(), pipe, fork_server)
        try:
            code = _wait(process)
        except KeyboardInterrupt:
            _end(process)
            raise
        if code != 0:
            two = " ".join(arguments[:2])
            name = two if two in COMMANDS else arguments[0]
            raise error_of(code, f"{name}: {sentence_of(code, pipe.read())}")
        output.seek(0)
        return output.read()


def _start(
    command: Sequence[str], output: int, pipe: ErrorPipe, fork_server: ForkServer | None
) -> "subprocess.Popen[bytes] | ForkedProcess":
    environment = {**os.environ, **pipe.environment}
    if fork_server is not None:
        to = Descriptors(output, sys.stderr.fileno(), pipe.descriptor)
        if forked := fork_server.fork_now(command, environment, to):
            return forked
    return subprocess.Popen(
        command,
        stdout=output,
        start_new_session=True,
        env=environment,
        pass_fds=(pipe.descriptor,),
    )


def _wait(process: "subprocess.Popen[bytes] | ForkedProcess", within_s: float | None = None) -> int:
    if isinstance(process, ForkedProcess):
        return process.join(within_s)
    return process.wait(within_s)


def executable() -> str:
    """The `streamrl` command of this Python."""
    beside = Path(sys.executable).with_name("streamrl")
    path = str(beside) if beside.exists() else shutil.which("streamrl")
    if path is None:
        raise StreamRLError("the command `streamrl` is not installed for this Python")
    return path


def _end(process: "subprocess.Popen[bytes] | ForkedProcess") -> None:
    """End the process and those that it started. Waits GRACE_PERIOD_S, then kills them; a second
    signal kills them at once."""
    _signal(process, signal.SIGTERM)
    try:
        _wait(process, GRACE_PERIOD_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        _signal(process, signal.SIGKILL)
        _wait(process)


def _signal(process: "subprocess.Popen[bytes] | ForkedProcess", number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, _: FrameType | None) -> None:
    raise Interrupted(signal.Signals(number))


async def unless_signaled(
    work: Coroutine[Any, Any, T],
    signals: Sequence[signal.Signals] = (signal.SIGINT, signal.SIGTERM),
) -> T:
    """The work's result.

    Raises:
        Interrupted: a signal came first, which cancels it.
    """
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)
    signaled: list[signal.Signals] = []

    def on_signal(number: signal.Signals) -> None:
        signaled.append(number)
        task.cancel()

    for number in signals:
        loop.add_signal_handler(number, on_signal, number)
    try:
        return await task
    except asyncio.CancelledError:
        if signaled:
            raise Interrupted(signaled[0]) from None
        raise
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
