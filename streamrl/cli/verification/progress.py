"""How far a run under test is, and that it does not stand still; chaos and soak follow it."""

import asyncio
import time

from streamrl.cli.processes.child import Child
from streamrl.cli.verification.watched_steps import WatchedSteps
from streamrl.config import RunConfig
from streamrl.errors import StreamRLError

_POLL_S = 0.02


class Progress:
    """The steps of a run, by its record of trained steps, which another process writes.

    `reached` is the largest step so far; `steps` judges the staleness of each. Every wait raises
    StreamRLError once there has been no step for `stall_timeout_s`.
    """

    def __init__(self, config: RunConfig, stall_timeout_s: float) -> None:
        self._run = config.run.path
        self.steps = WatchedSteps(config)
        self._stall_timeout_s = stall_timeout_s
        self.reached = 0
        self._last = (-1, time.monotonic())

    @property
    def step(self) -> int:
        """Of the last reading; falls when a learner comes back from a checkpoint."""
        return max(0, self._last[0])

    async def until_step(self, step: int) -> None:
        """Waits for the run to reach the step."""
        while self.reached < step:
            self.read()
            await asyncio.sleep(_POLL_S)

    async def until_running(self, child: Child) -> asyncio.subprocess.Process:
        """Its process. Waits for the supervisor to have started it."""
        while child.process is None or child.process.returncode is not None:
            self.read()
            await asyncio.sleep(_POLL_S)
        return child.process

    def read(self) -> None:
        self.steps.read()
        step = self.steps.step
        self.reached = max(self.reached, step)
        if step != self._last[0]:
            self._last = (step, time.monotonic())
        elif time.monotonic() - self._last[1] > self._stall_timeout_s:
            raise StreamRLError(
                f"the run hangs: no step for {self._stall_timeout_s:g} s since step {step} "
                f"(see {self._run / 'logs'})"
            )
