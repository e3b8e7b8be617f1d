"""Admission: how many leases may be open, and which versions may sample the next one.

A group that is trained in order is trained at its version plus the groups in flight before it,
divided by `groups_per_step`; admission bounds them so that it is not too old by then.
"""

from buffers.ledger.entries import Entries
from streamrl.errors import ConfigError
from streamrl.types import admission_capacity


class Admission:
    """No more groups are admitted than are trained until `final_version`, which may be changed."""

    def __init__(
        self,
        entries: Entries,
        groups_per_step: int,
        max_staleness: int,
        final_version: int | None,
    ) -> None:
        self._entries = entries
        self._groups_per_step = groups_per_step
        self._max_staleness = max_staleness
        self.final_version = final_version
        self._capacity = admission_capacity(max_staleness, groups_per_step)

    def end_at(self, final_version: int | None) -> None:
        """None keeps what was set before."""
        if final_version is not None:
            self.final_version = final_version

    def num_admitted(self, version: int, *, draining: bool) -> int:
        """How many more leases fit under the staleness bound and before the run's end."""
        capacity, in_flight = self._capacity, self._entries.in_flight
        if self.final_version is not None:
            capacity = min(capacity, (self.final_version - version) * self._groups_per_step)
        free = max(0, capacity - in_flight)
        # Groups that fill no batch would stay in flight for good.
        return min(free, -in_flight % self._groups_per_step) if draining else free

    def min_policy_version(self, version: int) -> int:
        """The oldest version that may sample the next group."""
        trained_at = version + self._entries.in_flight // self._groups_per_step
        return max(0, trained_at - self._max_staleness)


def require_capacity(num_groups: int, max_staleness: int, groups_per_step: int) -> None:
    """Refuse a batch that admission can never fill."""
    capacity = admission_capacity(max_staleness, groups_per_step)
    if num_groups > capacity:
        raise ConfigError(
            f"a batch of {num_groups} groups can never fill: buffer.max_staleness {max_staleness} "
            f"and learner.groups_per_step {groups_per_step} admit {capacity}"
        )
