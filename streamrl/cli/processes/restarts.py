"""One child process of a launch: starts it, restarts it after a crash, and stops it.

    exit code 2, 3 or 6              never restarted: a restart cannot change a configuration, a
                                     takeover, or a training whose gradients are not finite
    before the first new step        a reward that fails for every group ends the launch at once; an
                                     error raised at the same line twice ends it the second time
    otherwise                        restarted after a back-off, at most `max_restarts` times within
                                     `restart_window_s`, and at most as often without a new step

A process that ends with exit code 0 is done, except the buffer, which only the launch ends.

A start may take longer than the window divided by the number of restarts, so restarts without a new
step stay counted. Steps trained again after a restart do not count as new.

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
from streamrl.cli.processes.fork_server import Descriptors, ForkedProcess, ForkServer, start
from streamrl.config.run import RunSettings
from streamrl.errors import (
    EXIT_CONFIG,
    EXIT_CRASHED,
    EXIT_DIVERGED,
    EXIT_FENCED,
    EXIT_ROLLOUTS,
    ErrorPipe,
    ErrorRecord,
    StreamRLError,
    error_of,
    sentence_of,
)
from streamrl.log_lines import json_line
from streamrl.placement.plan import without_chosen
from streamrl.run_folder import note_restart

FIRST_DELAY_S, LONGEST_DELAY_S = 0.5, 30.0
HEALTHY_S = 60.0
"""A process that has run this long is restarted after the first (shortest) delay."""


class RestartBudget:
    """The restarts that one process may have; `step` is the run's newest step when the launch
    begins."""

    def __init__(
        self, settings: RunSettings, step: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._first_step = self._newest_step = step
        self._restarts_s: tuple[float, ...] = ()
        self._num_without_step = 0
        self._num_short = 0
        self._started_s = clock()
        self._last_origin = ""

    def on_start(self) -> None:
        self._started_s = self._clock()

    def delay_s(self, exit_code: int, record: ErrorRecord | None, step: int) -> float:
        """Return the delay in seconds before a failed process is restarted; `step` is the run's
        newest step.

        Raises:
            StreamRLError: of the failure's kind, if the process must not be restarted.
        """
        now_s, sentence = self._clock(), sentence_of(exit_code, record)
        if step > self._newest_step:
            self._newest_step, self._num_without_step = step, 0
        if not self._may_help(exit_code, record):
            raise error_of(exit_code, sentence)
        window_s, allowed = self._settings.restart_window_s, self._settings.max_restarts
        self._restarts_s = tuple(at_s for at_s in self._restarts_s if now_s - at_s < window_s)
        scope = ""
        if self._num_without_step >= allowed:
            scope = "without a new step of the run"
        elif len(self._restarts_s) >= allowed:
            scope = f"within run.restart_window_s ({window_s:g} s)"
        if scope:
            often = f"started again {allowed} times (run.max_restarts) {scope}"
            raise error_of(exit_code, f"{sentence}; {often}")
        self._restarts_s = (*self._restarts_s, now_s)
        self._num_without_step += 1
        self._num_short = 0 if now_s - self._started_s >= HEALTHY_S else self._num_short + 1
        return min(FIRST_DELAY_S * 2.0 ** max(0, self._num_short - 1), LONGEST_DELAY_S)

    def _may_help(self, exit_code: int, record: ErrorRecord | None) -> bool:
        """Whether a restart could end differently."""
        if exit_code in (EXIT_CONFIG, EXIT_FENCED, EXIT_DIVERGED):
            return False
        origin = record.origin if record else ""
        is_alike = exit_code == EXIT_CRASHED and origin != "" and origin == self._last_origin
        self._last_origin = origin
        if self._newest_step > self._first_step:
            return True
        return exit_code != EXIT_ROLLOUTS and not is_alike


@dataclass
class Child:
    """One daemon of a launch; commands and environment are those of the plan.

    `read_step` returns the newest step of the run, `notify` gets a sentence for each restart. The
    run goes on without a child that `is_optional`; the failure of one that `is_strict` is raised
    without a restart. With a `fork_server` the process is forked from it.
    """

    role: str
    command: Sequence[str]
    restart_command: Sequence[str]
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
    """The failure for which the run went on without this child."""
    state: str = "starting"
    stopping: asyncio.Event = field(default_factory=asyncio.Event)

    async def supervise(self) -> int:
        """Start the process, again after each failure, and a buffer after any end; return the last
        exit code. Waits for its end.

        Raises:
            StreamRLError: of the failure's kind, if it failed and is not started again.
        """
        while True:
            code, record = await self._run()
            self.state = "done" if code == 0 else f"ended ({code})"
            await self._on_end(code)
            is_over = code == 0 and (self.role != "buffer" or self.stopping.is_set())
            if not is_over:
                self._log(sentence_of(code, record))
            if is_over or self.stopping.is_set():
                return code
            try:
                delay_s = self._delay_s(code, record)
            except StreamRLError as error:
                if not self.is_optional or self.is_strict:
                    raise
                self.failure = error
                self.notify(f"{error}; the run goes on without it")
                return code
            reason = sentence_of(code, record)
            if self.is_strict:
                reason = f"{reason} (see {self.log_file})"
                why = "not started again, since the launch is --strict"
                raise error_of(code, f"{self.role}: {reason}; {why}")
            self.num_restarts += 1
            note_restart(self.log_file.parent.parent, self.role, code, reason)
            self.state = f"restart {self.num_restarts}"
            self.notify(f"{self.role}: {reason}; started again in {delay_s:g} s")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.stopping.wait(), delay_s)
                return code

    async def _on_end(self, code: int) -> None:
        """Called when the process has ended; a hook for subclasses."""

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send the signal; the process is not restarted."""
        self.begin_stop()
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)

    def begin_stop(self) -> None:
        """Do not start the process again; show a running one as stopping."""
        self.stopping.set()
        if self.state == "running":
            self.state = "stopping"

    @property
    def _next_command(self) -> Sequence[str]:
        return self.restart_command if self.num_restarts else self.command

    async def _run(self) -> tuple[int, ErrorRecord | None]:
        """Start the process; return its exit code and error record. Waits for its end."""
        with ErrorPipe() as pipe:
            command = (executable(), *self._next_command[1:])
            planned = without_chosen(self.environment, os.environ)
            environment = {**os.environ, **planned, **pipe.environment}
            self.log_file.parent.mkdir(parents=True, exist_ok=True)
            with self.log_file.open("ab") as output:
                to = Descriptors(output.fileno(), output.fileno(), pipe.descriptor)
                starting = start(command, environment, to, self.fork_server, self.stopping)
                self.process = await starting
            if self.process is None:
                return 0, None
            self.budget.on_start()
            self.state = "running"
            if self.stopping.is_set():
                self.stop()
            return await self.process.wait(), pipe.read()

    def _log(self, sentence: str) -> None:
        """Write why the process ended into its log, which would not mention a kill."""
        line = launcher_line(self.role, sentence, self.log_format)
        with contextlib.suppress(OSError), self.log_file.open("a", encoding="utf-8") as output:
            print(line, file=output)

    def _delay_s(self, code: int, record: ErrorRecord | None) -> float:
        try:
            return self.budget.delay_s(code, record, self.read_step())
        except StreamRLError as error:
            place = "" if code == EXIT_CONFIG else f" (see {self.log_file})"
            raise error_of(code, f"{self.role}: {error}{place}") from None


def launcher_line(role: str, sentence: str, log_format: str) -> str:
    """Return the line for the log of a process that its launcher writes about its end."""
    if log_format == "json":
        return json_line(role, "error", "launcher", sentence, time_s=time.time())
    return f"{time.strftime('%Y-%m-%d %H:%M:%S')} launcher: {role} {sentence}"
