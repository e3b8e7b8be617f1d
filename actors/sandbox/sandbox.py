"""Runs Python code that nobody has read, in a process of its own, and ends all that it started.

Invariant: `run` returns or raises only when the code's processes are gone and its folder, too; the
daemon's environment, files and network are not the code's.
"""

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from actors.sandbox.isolation import IsolationChoice, choose, command, job
from actors.sandbox.limits import SandboxLimits, SandboxResult

# The supervisor kills and reaps in milliseconds, unless the machine is overloaded.
_GRACE_S = 5.0


class Sandbox:
    """Runs programs, so many at a time."""

    def __init__(
        self,
        limits: SandboxLimits | None = None,
        *,
        max_concurrent: int = 4,
        isolation: IsolationChoice = "auto",
    ) -> None:
        """
        Args:
            isolation: how to keep programs apart.
        """
        self.limits = SandboxLimits() if limits is None else limits
        self._isolation = isolation
        self._slots = asyncio.Semaphore(max_concurrent)

    async def run(
        self,
        code: str,
        *,
        stdin: str = "",
        limits: SandboxLimits | None = None,
    ) -> SandboxResult:
        """What became of the code. Waits for a slot, which is not its time, then for its end or
        that of its time.

        Raises:
            ConfigError: this machine cannot keep the code apart.
            OSError: the code was not started.
        """
        limits = self.limits if limits is None else limits
        async with self._slots:
            isolation = await asyncio.to_thread(choose, self._isolation)
            with _folder_of(code) as folder, _file_of(stdin) as given:
                return await _run(job(isolation, folder, limits), given, limits)


@contextlib.contextmanager
def _folder_of(code: str) -> Iterator[Path]:
    """A new folder with the code in `main.py`, which is removed in the end."""
    with tempfile.TemporaryDirectory(prefix="sandbox-", ignore_cleanup_errors=True) as name:
        folder = Path(name).resolve()
        folder.joinpath("main.py").write_bytes(code.encode(errors="replace"))
        yield folder


@contextlib.contextmanager
def _file_of(text: str) -> Iterator[int]:
    """An open file of the text in memory, which nobody can change: programs may ask a standard
    input for its size, which a pipe does not have."""
    descriptor = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(text.encode(errors="replace"))
        os.lseek(descriptor, 0, os.SEEK_SET)
        size = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, size | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL)
        yield descriptor
    finally:
        os.close(descriptor)


async def _run(job: Mapping[str, Any], stdin: int, limits: SandboxLimits) -> SandboxResult:
    """Waits for the supervisor's end, for the time limit or for too much output."""
    status, written = os.pipe()
    try:
        process = await _start(job, stdin, written)
        outputs = _Output(process.stdout, limits), _Output(process.stderr, limits)
        try:
            is_timed_out = await _follow(process, outputs, limits.time_s)
        finally:
            await _end(process, outputs)
        outcome = json.loads(os.read(status, 2**16) or b"{}")
    finally:
        os.close(status)
    if "error" in outcome:
        raise OSError(f"the sandbox cannot start a program: {outcome['error']}")
    is_cut = any(output.is_cut for output in outputs)
    return SandboxResult(
        stdout=outputs[0].text,
        stderr=outputs[1].text,
        exit_code=None if is_timed_out or is_cut else outcome.get("exit_code"),
        is_timed_out=is_timed_out,
        is_output_cut=is_cut,
        is_out_of_memory=outcome.get("is_out_of_memory", False),
    )


async def _start(job: Mapping[str, Any], stdin: int, status: int) -> Process:
    """The supervisor. Closes this process's end of the status pipe, however it goes."""
    try:
        return await asyncio.create_subprocess_exec(
            *command(job, status),
            stdin=stdin,
            stdout=PIPE,
            stderr=PIPE,
            pass_fds=(status,),
            start_new_session=True,
            env={},
        )
    finally:
        os.close(status)


class _Output:
    """What a program writes to one stream, up to the limit."""

    def __init__(self, stream: asyncio.StreamReader | None, limits: SandboxLimits) -> None:
        assert stream is not None, "the program's streams are pipes"
        self._stream = stream
        self._longest = limits.output_bytes
        self._content = b""

    @property
    def is_cut(self) -> bool:
        return len(self._content) > self._longest

    @property
    def text(self) -> str:
        return self._content[: self._longest].decode(errors="replace")

    async def read(self) -> None:
        """Returns at the stream's end, or when there is more than the limit."""
        while not self.is_cut and (chunk := await self._stream.read(2**16)):
            self._content += chunk

    async def drain(self) -> None:
        """Waits for the stream's end, which comes when the program has been ended."""
        while await self._stream.read(2**16):
            pass


async def _follow(process: Process, outputs: tuple[_Output, _Output], time_s: float) -> bool:
    """Whether the program ran out of time. Waits for its end, for `time_s` or for a flood."""
    readings = [asyncio.create_task(output.read()) for output in outputs]
    ended = asyncio.create_task(process.wait())
    try:
        async with asyncio.timeout(time_s):
            for reading in asyncio.as_completed(readings):
                await reading
                if any(output.is_cut for output in outputs):
                    return False
            await ended
    except TimeoutError:
        return True
    finally:
        for task in (*readings, ended):
            task.cancel()
        await asyncio.gather(*readings, ended, return_exceptions=True)
    return False


async def _end(process: Process, outputs: tuple[_Output, _Output]) -> None:
    """Ends the supervisor, and with it all that the program started. Waits `_GRACE_S` at most
    before it kills."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
    try:
        async with asyncio.timeout(_GRACE_S):
            await asyncio.gather(process.wait(), *(output.drain() for output in outputs))
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
