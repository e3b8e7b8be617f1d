"""Runs untrusted Python code in a separate process, and ends everything that it started.

Invariant: `run` returns or raises only when the code's processes and its folder are gone; the code
has no access to the daemon's environment, files and network. An isolation is used only after a
probe that attempts forbidden things was stopped by it; `none` is used only if the configuration
says so.
"""

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import socket
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from actors.sandbox import landlock
from actors.sandbox.isolation import KINDS, Isolation, IsolationChoice, SandboxLimits, command, job
from streamrl.errors import ConfigError

_PROBE = """
import os, socket, sys
port, process, outside = sys.stdin.read().split(maxsplit=2)
for name, attempt in (
    ("the network", lambda: socket.create_connection(("127.0.0.1", int(port)), timeout=5)),
    ("other processes", lambda: os.kill(int(process), 0)),
    ("other processes' memory", lambda: open(f"/proc/{process}/environ")),
    ("files outside its folder", lambda: open(outside)),
):
    try:
        attempt()
    except OSError:
        continue
    sys.exit(f"a program reaches {name}")
print("held")
"""
# The supervisor kills and reaps in milliseconds, unless the machine is overloaded.
_GRACE_S = 5.0
_PROBE_LIMITS = SandboxLimits(time_s=30.0)


@dataclass(frozen=True)
class SandboxResult:
    """The result of a program."""

    stdout: str
    stderr: str
    exit_code: int | None
    """Negative: the signal that ended it. None: a limit ended it, see the flags."""
    is_timed_out: bool = False
    is_output_cut: bool = False
    is_out_of_memory: bool = False
    """Its processes together used too much memory; in a single process Python raises
    MemoryError."""

    @property
    def is_success(self) -> bool:
        return self.exit_code == 0

    def failure(self, limits: SandboxLimits) -> str:
        """Why the program did not succeed, in a few words; "" if it did."""
        if self.is_timed_out:
            return f"it was ended after {limits.time_s:g} s"
        if self.is_output_cut:
            return f"it was ended after writing more than {limits.output_bytes} bytes"
        if self.is_out_of_memory:
            return f"it was ended for using more than {limits.memory_bytes} bytes of memory"
        if self.exit_code is not None and self.exit_code < 0:
            return f"it was ended by {_signal_name(-self.exit_code)}"
        if self.exit_code is None:
            return "it was ended from outside"
        return f"it ended with exit code {self.exit_code}" if self.exit_code else ""


def _signal_name(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
    return "SIGXCPU, for its CPU time" if name == "SIGXCPU" else name


class Sandbox:
    """Runs programs, at most `max_concurrent` at a time."""

    def __init__(
        self,
        limits: SandboxLimits | None = None,
        *,
        max_concurrent: int = 4,
        isolation: IsolationChoice = "auto",
    ) -> None:
        self.limits = SandboxLimits() if limits is None else limits
        self._isolation = isolation
        self._slots = asyncio.Semaphore(max_concurrent)

    async def run(
        self, code: str, *, stdin: str = "", limits: SandboxLimits | None = None
    ) -> SandboxResult:
        """Run code and return its result. Waits for a slot, which does not count as its time, then
        until it ends or its time is over.

        Raises:
            ConfigError: this machine cannot isolate the code.
            OSError: the code was not started.
        """
        limits = self.limits if limits is None else limits
        async with self._slots:
            isolation = await asyncio.to_thread(choose, self._isolation)
            try:
                return await _program(isolation, code, stdin, limits)
            except OSError as error:
                raise OSError(f"the sandbox cannot start a program: {error}") from error


def choose(wanted: IsolationChoice = "auto") -> Isolation:
    """Choose the isolation that programs get. The first time it waits for one or two probes, a
    fraction of a second each.

    Raises:
        ConfigError: this machine does not support it; the message says what is missing.
    """
    if sys.platform != "linux":
        raise ConfigError("code that a model wrote is run on Linux only")
    if wanted == "none":
        return wanted
    kinds = KINDS if wanted == "auto" else (wanted,)
    if found := next((kind for kind in kinds if not why_not(kind)), None):
        return found
    reasons = "; ".join(f"{kind}: {why_not(kind)}" for kind in kinds)
    raise ConfigError(
        f"this machine cannot keep code that a model wrote apart ({reasons}); `isolation: none` in "
        "kwargs runs it all the same, with the files, processes and network of this user in reach"
    )


@cache
def why_not(kind: Isolation) -> str:
    """What this machine lacks for an isolation; "" if it works. Waits for a probe."""
    if kind == "landlock" and not landlock.version():
        return "the kernel has no Landlock, or the container forbids it"
    # Other users cannot enter this folder, so a probe of root stays root, whom file permissions do
    # not stop.
    with socket.create_server(("127.0.0.1", 0)) as server, tempfile.TemporaryDirectory() as own:
        outside = Path(own, "outside")
        outside.touch()
        given = f"{server.getsockname()[1]} {os.getpid()} {outside}"
        try:
            result = asyncio.run(_program(kind, _PROBE, given, _PROBE_LIMITS, own))
        except OSError as error:
            return str(error)
    if result.stdout == "held\n":
        return ""
    reason = result.stderr.strip()[-500:] or result.failure(_PROBE_LIMITS)
    return reason or "a program did not end"


@contextlib.contextmanager
def _folder_of(code: str, within: str | None) -> Iterator[Path]:
    """A new folder with the code in `main.py`; the folder is removed at the end."""
    with tempfile.TemporaryDirectory(
        prefix="sandbox-", dir=within, ignore_cleanup_errors=True
    ) as name:
        folder = Path(name).resolve()
        folder.joinpath("main.py").write_bytes(code.encode(errors="replace"))
        yield folder


@contextlib.contextmanager
def _file_of(text: str) -> Iterator[int]:
    """An open, sealed file in memory with the text. Programs may ask standard input for its size,
    which a pipe does not have."""
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


async def _program(
    isolation: Isolation, code: str, stdin: str, limits: SandboxLimits, within: str | None = None
) -> SandboxResult:
    """Run a program and return its result. Waits for its end, the time limit or too much output.

    Raises:
        OSError: the program was not started.
    """
    with _folder_of(code, within) as folder, _file_of(stdin) as given:
        status, written = os.pipe()
        try:
            try:
                process = await asyncio.create_subprocess_exec(
                    *command(job(isolation, folder, limits), written),
                    stdin=given,
                    stdout=PIPE,
                    stderr=PIPE,
                    pass_fds=(written,),
                    start_new_session=True,
                    env={},
                )
            finally:
                os.close(written)
            assert process.stdout is not None, "it was started with a pipe"
            assert process.stderr is not None, "it was started with a pipe"
            stdout = _Output(process, process.stdout, limits.output_bytes)
            stderr = _Output(process, process.stderr, limits.output_bytes)
            is_timed_out = await _follow(process, stdout, stderr, limits.time_s)
            outcome = json.loads(os.read(status, 2**16) or b"{}")
        finally:
            os.close(status)
    if "error" in outcome:
        raise OSError(outcome["error"])
    is_cut = stdout.is_cut or stderr.is_cut
    return SandboxResult(
        stdout=stdout.text,
        stderr=stderr.text,
        exit_code=None if is_timed_out or is_cut else outcome.get("exit_code"),
        is_timed_out=is_timed_out and not is_cut,
        is_output_cut=is_cut,
        is_out_of_memory=outcome.get("is_out_of_memory", False),
    )


@dataclass
class _Output:
    """What a program writes to one stream, up to the limit; a program that writes more is ended."""

    process: Process
    stream: asyncio.StreamReader
    longest: int
    content: bytes = b""

    @property
    def is_cut(self) -> bool:
        return len(self.content) > self.longest

    @property
    def text(self) -> str:
        return self.content[: self.longest].decode(errors="replace")

    async def read(self) -> None:
        """Read until the stream ends, which it does when the program has ended."""
        while chunk := await self.stream.read(2**16):
            if self.is_cut:
                continue
            self.content += chunk
            if self.is_cut:
                _terminate(self.process)


async def _follow(process: Process, stdout: _Output, stderr: _Output, time_s: float) -> bool:
    """Wait until the supervisor, and with it everything that the program started, has ended; return
    whether the program ran out of time. After `time_s` the supervisor is terminated, and killed if
    it does not end within `_GRACE_S`."""
    ended = asyncio.gather(process.wait(), stdout.read(), stderr.read())
    try:
        async with asyncio.timeout(time_s):
            await asyncio.shield(ended)
        return False
    except TimeoutError:
        return True
    finally:
        _terminate(process)
        try:
            async with asyncio.timeout(_GRACE_S):
                await ended
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


def _terminate(process: Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
