"""`metrics.jsonl`: one JSON object per step, written whole and in order.

`trained.jsonl` (the prompts that each step trained) and `validation.jsonl` (a line for each
validation) are written the same way. While the disk is full, lines wait in memory. Invariant: the
file ends with a whole line, unless its writer was killed while writing; readers skip a cut-off
line, and the next writer removes it.
"""

import json
import logging
import math
import os
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, Literal, NamedTuple

from streamrl.samples.files import keep_before, lines_backwards, parsed_line

log = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
TRAINED_FILE = "trained.jsonl"


class JsonlTracker:
    """Removes the lines of `first_step` and later from the file, then appends to it, until
    `survives` returns false because the run is no longer this learner's."""

    def __init__(
        self, path: Path, *, first_step: int, survives: Callable[[], bool] = lambda: True
    ) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        keep_before(path, first_step)
        self._path, self._survives = path, survives
        self._file = path.open("ab", buffering=0)
        self._num_synced = path.stat().st_size
        self._unsynced, self._pending = bytearray(), b""
        self._is_torn = False

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Append a line. If it cannot be written now, it is written before the next one."""
        line = json.dumps({"step": step, **{name: _plain(v) for name, v in metrics.items()}})
        was_pending = bool(self._pending)
        self._pending += line.encode() + b"\n"
        try:
            self._write()
        except OSError as error:
            if not was_pending:
                log.warning("%s waits in memory: %s", self._path, error)

    def flush(self) -> None:
        """Wait until every line is on disk, as a checkpoint does. Raises OSError, for example if
        the disk is full; what could not be written stays in memory."""
        self._write()
        try:
            os.fsync(self._file.fileno())
        except OSError:
            # A full network file system has dropped the unsynced lines.
            self._pending, self._is_torn = bytes(self._unsynced), True
            self._unsynced.clear()
            raise
        self._num_synced += len(self._unsynced)
        self._unsynced.clear()

    def close(self) -> None:
        try:
            self._write()
        finally:
            self._file.close()

    def _write(self) -> None:
        """Write everything pending or nothing: a full disk may take only part of a line. Once
        another learner owns the file, write and cut nothing, since a cut would remove its lines."""
        if not self._pending or not self._survives():
            self._pending, self._is_torn = b"", False
            return
        if self._is_torn:
            self._cut()
        data = memoryview(self._pending)
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError:
            self._is_torn = True
            with suppress(OSError):
                self._cut()
            raise
        self._unsynced += self._pending
        self._pending = b""

    def _cut(self) -> None:
        os.ftruncate(self._file.fileno(), self._num_synced + len(self._unsynced))
        self._is_torn = False


def read_metrics(path: Path, names: Collection[str] | None = None) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl`; a damaged line is left out.

    With `names`, all lines except the last keep only these metrics and the step, since all metrics
    of a long run may not fit into memory.
    """
    lines: list[dict[str, Any]] = []
    for line in read_lines(path):
        if names is not None and lines:
            lines[-1] = {k: v for k, v in lines[-1].items() if k == "step" or k in names}
        lines.append(line)
    return lines


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of such a file one by one; a damaged line is left out."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        for text in file:
            if (line := parsed_line(text)) is not None:
                yield line


def read_last(path: Path) -> dict[str, Any]:
    """The last whole line of a `metrics.jsonl`, {} without one; reads only the end of the file."""
    return next(_newest_first(path), {})


def read_newest(path: Path, num_lines: int) -> list[dict[str, Any]]:
    """The last `num_lines` whole lines or fewer, oldest first; reads only the end of the file."""
    return list(islice(_newest_first(path), num_lines))[::-1]


def read_after(path: Path, step: int) -> list[dict[str, Any]]:
    """The lines of later steps, oldest first; reads only these."""
    return list(takewhile(lambda line: line["step"] > step, _newest_first(path)))[::-1]


def _newest_first(path: Path) -> Iterator[dict[str, Any]]:
    return (line for text in lines_backwards(path) if (line := parsed_line(text)) is not None)


def _plain(value: Any) -> Any:
    """A value for JSON, which has no NaN and no infinity: eight decimals, or eight digits below
    1."""
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        return None
    return round(value, 8) if abs(value) >= 1 else float(f"{value:.8g}")


VALIDATION_FILE = "validation.jsonl"
VERSION = "validation/policy_version"
"""The metric that says which version the other `validation/` metrics belong to."""


class Best(NamedTuple):
    """The best validation so far; `num_since` is how many came after it."""

    policy_version: int
    value: float
    num_since: int


def read_validations(run: Path) -> dict[int, dict[str, float]]:
    """The metrics of each validated version, oldest first."""
    lines = read_metrics(run / VALIDATION_FILE)
    return {line["step"]: {k: v for k, v in line.items() if k != "step"} for line in lines}


def best_of(
    validated: Mapping[int, Mapping[str, float]],
    metric: str,
    best_is: Literal["highest", "lowest"],
    *,
    min_improvement: float = 0.0,
) -> Best | None:
    """The best of the validations that have the metric; None if none has it. A later one is better
    if it beats the previous best by more than `min_improvement`."""
    sign = 1 if best_is == "highest" else -1
    best: Best | None = None
    for version in sorted(validated):
        value = validated[version].get(metric)
        if value is None:
            continue
        if best is None or sign * (value - best.value) > min_improvement:
            best = Best(version, value, 0)
        else:
            best = best._replace(num_since=best.num_since + 1)
    return best


NUM_NEWEST = 20
_MOST_OLDER = 1000


class FollowedMetrics:
    """Follows a growing `metrics.jsonl`; keeps the newest lines whole, and only the rewards of
    older ones.

    Invariant: a call of `read` reads only what was written since the last one, and what is kept is
    bounded: when there are too many older lines, every second one is dropped, and so are later ones
    at that rate.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._begin_anew(0)

    def read(self) -> list[dict[str, Any]]:
        """The lines so far, oldest first; of all but the newest only `step` and `reward/mean`."""
        try:
            file = self._path.open("rb")
        except OSError:
            return []
        with file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._inode or status.st_size < self._offset:
                self._begin_anew(status.st_ino)
            file.seek(self._offset)
            for text in file:
                if not text.endswith(b"\n"):
                    break
                self._offset += len(text)
                self._append(text)
        return [*self._older, *self._newest]

    def _begin_anew(self, inode: int) -> None:
        """Start over, since a resumed learner has cut off the steps that it repeats."""
        self._inode = inode
        self._offset = self._num_lines = 0
        self._every = 1
        self._older: list[dict[str, Any]] = []
        self._newest: deque[dict[str, Any]] = deque()

    def _append(self, text: bytes) -> None:
        """Add a line. A damaged one is left out; NaN and infinity do not count as damage."""
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            return
        if not isinstance(line, dict) or "step" not in line:
            return
        self._newest.append(line)
        if len(self._newest) <= NUM_NEWEST:
            return
        oldest = self._newest.popleft()
        if self._num_lines % self._every == 0:
            self._older.append({name: oldest.get(name) for name in ("step", "reward/mean")})
        self._num_lines += 1
        if len(self._older) > _MOST_OLDER:
            self._older, self._every = self._older[::2], 2 * self._every
