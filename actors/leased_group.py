"""A group from its lease to its put, and which one begins next.

Invariant: groups begin in the order in which they are due: by `min_policy_version`, the oldest
version that may sample them, then by their place in the prompt stream.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

from actors.episodes.rollout import GroupProgress
from streamrl.types import Lease


@dataclass(eq=False)
class LeasedGroup:
    """A group of one generator; its `min_policy_version` falls with that of the learner."""

    lease: Lease
    task: asyncio.Task[None]
    leased_at_s: float
    num_siblings: int
    min_policy_version: int
    has_begun: bool = False
    progress: GroupProgress = field(default_factory=GroupProgress)

    @property
    def due(self) -> tuple[int, int]:
        """Smaller for a group that is due earlier."""
        return self.min_policy_version, self.lease.prompt_index

    def is_next(self, groups: Iterable["LeasedGroup"], policy_version: int) -> bool:
        """Whether it may begin among `groups`, in an engine of this version."""
        if policy_version < self.min_policy_version:
            return False
        return all(other.has_begun or self.due <= other.due for other in groups)
