"""Reward calls in separate processes. A process whose call hangs is killed; the next call starts
another one.

A process runs `actors.rewards.calls.isolated_worker`: it reads requests from standard input and
answers through a pipe; what it prints is read from its output.
Invariant: a process serves one call at a time; if a call does not end, the process is killed with
everything that it has started.
"""

import asyncio
import contextlib
import os
import signal
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from actors.rewards.calls.limits import OutputLimit
from streamrl.errors import RolloutError
from streamrl.interfaces import Episode, Score

_START_S, _GRACE_S = 120.0, 5.0
LENGTH = struct.Struct("<I")
"""The length that precedes each message."""


class WorkerSetup(msgspec.Struct, frozen=True):
    """What a process needs to make the function; `name` appears in errors."""

    reward: str
    kwargs: Mapping[str, Any]
    name: str
    data_source_key: str


class WorkerAnswer(msgspec.Struct, frozen=True):
    """The scores, or the sentence of an error."""

    scores: list[Score | None] = []
    error: str = ""


class Processes:
    """The processes of one reward; as many as calls run at a time."""

    def __init__(self, setup: WorkerSetup, output: OutputLimit) -> None:
        self._setup = setup
        self._title = f"reward {setup.name}"
        self._output = output
        self._idle: list[_Worker] = []

    async def prepare(self) -> None:
        """Wait until a process has loaded the function, at most `_START_S`.

        Raises:
            RolloutError: it has not started.
        """
        if self._idle:
            return
        try:
            async with asyncio.timeout(_START_S):
                self._idle.append(await _Worker.start(self._setup, self._output))
        except (EOFError, TimeoutError, OSError) as error:
            raise RolloutError(f"{self._title}: its process has not started: {error}") from error

    async def run(self, episodes: Sequence[Episode]) -> list[Score | None]:
        """Score in the prepared process. Waits for its answer.

        Raises:
            RolloutError: the function raised, answered nonsense, or ended its process.
        """
        try:
            request = msgspec.msgpack.encode(list(episodes), enc_hook=plain)
        except (TypeError, ValueError, OverflowError) as error:
            raise RolloutError(
                f"{self._title}: a row cannot be sent to its process ({error}); use isolation: "
                "thread"
            ) from error
        worker = self._idle.pop()
        try:
            answer = await worker.ask(request)
        except (EOFError, msgspec.DecodeError) as error:
            raise RolloutError(f"{self._title}: {error}") from error
        self._idle.append(worker)
        if answer.error:
            raise RolloutError(answer.error)
        return answer.scores


class _Worker:
    """One process, and the pipes to it."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        answers: asyncio.StreamReader,
        output: OutputLimit,
    ) -> None:
        self._process = process
        self._answers = answers
        self._printing = asyncio.create_task(_pass_on(process, output))

    @classmethod
    async def start(cls, setup: WorkerSetup, output: OutputLimit) -> "_Worker":
        request = msgspec.msgpack.encode(setup, enc_hook=plain)
        readable, writable = os.pipe()
        answers = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(answers)
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: protocol, os.fdopen(readable, "rb", 0)
        )
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "actors.rewards.calls.isolated_worker",
                str(writable),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                pass_fds=(writable,),
                start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
        finally:
            os.close(writable)
        worker = cls(process, answers, output)
        await worker.ask(request)
        return worker

    async def ask(self, request: bytes) -> WorkerAnswer:
        """Send a request and wait for the answer. Raises EOFError if the function has ended its
        process; on any other failure, or if the wait is canceled, the process is killed."""
        assert self._process.stdin is not None, "it was started with a pipe"
        try:
            # No drain: a process that does not read is killed at the time-out of its call.
            self._process.stdin.write(LENGTH.pack(len(request)) + request)
            (length,) = LENGTH.unpack(await self._answers.readexactly(LENGTH.size))
            content = await self._answers.readexactly(length)
            return msgspec.msgpack.decode(content, type=WorkerAnswer)
        except asyncio.IncompleteReadError as error:
            # The process has closed the pipe, so its exit code is settled.
            await self._end()
            raise EOFError(f"its process ended {_how(self._process.returncode)}") from error
        except BaseException:
            await self._end()
            raise

    async def _end(self) -> None:
        """Kill it with everything that it has started. Wait for its end and for the end of its
        output, at most `_GRACE_S`: a process that left its group may hold the output open."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await asyncio.wait({self._printing}, timeout=_GRACE_S)


async def _pass_on(process: asyncio.subprocess.Process, output: OutputLimit) -> None:
    """Pass on what the process prints, as far as the limit admits. Waits for its end."""
    assert process.stdout is not None, "it was started with a pipe"
    while chunk := await process.stdout.read(2**16):
        if output.admits(len(chunk)):
            sys.stderr.write(chunk.decode(errors="replace"))
    await process.wait()


def _how(code: int | None) -> str:
    if code is None:
        return "its answers and cannot be killed"
    return f"with exit code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"


def plain(value: Any) -> Any:
    """An array or a number of numpy, or a path, as plain data."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} is no plain data")
