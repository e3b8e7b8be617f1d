"""The processes of one host, as its agent starts and ends them.

Invariant: nothing that a process has started outlives it: what carries its MARK in the environment
is killed when it has ended. If the agent is killed itself its children get SIGTERM from the kernel,
and the next agent kills what is left of them.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from streamrl.cli.launchers.ssh.frames import Ended, Start
from streamrl.cli.processes.child import launcher_line
from streamrl.cli.processes.restarts import sentence_of
from streamrl.error_record import ErrorPipe, ErrorRecord
from streamrl.log_lines import FORMAT_VARIABLE
from streamrl.process_environment import processes_with

GRACE_PERIOD_S = 15.0
MARK = "STREAMRL_PROCESS"
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


class HostProcesses:
    """Those that the launcher has asked for, of the run in `folder`."""

    def __init__(self, folder: Path, host: str) -> None:
        self._logs = folder / "logs"
        self._mark = f"{folder.resolve()}:{host}:"
        self._running: Mapping[str, Process] = {}
        # With the last signal for it that came meanwhile, or 0.
        self._starting: Mapping[str, int] = {}

    def run(self, start: Start) -> Coroutine[Any, Any, Ended]:
        """Start the command and wait for its end; then nothing of it is left. A signal counts from
        this call on."""
        self._starting = {**self._starting, start.name: 0}
        return self._run(start)

    async def _run(self, start: Start) -> Ended:
        with ErrorPipe() as pipe:
            try:
                process = await self._start(start, pipe)
            except OSError as error:
                self._forget_start(start.name)
                sentence = f"cannot start {start.command[0]}: {error.strerror or error}"
                return Ended(name=start.name, exit_code=127, record=ErrorRecord(1, sentence, ""))
            self._running = {**self._running, start.name: process}
            if number := self._forget_start(start.name):
                self.send(start.name, number)
            code, record = await process.wait(), pipe.read()
        self._running = {name: p for name, p in self._running.items() if name != start.name}
        await end_left(f"{self._mark}{start.name}:")
        if code != 0:
            self._log(start, sentence_of(code, record))
        return Ended(name=start.name, exit_code=code, record=record)

    def send(self, name: str, number: int) -> None:
        """Send the signal to the process, if it runs; SIGKILL to all that it has started."""
        if name in self._starting:
            self._starting = {**self._starting, name: number}
            return
        process = self._running.get(name)
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            if number == signal.SIGKILL:
                os.killpg(process.pid, number)
            else:
                os.kill(process.pid, number)

    def _forget_start(self, name: str) -> int:
        """The signal that came while the process was starting, or 0."""
        number = self._starting[name]
        self._starting = {other: n for other, n in self._starting.items() if other != name}
        return number

    async def end_all(self) -> None:
        """End every process, the buffer last: a learner that drains needs it. Then kill what is
        still starting, and what an agent before this one has left."""
        await self._end([name for name in self._running if name != "buffer"])
        await self._end(list(self._running))
        await end_left(self._mark)

    async def _end(self, names: Sequence[str]) -> None:
        """Waits GRACE_PERIOD_S for these processes, then kills what still runs."""
        ending = {name: self._running[name] for name in names}
        for name in ending:
            self.send(name, signal.SIGTERM)
        waiting = [asyncio.create_task(process.wait()) for process in ending.values()]
        if waiting:
            await asyncio.wait(waiting, timeout=GRACE_PERIOD_S)
        for name in ending:
            self.send(name, signal.SIGKILL)

    async def _start(self, start: Start, pipe: ErrorPipe) -> Process:
        self._logs.mkdir(parents=True, exist_ok=True)
        with (self._logs / f"{start.name}.log").open("ab") as output:
            return await asyncio.create_subprocess_exec(
                *start.command,
                stdin=DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=_environment(start, pipe, f"{self._mark}{start.name}:"),
                pass_fds=(pipe.descriptor,),
                preexec_fn=_end_with_the_agent,
            )

    def _log(self, start: Start, sentence: str) -> None:
        line = launcher_line(start.name, sentence, start.environment.get(FORMAT_VARIABLE, "text"))
        with contextlib.suppress(OSError), (self._logs / f"{start.name}.log").open("a") as output:
            print(line, file=output)


def _environment(start: Start, pipe: ErrorPipe, mark: str) -> Mapping[str, str]:
    """This process's, the plan's, and where to say why it failed; the commands of this Python are
    found first."""
    beside = str(Path(sys.executable).parent)
    return {
        **os.environ,
        "PATH": f"{beside}:{os.environ.get('PATH', os.defpath)}",
        MARK: mark,
        **start.environment,
        **pipe.environment,
    }


def _end_with_the_agent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


async def end_left(mark: str) -> None:
    """Kill every process with a MARK that begins so; waits until there is none. What a kill brings
    to light is looked for again."""
    while left := processes_with(MARK, lambda value: value.startswith(mark)):
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(0.02)
