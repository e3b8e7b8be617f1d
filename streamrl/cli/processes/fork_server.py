"""Starts commands on this machine as forks of one process that has imported what they need.

The server imports torch and transformers while the launch checks and plans; a daemon forked from it
starts at once and shares its memory.

Invariant: a forked command is like an executed one: a child of the launcher, with its own
arguments, environment, output, session and exit code. Without a server, or after it failed,
commands are executed. On a machine with GPUs there is none: a fork may break their drivers.

The server waits for requests, and ends when the launcher ends. It forks twice: the first fork ends
at once, so that the second becomes a child of the launcher, which adopts orphans for that moment.
The launcher imports this module; `python -m` of it is the server.
"""

import argparse
import asyncio
import atexit
import gc
import importlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from ctypes import CDLL, c_int, memmove
from pathlib import Path
from typing import NamedTuple, NoReturn

import msgspec

from streamrl.cli.arguments.commands import COMMANDS
from streamrl.cli.main import import_command, main
from streamrl.errors import PARENT_VARIABLE

_PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 15, 36
_MAX_BYTES = 2**17
_SHARED = ("buffer", "generator", "validator")
"""Commands whose imports the server makes. Other commands import the rest themselves; the learner
does so while the generators load the model."""
_CHOSEN = (
    "actors.engines.hf.engine",
    "actors.prompts.fitting",
    "buffers.zmq.client",
    "transformers.generation.utils",
    "transformers.modeling_layers",
)
"""Modules that these commands import under the usual settings of a machine without GPUs; those of
transformers come with every model."""
_POLL_S = 0.0005
_ROOM = 4000
"""Bytes of padding arguments, which a forked process overwrites with its own command line, for
`ps`."""


class _Request(msgspec.Struct, frozen=True):
    command: list[str]
    environment: dict[str, str]
    launcher: int


class Descriptors(NamedTuple):
    """What a command writes to; `record` belongs to an `ErrorPipe`."""

    output: int
    errors: int
    record: int


class ForkedProcess:
    """A child of this process, with the used part of `asyncio.subprocess.Process`'s interface."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._descriptor = os.pidfd_open(pid)
        self._ending: asyncio.Task[None] | None = None

    def send_signal(self, number: signal.Signals) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    async def wait(self) -> int:
        """Wait for its end; return its exit code, -N if signal N ended it. Several tasks may
        wait."""
        if self._ending is None:
            self._ending = asyncio.create_task(_readable(self._descriptor))
        await asyncio.shield(self._ending)
        return self._reap()

    def _reap(self) -> int:
        if self.returncode is None:
            os.close(self._descriptor)
            _, status = os.waitpid(self.pid, 0)
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class ForkServer:
    """The launcher's side: `fork` starts a command; `close` ends the server, but not its
    commands."""

    def __init__(self) -> None:
        """Start the server, which begins to import the daemons. Does not wait."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._turn = asyncio.Lock()
        modules = [*(COMMANDS[role].entry.partition(":")[0] for role in _SHARED), *_CHOSEN]
        with theirs:
            number = str(theirs.fileno())
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, number, *modules, " " * _ROOM],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, PARENT_VARIABLE: str(os.getpid())},
                pass_fds=(theirs.fileno(),),
            )

    async def fork(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        descriptors: Descriptors,
        stopping: asyncio.Event,
    ) -> ForkedProcess | None:
        """Start a command line of `streamrl`. Waits for the server's imports; None if the server is
        gone, or `stopping` is set first."""
        async with self._turn:
            if stopping.is_set():
                return None
            with _reaper_of_orphans(), self._asked(command, environment, descriptors) as answer:
                answered = asyncio.create_task(_readable(answer))
                asked_to_stop = asyncio.create_task(stopping.wait())
                either = (answered, asked_to_stop)
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                is_answered = answered.done()
                for task in either:
                    task.cancel()
                pid = os.read(answer, 32) if is_answered else b""
                return ForkedProcess(int(pid)) if pid else None

    @contextmanager
    def _asked(
        self, command: Sequence[str], environment: Mapping[str, str], descriptors: Descriptors
    ) -> Iterator[int]:
        """Send a request. Yields a pipe that will have the process id, or will just be closed if
        there is no process."""
        request = _Request(list(command), dict(environment), os.getpid())
        answer, theirs = os.pipe()
        try:
            # A request that is too long or not text is not sent, so the pipe is just closed.
            with suppress(OSError, ValueError):
                message = msgspec.json.encode(request)
                socket.send_fds(self._socket, [message], [*descriptors, theirs])
            os.close(theirs)
            yield answer
        finally:
            os.close(answer)

    def close(self) -> None:
        """End the server. Further calls have no effect."""
        self._socket.close()
        self._process.kill()
        self._process.wait()


def launch(arguments: argparse.Namespace) -> int:
    """Run `streamrl launch`: import, check and plan while the server imports."""
    with forking() as fork_server:
        code: int = import_command("streamrl.cli.launch").main(arguments, fork_server)
        return code


@contextmanager
def forking() -> Iterator[ForkServer | None]:
    """A server during the block; None on a system that lacks what it needs."""
    if not _can_fork():
        yield None
        return
    server = ForkServer()
    try:
        yield server
    finally:
        server.close()


def _can_fork() -> bool:
    if sys.platform != "linux":
        return False
    with suppress(OSError):
        os.close(os.pidfd_open(os.getpid()))
        return True
    return False


async def start(
    command: Sequence[str],
    environment: Mapping[str, str],
    descriptors: Descriptors,
    fork_server: ForkServer | None,
    stopping: asyncio.Event,
) -> asyncio.subprocess.Process | ForkedProcess | None:
    """Start a command line of `streamrl`, as a fork if there is a server. Return None if `stopping`
    is set before it could start."""
    if fork_server is not None:
        forked = await fork_server.fork(command, environment, descriptors, stopping)
        if forked is not None or stopping.is_set():
            return forked
    # The process has its own session, so that Ctrl-C in the terminal signals only the launcher.
    return await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=descriptors.output,
        stderr=descriptors.errors,
        start_new_session=True,
        env=environment,
        pass_fds=(descriptors.record,),
    )


async def _readable(descriptor: int) -> None:
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(descriptor)


@contextmanager
def _reaper_of_orphans() -> Iterator[None]:
    """During the block, orphaned descendants become children of this process instead of process
    1."""
    prctl = CDLL(None).prctl
    prctl(c_int(_PR_SET_CHILD_SUBREAPER), 1)
    try:
        yield
    finally:
        prctl(c_int(_PR_SET_CHILD_SUBREAPER), 0)


def _serve(connection: socket.socket) -> tuple[_Request, list[int]]:
    """Serve requests. Never returns in the server; in each forked process it returns the request
    and its descriptors."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, _MAX_BYTES, 4)
        if not message:
            sys.exit(0)
        first = os.fork()
        if first == 0:
            first = os.getpid()
            if os.fork() != 0:
                os._exit(0)
            while os.getppid() == first:
                time.sleep(_POLL_S)
            return msgspec.json.decode(message, type=_Request), descriptors
        os.waitpid(first, 0)
        for descriptor in descriptors:
            os.close(descriptor)


def _become(request: _Request, descriptors: Descriptors, answer: int) -> None:
    import numpy
    import torch

    from streamrl.errors import ERROR_FILE_VARIABLE
    from streamrl.placement.hosts import num_threads

    if os.getppid() != request.launcher:
        os._exit(1)
    os.setsid()
    os.dup2(descriptors.output, 1)
    os.dup2(descriptors.errors, 2)
    os.close(descriptors.output)
    os.close(descriptors.errors)
    os.environ.clear()
    os.environ.update(request.environment)
    os.environ[ERROR_FILE_VARIABLE] = f"/dev/fd/{descriptors.record}"
    sys.argv = request.command
    _show(request.command)
    # The libraries were imported before the environment and the seed of this process were set.
    torch.set_num_threads(num_threads(otherwise=torch.get_num_threads()))
    numpy.random.seed()
    try:
        os.write(answer, str(os.getpid()).encode())
    except BrokenPipeError:
        os._exit(1)
    os.close(answer)


def _show(command: Sequence[str]) -> None:
    """Make `ps` show the command line; proc(5) says where the kernel reads it."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    line = "\0".join(command).encode()[: end - start - 1]
    memmove(start, line.ljust(end - start, b"\0"), end - start)
    CDLL(None).prctl(c_int(_PR_SET_NAME), Path(command[0]).name.encode())


def _main() -> NoReturn:
    code = 1

    def leave() -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(code)

    # Registered first, so called last. It replaces the interpreter's own shutdown, which would
    # write to memory that the processes share, and so copy it.
    atexit.register(leave)
    _, number, *modules, _ = sys.argv
    connection = socket.socket(fileno=int(number))
    gc.disable()
    for module in modules:
        importlib.import_module(module)
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    # Compiles the patterns of all models' weights, which the first load in a process would do.
    get_checkpoint_conversion_mapping("")
    gc.freeze()
    gc.enable()
    request, descriptors = _serve(connection)
    connection.close()
    *given, answer = descriptors
    _become(request, Descriptors(*given), answer)
    try:
        code = main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        raise
    sys.exit(code)


if __name__ == "__main__":
    _main()
