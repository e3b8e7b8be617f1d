"""What a generator reports of itself with each heartbeat.

Invariant: the rate of tokens is that since the report before. Made by `actors.generator`.
"""

import time
from collections.abc import Mapping

from actors.failures import FailureRecord
from actors.leased_group import LeasedGroup
from actors.occupancy import Occupancy
from streamrl.interfaces import Engine
from streamrl.types import GeneratorStatus


class StatusReport:
    """Of one process."""

    def __init__(
        self,
        generator_id: str,
        session: str,
        engine: Engine,
        failures: FailureRecord,
        occupancy: Occupancy,
    ) -> None:
        self._id = generator_id
        self._session = session
        self._engine = engine
        self._failures = failures
        self._occupancy = occupancy
        self._last = (time.monotonic(), 0.0)

    def make(
        self, groups: Mapping[str, LeasedGroup], *, is_leaving: bool, is_catching_up: bool
    ) -> GeneratorStatus:
        """With the groups by the ids of their leases."""
        gauges, failures = self._engine.gauges(), self._failures
        occupancy = self._occupancy.at_present()
        now_s, num_tokens = time.monotonic(), gauges["num_tokens"]
        before_s, before = self._last
        self._last = (now_s, num_tokens)
        return GeneratorStatus(
            generator_id=self._id,
            session=self._session,
            policy_version=self._engine.policy_version,
            lease_ids=tuple(groups),
            lease_ages_s=tuple(now_s - group.leased_at_s for group in groups.values()),
            lease_num_tokens=tuple(group.progress.num_tokens for group in groups.values()),
            num_active=int(gauges["num_active"]),
            num_waiting=int(gauges["num_waiting"]),
            num_tokens=int(num_tokens),
            tokens_per_s=(num_tokens - before) / max(now_s - before_s, 1e-3),
            pause_s=gauges["pause_s"],
            kv_usage=gauges.get("kv_usage"),
            max_num_groups=occupancy.max_num_groups,
            busy_s=occupancy.busy_s,
            uptime_s=occupancy.uptime_s,
            is_leaving=is_leaving,
            is_catching_up=is_catching_up,
            last_failure=failures.last,
            failed_rows=failures.rows,
            failed_rewards=failures.rewards,
            num_lost_agents=failures.num_lost_agents,
        )
