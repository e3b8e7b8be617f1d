"""One child process of a launch: started, restarted after a crash, stopped.

Invariant: no child outlives the launcher (each watches its parent, see `streamrl.service`), and an
exit code that a restart cannot change ends the launch.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from streamrl.cli.processes.command import executable
from streamrl.config import PARENT_VARIABLE
from streamrl.errors import EXIT_CONFIG, EXIT_FENCED, ConfigError, StreamRLError
from streamrl.run_folder import last_log_line

MAX_RESTARTS = 5


@dataclass
class Child:
    """One daemon of the launch; `arguments` follow `streamrl` on its command line.

    `num_sharing` is the number of processes that compute on this machine at once.
    """

    role: str
    arguments: Sequence[str]
    restart_arguments: Sequence[str]
    log_file: Path
    num_sharing: int = 1
    process: asyncio.subprocess.Process | None = None
    num_restarts: int = 0
    state: str = "starting"
    stopping: bool = False

    def environment(self) -> dict[str, str]:
        """This process's, with its share of the cores: more threads than cores cost tenfold."""
        threads = str(max(1, len(os.sched_getaffinity(0)) // self.num_sharing))
        return {"OMP_NUM_THREADS": threads, **os.environ, PARENT_VARIABLE: str(os.getpid())}

    async def start(self) -> None:
        arguments = self.restart_arguments if self.num_restarts else self.arguments
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        with self.log_file.open("ab") as output:
            # In its own session, so that Ctrl-C in the terminal signals the launcher only.
            self.process = await asyncio.create_subprocess_exec(
                executable(),
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=self.environment(),
            )
        self.state = "running"

    async def supervise(self) -> int:
        """Start the process, again after each crash; its last exit code. Waits for its end.

        Raises:
            ConfigError: it ended with an exit code that a restart cannot change.
            StreamRLError: it crashed more than MAX_RESTARTS times.
        """
        while True:
            await self.start()
            assert self.process is not None, "start() has just made it"
            code = await self.process.wait()
            self.state = "done" if code == 0 else f"ended ({code})"
            if code == 0 or self.stopping:
                return code
            self._require_restartable(code)
            self.num_restarts += 1
            self.state = f"restart {self.num_restarts}"
            await asyncio.sleep(min(0.5 * 2**self.num_restarts, 10.0))
            if self.stopping:
                return code

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send the signal; the process is not restarted."""
        self.stopping = True
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)

    def _require_restartable(self, code: int) -> None:
        if code in (EXIT_CONFIG, EXIT_FENCED):
            raise ConfigError(f"{self.role}: {last_log_line(self.log_file)}")
        if self.num_restarts == MAX_RESTARTS:
            raise StreamRLError(
                f"{self.role} ended {MAX_RESTARTS + 1} times, the last time with {code}: "
                f"{last_log_line(self.log_file)} (see {self.log_file})"
            )
