"""Writes the record of each step of one rank, and keeps it within `buffer.record_max_bytes`.

Invariant: a checkpoint is saved only once the records of its steps are on disk, since `flush` comes
before it. A learner forgets the steps that are not of its history, whether it records or not, and
one that was taken over records no more. While the disk is full records wait in memory. The compute
thread calls `add`, the loop the rest.
"""

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from learners.replay.record import (
    RECORD_FOLDER,
    RecordedPart,
    StepRecord,
    encode,
    files_of,
    path_of,
)
from learners.replay.settings import settings_files
from streamrl.checkpoints.find import checkpoints_of
from streamrl.checkpoints.history import History, survives
from streamrl.config import RunConfig
from streamrl.durable_files import sync
from streamrl.types import GroupHeader, TrajectoryGroup

log = logging.getLogger(__name__)


def forget(run: Path, first_step: int) -> None:
    """Remove what is recorded of this step and later ones, by whatever rank, and their settings.

    Raises:
        OSError: a file cannot be removed.
    """
    for unfinished in (run / RECORD_FOLDER).glob(".*.unfinished"):
        unfinished.unlink()
    steps = [(step, path) for step, _, path in files_of(run)]
    for step, path in (*steps, *settings_files(run).items()):
        if step >= first_step:
            path.unlink()


class Recorder:
    """Of one rank of so many, of the learner that makes this history."""

    def __init__(
        self, config: RunConfig, history: History, rank: int = 0, num_ranks: int = 1
    ) -> None:
        self._run = config.run.path
        self._history = history
        self._rank = rank
        self._num_ranks = num_ranks
        self._max_bytes = config.buffer.record_max_bytes // num_ranks
        self._sizes: dict[Path, int] = {}
        self._pending: tuple[tuple[Path, bytes], ...] = ()
        self._unsynced: tuple[Path, ...] = ()
        self._has_dropped = False

    def add(
        self,
        step: int,
        parts: Sequence[tuple[Sequence[GroupHeader], Sequence[TrajectoryGroup]]],
    ) -> None:
        """The groups of this rank that made this version, in the parts they were trained in."""
        if not self._sizes:
            self._find_own()
        recorded = tuple(RecordedPart.of(headers, groups) for headers, groups in parts)
        data = encode(StepRecord(step, self._num_ranks, recorded))
        was_pending = bool(self._pending)
        self._pending = (*self._pending, (path_of(self._run, step, self._rank), data))
        try:
            self._write()
        except OSError as error:
            if not was_pending:
                log.warning("the record of step %d waits in memory: %s", step, error)
        self._drop_oldest(step)

    def flush(self) -> None:
        """Wait until the record of each step is on disk.

        Raises:
            OSError: it is full, for example.
        """
        self._write()
        unsynced = self._unsynced
        for path in unsynced:
            if path in self._sizes:
                sync(path)
        if unsynced:
            sync(self._run / RECORD_FOLDER)
        self._unsynced = self._unsynced[len(unsynced) :]

    def _find_own(self) -> None:
        """Of the steps before; those of ranks that are gone are the first rank's."""
        is_first = self._rank == 0
        self._sizes = {
            path: path.stat().st_size
            for _, rank, path in files_of(self._run)
            if rank == self._rank or (is_first and rank >= self._num_ranks)
        }

    def _write(self) -> None:
        while self._pending:
            path, data = self._pending[0]
            if self._write_one(path, data):
                self._sizes = {**self._sizes, path: len(data)}
                self._unsynced = (*self._unsynced, path)
            self._pending = self._pending[1:]

    def _write_one(self, path: Path, data: bytes) -> bool:
        """Whether it is written: not where another learner goes on with the run."""
        # Ranks that share their trajectories write the same file.
        unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished.write_bytes(data)
            if survives(checkpoints_of(self._run), self._history):
                unfinished.replace(path)
                return True
        finally:
            unfinished.unlink(missing_ok=True)
        log.warning("another learner goes on with %s; this one records no step", self._run)
        return False

    def _drop_oldest(self, newest: int) -> None:
        total = sum(self._sizes.values())
        while total > self._max_bytes and len(self._sizes) > 1:
            oldest = min(self._sizes)
            total -= self._sizes[oldest]
            oldest.unlink(missing_ok=True)
            self._sizes = {path: n for path, n in self._sizes.items() if path != oldest}
            if not self._has_dropped:
                self._has_dropped = True
                log.warning(
                    "record/ has reached buffer.record_max_bytes at step %d: from now on the "
                    "oldest steps are dropped, and a replay begins at a later checkpoint",
                    newest,
                )
