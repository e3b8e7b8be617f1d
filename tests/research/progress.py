"""How far a run under test is, that it does not stand still, and that its steps keep the bound.

Each step is read as the learner records it, and held against the bound on staleness. The audit of a
run reads the steps of the history that survives; a learner that goes back also makes steps that no
checkpoint ever contains and that its next start cuts off: they are read here before. The bound is
that of the configuration, not one that the learner has recorded.

Invariant: each line is judged once, as often as the file is cut and grows again.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from io import BufferedReader
from typing import Any

import msgspec

from streamrl.cli.processes.fork_server import ForkedProcess
from streamrl.cli.processes.restarts import Child
from streamrl.config import RunConfig
from streamrl.errors import StreamRLError
from streamrl.tracking.jsonl import TRAINED_FILE
from streamrl.types import OverduePolicy

MAX_FAULTS = 20
_POLL_S = 0.02


class WatchedSteps:
    """`step` is the newest in the record, `faults` a sentence for each step beyond the bound, the
    first MAX_FAULTS of them."""

    def __init__(self, config: RunConfig) -> None:
        self._file = config.run.path / TRAINED_FILE
        self._max_staleness = config.buffer.largest_staleness
        self._overdue = OverduePolicy(config.buffer.overdue)
        self._inode = self._num_bytes = 0
        self.step = 0
        self.faults: tuple[str, ...] = ()

    def read(self) -> None:
        """Judge the lines that have been written since the last reading."""
        with contextlib.suppress(FileNotFoundError), self._file.open("rb") as file:
            for line in self._new_lines(file):
                self.step = line["step"]
                new = [fault for fault in self._faults(line) if fault not in self.faults]
                self.faults = (*self.faults, *new)[:MAX_FAULTS]

    def _new_lines(self, file: BufferedReader) -> Iterator[Mapping[str, Any]]:
        status = os.fstat(file.fileno())
        if status.st_ino != self._inode or status.st_size < self._num_bytes:
            self._inode, self._num_bytes, self.step = status.st_ino, 0, 0
        file.seek(self._num_bytes)
        # The last line may be half written.
        whole = file.read().rpartition(b"\n")[0]
        if whole:
            self._num_bytes += len(whole) + 1
        for text in whole.splitlines():
            with contextlib.suppress(msgspec.DecodeError):
                yield msgspec.json.decode(text, type=dict[str, Any])

    def _faults(self, line: Mapping[str, Any]) -> Iterator[str]:
        """Step s trains version s - 1."""
        step, bound = line["step"], self._max_staleness
        behind, ahead = step - 1 - line["oldest_version"], line["newest_version"] - step + 1
        if behind > bound and self._overdue is not OverduePolicy.TRAIN:
            yield f"step {step} trained tokens {behind} versions old; buffer.max_staleness {bound}"
        if ahead > bound:
            yield f"step {step} trained tokens {ahead} versions ahead; buffer.max_staleness {bound}"


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

    async def until_running(self, child: Child) -> asyncio.subprocess.Process | ForkedProcess:
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
