"""Child processes of a launch: started, restarted after a crash, stopped in the right order.

Invariant: no child outlives the launcher (each watches its parent, see `streamrl.service`), and a
child whose exit code says that a person is needed ends the launch.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from streamrl.config import PARENT_VARIABLE
from streamrl.errors import EXIT_CONFIG, EXIT_FENCED, ConfigError, StreamRLError
from streamrl.run_folder import last_log_line

MAX_RESTARTS = 5


@dataclass
class Child:
    """One daemon of the launch; `arguments` follow `streamrl` on its command line.

    `num_sharing` processes compute on this machine at once.
    """

    role: str
    arguments: Sequence[str]
    restart_arguments: Sequence[str]
    log_file: Path
    num_sharing: int = 1
    process: asyncio.subprocess.Process | None = None
    num_restarts: int = 0
    state: str = "starting"
    stopping: bool = field(default=False)

    def environment(self) -> dict[str, str]:
        """This process's, with its share of the cores: more threads than cores cost tenfold."""
        threads = str(max(1, len(os.sched_getaffinity(0)) // self.num_sharing))
        return {"OMP_NUM_THREADS": threads, **os.environ, PARENT_VARIABLE: str(os.getpid())}

    async def start(self) -> None:
        arguments = self.restart_arguments if self.num_restarts else self.arguments
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        with self.log_file.open("ab") as output:
            # A session of its own, so that Ctrl-C in the terminal reaches the launcher alone.
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
        """Start it, and again after a crash; its last exit code. Waits for it to end.

        Raises:
            StreamRLError: it cannot work, or crashes again and again.
        """
        while True:
            await self.start()
            assert self.process is not None, "start() has just made it"
            code = await self.process.wait()
            self.state = "done" if code == 0 else f"ended ({code})"
            if code == 0 or self.stopping:
                return code
            if code in (EXIT_CONFIG, EXIT_FENCED):
                raise ConfigError(f"{self.role}: {self.last_words()}")
            if self.num_restarts == MAX_RESTARTS:
                raise StreamRLError(
                    f"{self.role} ended {MAX_RESTARTS + 1} times, the last time with {code}: "
                    f"{self.last_words()} (see {self.log_file})"
                )
            self.num_restarts += 1
            self.state = f"restart {self.num_restarts}"
            await asyncio.sleep(min(0.5 * 2**self.num_restarts, 10.0))
            if self.stopping:
                return code

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Ask it to end; it is not started again."""
        self.stopping = True
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)

    def last_words(self) -> str:
        return last_log_line(self.log_file)


def call(*arguments: str) -> str:
    """Run `streamrl` with these arguments to its end; its output.

    Waits for as long as the command computes: it says itself what it waits for.

    Raises:
        ConfigError, StreamRLError: it failed; it has said why on standard error.
    """
    done = subprocess.run(
        [executable(), *arguments], stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode != 0:
        kind = ConfigError if done.returncode == EXIT_CONFIG else StreamRLError
        raise kind(f"streamrl {arguments[0]} ended with exit code {done.returncode}")
    return done.stdout


def executable() -> str:
    """The `streamrl` command of this Python."""
    beside = Path(sys.executable).with_name("streamrl")
    found = str(beside) if beside.exists() else shutil.which("streamrl")
    if found is None:
        raise StreamRLError("the command `streamrl` is not installed for this Python")
    return found
