"""A run that is read again and again: its folder, its buffer, and what was new since the last time.

Invariant: a reading costs what the run has written since the one before, and waits a few seconds
for the buffer at most.
"""

import time
from collections import deque
from dataclasses import replace

from streamrl.cli.buffer.target import require_url
from streamrl.cli.display.numbers import numbers_of
from streamrl.cli.status import RunStatus, status_at, status_of
from streamrl.cli.top.snapshot import RunSnapshot, make_snapshot
from streamrl.config import RunConfig
from streamrl.run_folder import find_config
from streamrl.tracking.followed import NUM_NEWEST, FollowedMetrics
from streamrl.types import BufferStats

SHARES_S = 10.0
"""Shares of a generator's time are those since about so long ago."""


class RunReader:
    """Of a run folder, a configuration, or the URL of a buffer, which has no metrics.

    Raises:
        ConfigError: the target names no run.
    """

    def __init__(self, target: str) -> None:
        self._url = target if "://" in target else ""
        if self._url:
            require_url(target)
        self.config: RunConfig | None = None if self._url else find_config(target)
        self._metrics = self.config and FollowedMetrics(self.config.run.path / "metrics.jsonl")
        self._earlier: deque[tuple[float, BufferStats]] = deque()

    async def read(self) -> RunSnapshot:
        """Waits for the buffer's answer."""
        status = await self._status()
        lines = [numbers_of(line) for line in self._metrics.read()] if self._metrics else []
        lines = [line for line in lines if isinstance(line.get("step"), int)]
        if lines:
            status = replace(status, last_line=lines[-1])
        return make_snapshot(
            status,
            lines,
            num_newest=NUM_NEWEST,
            time_s=time.time(),
            before=self._before(status.reading.stats),
        )

    async def _status(self) -> RunStatus:
        return await (status_at(self._url) if self.config is None else status_of(self.config))

    def _before(self, stats: BufferStats | None) -> BufferStats | None:
        """The stats of SHARES_S ago, or the oldest of a reader that is younger."""
        now_s = time.monotonic()
        if stats is not None:
            self._earlier.append((now_s, stats))
        while len(self._earlier) > 1 and now_s - self._earlier[1][0] >= SHARES_S:
            self._earlier.popleft()
        return self._earlier[0][1] if self._earlier else None
