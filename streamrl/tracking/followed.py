"""A `metrics.jsonl` while it grows, for the live view: what is read and kept of it is bounded."""

import json
import os
from collections import deque
from pathlib import Path
from typing import Any

NUM_NEWEST = 20
_MOST_OLDER = 1000


class FollowedMetrics:
    """A `metrics.jsonl` that grows: the newest lines whole, of the others their rewards.

    Invariant: a reading costs what was written since the last one, and what is kept is bounded:
    once there are too many of the older lines, every second one is left out, from then on as well.
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
        """After a learner has resumed, and cut off the steps that it makes again."""
        self._inode = inode
        self._offset = self._num_lines = 0
        self._every = 1
        self._older: list[dict[str, Any]] = []
        self._newest: deque[dict[str, Any]] = deque()

    def _append(self, text: bytes) -> None:
        """A damaged line is left out."""
        try:
            line = json.loads(text)
        except ValueError:
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
