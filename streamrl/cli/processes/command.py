"""Runs commands of `streamrl` in separate processes, so that what they import is freed when they
end."""

import asyncio
import os
import shutil
import signal
import stat
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from streamrl.cli.arguments.commands import COMMANDS
from streamrl.cli.processes.fork_server import Descriptors, ForkServer, start
from streamrl.errors import ErrorPipe, Interrupted, StreamRLError, error_of, sentence_of
from streamrl.shutdown import Orders, ending_signals

GRACE_PERIOD_S = 10.0
_STANDARD_ERROR = 2
T = TypeVar("T")


def call(*arguments: str, fork_server: ForkServer | None = None) -> str:
    """Run `streamrl` with these arguments; return its standard output.

    Waits as long as the command runs; its messages go to standard error. A signal that ends this
    process ends the command, too.

    Raises:
        StreamRLError: it failed; class and message are those of the command's error.
    """
    with signals_raise(), ErrorPipe() as pipe, tempfile.TemporaryFile("w+") as output:
        to = Descriptors(output.fileno(), _STANDARD_ERROR, pipe.descriptor)
        environment = {**os.environ, **pipe.environment}
        running = _run((executable(), *arguments), environment, to, fork_server)
        code = asyncio.run(unless_signaled(running))
        if code != 0:
            two = " ".join(arguments[:2])
            name = two if two in COMMANDS else arguments[0]
            raise error_of(code, f"{name}: {sentence_of(code, pipe.read())}")
        output.seek(0)
        return output.read()


async def _run(
    command: Sequence[str],
    environment: Mapping[str, str],
    to: Descriptors,
    fork_server: ForkServer | None,
) -> int:
    """Run a command and return its exit code. If cancelled, end the process and those that it
    started; kill them after GRACE_PERIOD_S, or at once if cancelled again."""
    process = await start(command, environment, to, fork_server, asyncio.Event())
    assert process is not None, "nobody stops it"
    try:
        return await process.wait()
    except asyncio.CancelledError:
        _signal(process.pid, signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), GRACE_PERIOD_S)
        except (TimeoutError, asyncio.CancelledError):
            _signal(process.pid, signal.SIGKILL)
            await process.wait()
        raise


def executable() -> str:
    beside = Path(sys.executable).with_name("streamrl")
    path = str(beside) if beside.exists() else shutil.which("streamrl")
    if path is None:
        raise StreamRLError("the command `streamrl` is not installed for this Python")
    return path


def _signal(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)


@contextmanager
def signals_raise() -> Iterator[None]:
    """Make SIGTERM and a closing terminal end the block as Ctrl-C does."""
    numbers = [number for number in ending_signals() if number is not signal.SIGINT]
    before = {number: signal.signal(number, _interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, _: FrameType | None) -> None:
    hear(signal.Signals(number))
    if number == signal.SIGHUP:
        signal.signal(number, signal.SIG_IGN)
    raise Interrupted(signal.Signals(number))


def hear(number: signal.Signals) -> None:
    """Note a signal: after SIGHUP, do not write to a terminal that is gone, since that would
    fail."""
    for output in (1, 2) if number is signal.SIGHUP else ():
        with suppress(OSError):
            if stat.S_ISCHR(os.fstat(output).st_mode) and not os.isatty(output):
                with open(os.devnull, "wb") as nothing:
                    os.dup2(nothing.fileno(), output)


@contextmanager
def on_orders(react: Callable[[signal.Signals], object]) -> Iterator[None]:
    """Call `react` in the running loop at each order to end. After the block signals have their
    former effect, except SIGHUP if it came: a second one may come late, and is ignored."""
    loop, orders = asyncio.get_running_loop(), Orders()
    heard: set[signal.Signals] = set()

    def on_signal(number: signal.Signals) -> None:
        hear(number)
        heard.add(number)
        if orders.count(number):
            react(number)

    before = {number: signal.getsignal(number) for number in ending_signals()}
    for number in before:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            is_late = number is signal.SIGHUP and number in heard
            signal.signal(number, signal.SIG_IGN if is_late else handler)


async def unless_signaled(work: Coroutine[Any, Any, T]) -> T:
    """Return the work's result. If a signal comes first, cancel the work and raise Interrupted."""
    task = asyncio.ensure_future(work)
    signaled: list[signal.Signals] = []

    def cancel(number: signal.Signals) -> None:
        signaled.append(number)
        task.cancel()

    with on_orders(cancel):
        try:
            return await task
        except asyncio.CancelledError:
            if signaled:
                raise Interrupted(signaled[0]) from None
            raise
