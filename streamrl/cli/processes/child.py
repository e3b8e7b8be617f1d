"""One child process of a launch: started, restarted after a crash, stopped.

Invariant: no child outlives the launcher (each watches its parent, see `streamrl.service`), and a
failure that a restart cannot change ends the launch with the child's own sentence.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from streamrl.cli.processes.command import executable
from streamrl.cli.processes.fork_server import Descriptors, ForkedProcess, ForkServer
from streamrl.cli.processes.restarts import RestartBudget, sentence_of
from streamrl.error_record import ErrorPipe, ErrorRecord
from streamrl.errors import EXIT_CONFIG, StreamRLError, error_of
from streamrl.log_lines import FORMAT_VARIABLE, json_line
from streamrl.run_folder import note_restart


@dataclass
class Child:
    """One daemon of the launch; `arguments` follow `streamrl` on its command line.

    `read_step` returns the newest step of the run, `notify` gets a sentence for each restart;
    `environment` is what the plan gives it. The run goes on without a child that `is_optional`.
    A failure of one that `is_strict` is raised, whatever a restart might change. `log_format` is
    that of the run. With a `fork_server` the process is forked from it.
    """

    role: str
    arguments: Sequence[str]
    restart_arguments: Sequence[str]
    log_file: Path
    budget: RestartBudget
    read_step: Callable[[], int]
    notify: Callable[[str], None]
    environment: Mapping[str, str] = field(default_factory=dict)
    is_optional: bool = False
    is_strict: bool = False
    log_format: str = "text"
    fork_server: ForkServer | None = None
    process: asyncio.subprocess.Process | ForkedProcess | None = None
    num_restarts: int = 0
    failure: StreamRLError | None = None
    """For which the run went on without it."""
    state: str = "starting"
    stopping: asyncio.Event = field(default_factory=asyncio.Event)

    async def supervise(self) -> int:
        """Start the process, again after each failure; its last exit code. Waits for its end.

        Raises:
            StreamRLError: it failed and is not started again; the error is of the failure's kind.
        """
        while True:
            code, record = await self._run()
            self.state = "done" if code == 0 else f"ended ({code})"
            await self._on_end(code)
            if code != 0:
                self._log(sentence_of(code, record))
            if code == 0 or self.stopping.is_set():
                return code
            try:
                delay_s = self._delay_s(code, record)
            except StreamRLError as error:
                if not self.is_optional or self.is_strict:
                    raise
                self.failure = error
                self.notify(f"{error}; the run goes on without it")
                return code
            if self.is_strict:
                raise self._refusal(code, record)
            self.num_restarts += 1
            note_restart(self._run_folder, self.role, code, sentence_of(code, record))
            self.state = f"restart {self.num_restarts}"
            self.notify(f"{self.role}: {sentence_of(code, record)}; started again in {delay_s:g} s")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.stopping.wait(), delay_s)
                return code

    async def _on_end(self, code: int) -> None:
        """For those that have more to do when the process has ended."""

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send the signal; the process is not restarted."""
        self.stopping.set()
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)

    @property
    def _run_folder(self) -> Path:
        return self.log_file.parent.parent

    async def _run(self) -> tuple[int, ErrorRecord | None]:
        """Exit code and last sentence of a process that is started here. Waits for its end."""
        with ErrorPipe() as pipe:
            self.process = await self._start(pipe)
            if self.process is None:
                return 0, None
            self.budget.on_start()
            self.state = "running"
            if self.stopping.is_set():
                self.stop()
            return await self.process.wait(), pipe.read()

    async def _start(self, pipe: ErrorPipe) -> asyncio.subprocess.Process | ForkedProcess | None:
        """The process; None if it is to stop before it could begin."""
        arguments = self.restart_arguments if self.num_restarts else self.arguments
        command, environment = (executable(), *arguments), self._environment(pipe)
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        with self.log_file.open("ab") as output:
            if self.fork_server is not None:
                to = Descriptors(output.fileno(), output.fileno(), pipe.descriptor)
                forked = await self.fork_server.fork(command, environment, to, self.stopping)
                if forked is not None or self.stopping.is_set():
                    return forked
            # In its own session, so that Ctrl-C in the terminal signals the launcher only.
            return await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=environment,
                pass_fds=(pipe.descriptor,),
            )

    def _environment(self, pipe: ErrorPipe) -> Mapping[str, str]:
        """The launcher's, with what the plan gives; a number of threads that a person set stays."""
        kept = {"OMP_NUM_THREADS"} & os.environ.keys()
        planned = {name: v for name, v in self.environment.items() if name not in kept}
        own = {**pipe.environment, FORMAT_VARIABLE: self.log_format}
        return {**os.environ, **planned, **own}

    def _log(self, sentence: str) -> None:
        """Into the process's log, which does not tell of a kill."""
        line = launcher_line(self.role, sentence, self.log_format)
        with contextlib.suppress(OSError), self.log_file.open("a", encoding="utf-8") as output:
            print(line, file=output)

    def _refusal(self, code: int, record: ErrorRecord | None) -> StreamRLError:
        """Of a restart that a launch would else make."""
        reason = f"{sentence_of(code, record)} (see {self.log_file})"
        return error_of(
            code, f"{self.role}: {reason}; not started again, since the launch is --strict"
        )

    def _delay_s(self, code: int, record: ErrorRecord | None) -> float:
        try:
            return self.budget.delay_s(code, record, self.read_step())
        except StreamRLError as error:
            place = "" if code == EXIT_CONFIG else f" (see {self.log_file})"
            raise error_of(code, f"{self.role}: {error}{place}") from None


def launcher_line(role: str, sentence: str, log_format: str) -> str:
    """A line that whoever starts a process adds to its log."""
    if log_format == "json":
        return json_line(role, "error", "launcher", sentence, time_s=time.time())
    return f"{time.strftime('%Y-%m-%d %H:%M:%S')} launcher: {role} {sentence}"
