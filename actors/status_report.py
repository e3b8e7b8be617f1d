"""What a generator reports about itself in each heartbeat."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from actors.failures import FailureRecord
from actors.leased_group import LeasedGroup, num_free_groups
from streamrl.config.generator import GeneratorSettings
from streamrl.interfaces import Engine
from streamrl.types import MAX_COUNT, GeneratorStatus


class OccupancyReading(NamedTuple):
    """In the `uptime_s` so far, all room was in use for `busy_s`; use of half the room counts
    half."""

    max_num_groups: int
    busy_s: float
    uptime_s: float


class Occupancy:
    """Measures how much of its room for groups (of `num_episodes` each) a generator uses over time.
    A group counts from its beginning until its siblings need no slot."""

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
        """A group has begun or ended, or an episode waits or ends."""
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


RATE_S = 60.0


class TokenRate:
    """Tokens per second, over a time long enough that a slow model's prefill does not dominate
    it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._readings = deque([(clock(), 0.0)])

    def read(self, num_tokens: float) -> float:
        """Tokens per second since the last reading that is RATE_S old, or the first one."""
        now_s = self._clock()
        self._readings.append((now_s, num_tokens))
        while self._readings[1][0] <= now_s - RATE_S:
            self._readings.popleft()
        begin_s, begin = self._readings[0]
        return (num_tokens - begin) / max(now_s - begin_s, 1e-3)


@dataclass(eq=False)
class StatusReport:
    generator_id: str
    session: str
    engine: Engine
    failures: FailureRecord
    occupancy: Occupancy
    _rate: TokenRate = field(default_factory=TokenRate)

    def make(
        self, groups: Mapping[str, LeasedGroup], *, is_leaving: bool, is_catching_up: bool
    ) -> GeneratorStatus:
        gauges, failures = self.engine.gauges(), self.failures
        now_s, num_tokens = time.monotonic(), gauges["num_tokens"]
        return GeneratorStatus(
            generator_id=self.generator_id,
            session=self.session,
            policy_version=self.engine.policy_version,
            lease_ids=tuple(groups),
            lease_ages_s=tuple(now_s - group.leased_at_s for group in groups.values()),
            lease_num_tokens=tuple(group.progress.num_tokens for group in groups.values()),
            num_active=_count(gauges["num_active"]),
            num_waiting=_count(gauges["num_waiting"]),
            num_tokens=_count(num_tokens),
            tokens_per_s=self._rate.read(num_tokens),
            pause_s=gauges["pause_s"],
            kv_usage=gauges.get("kv_usage"),
            **self.occupancy.at_present()._asdict(),
            is_leaving=is_leaving,
            is_catching_up=is_catching_up,
            last_failure=failures.last,
            failed_rows=failures.rows,
            failed_rewards=failures.rewards,
            num_lost_agents=failures.num_lost_agents,
        )


def _count(gauge: float) -> int:
    """Limited to what a message can hold, whatever a server elsewhere reports."""
    return int(min(gauge, MAX_COUNT))
