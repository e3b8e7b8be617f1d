"""Each step of a run, read as the learner records it, and held against the bound on staleness.

The audit of a run reads the steps of the history that survives. A learner that goes back also makes
steps that no checkpoint ever contains and that its next start cuts off: they are read here before.
The bound is that of the configuration, not one that the learner has recorded.

Invariant: nothing waits; each line is judged once, as often as the file is cut and grows again.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping
from io import BufferedReader
from typing import Any

import msgspec

from streamrl.config import RunConfig
from streamrl.tracking.jsonl import TRAINED_FILE
from streamrl.types import OverduePolicy

MAX_FAULTS = 20


class WatchedSteps:
    """`step` is the newest in the record, `faults` a sentence for each step beyond the bound, the
    first MAX_FAULTS of them."""

    def __init__(self, config: RunConfig) -> None:
        self._file = config.run.path / TRAINED_FILE
        self._max_staleness = config.buffer.max_staleness
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
