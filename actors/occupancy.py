"""How much of its room for groups a generator uses, added up over time.

Invariant: a group counts from its begin until its siblings need no place, so one that waits for
weights, or is only being scored, counts as room. `actors.generator` calls `update` whenever a group
has begun, an episode waits or ends, or a group ends; `actors.status_report` reads.
"""

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from actors.leased_group import LeasedGroup, num_free_groups
from streamrl.config.generator import GeneratorSettings


class OccupancyReading(NamedTuple):
    """Of the `uptime_s` so far the room was in use for `busy_s`, half of it counting half."""

    max_num_groups: int
    busy_s: float
    uptime_s: float


class Occupancy:
    """Of one generator, whose groups have `num_episodes` each, the most of a group."""

    def __init__(
        self,
        settings: GeneratorSettings,
        num_episodes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._num_episodes = num_episodes
        self._clock = clock
        self._max_num_groups = self._num_free(())
        self._level = self._busy_s = 0.0
        self._start_s = self._changed_s = clock()

    def update(self, groups: Iterable[LeasedGroup]) -> None:
        """The groups are these from here on."""
        self._advance()
        num_free = self._num_free(group for group in groups if group.has_begun)
        self._level = 1.0 - num_free / max(1, self._max_num_groups)

    def at_present(self) -> OccupancyReading:
        self._advance()
        uptime_s = self._changed_s - self._start_s
        return OccupancyReading(self._max_num_groups, self._busy_s, uptime_s)

    def _advance(self) -> None:
        now_s = self._clock()
        self._busy_s += self._level * (now_s - self._changed_s)
        self._changed_s = now_s

    def _num_free(self, groups: Iterable[LeasedGroup]) -> int:
        return num_free_groups(groups, self._settings, self._num_episodes)
