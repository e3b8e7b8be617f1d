"""A group from its lease to its put, which one begins next, and how many more there is room for.

Invariant: groups begin in the order in which they are due: by `min_policy_version`, the oldest
version that may sample them, then by their place in the prompt stream.
"""

import asyncio
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import takewhile

from actors.episode_record import Rollout
from actors.episodes.rollout import GroupProgress
from streamrl.config.generator import GeneratorSettings
from streamrl.types import Lease

GROWTH = 1.25


@dataclass(eq=False)
class LeasedGroup:
    """A group of one generator."""

    lease: Lease
    task: asyncio.Task[None]
    leased_at_s: float
    num_episodes: int
    progress: GroupProgress = field(default_factory=GroupProgress)
    turn: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it begins, or is given back."""
    is_given_back: bool = False
    kept: dict[int, float] = field(default_factory=dict)
    """By the number of a sibling: the tokens that the buffer has of it; infinite if it needs no
    more."""
    _finished_before: frozenset[int] = frozenset()

    @classmethod
    def of(
        cls, lease: Lease, task: asyncio.Task[None], num_episodes: int, progress: GroupProgress
    ) -> "LeasedGroup":
        """A group that was leased just then."""
        return cls(lease, task, time.monotonic(), num_episodes, progress)

    @property
    def due(self) -> tuple[int, int]:
        """Smaller for a group that is due earlier."""
        return due_of(self.lease)

    @property
    def num_slots(self) -> int:
        """Slots of the engine that it needs; before it begins, one for each of its episodes."""
        return self.progress.num_slots if self.progress.episodes else self.num_episodes

    @property
    def num_running(self) -> int:
        """Episodes that are not over."""
        return self.progress.num_running if self.progress.episodes else self.num_episodes

    @property
    def has_begun(self) -> bool:
        return self.turn.is_set()

    def next_to_keep(self, *, at_once: bool) -> list[tuple[int, Rollout]]:
        """The siblings that the buffer lacks, by number: finished ones, unless `at_once` those that
        were finished at the last call, since a group that is put soon need not cost more; and
        unfinished ones that have GROWTH times the tokens it has."""
        finished, standing = frozenset(self.progress.finished), self.progress.standing()
        due = finished if at_once else self._finished_before
        self._finished_before = finished
        return [
            (number, rollout)
            for number, rollout in sorted(standing.items())
            for kept in (self.kept.get(number, 0),)
            if (number in due and kept < math.inf)
            or (number not in finished and self._has_grown(rollout, kept, at_once=at_once))
        ]

    def _has_grown(self, rollout: Rollout, kept: float, *, at_once: bool) -> bool:
        growth = 1.0 if at_once else GROWTH
        return rollout.num_sampled_tokens > kept * growth

    def on_learner_version(self, learner_version: int) -> None:
        """Give the lease back if the learner went back to a version that may not sample the group:
        it will not make a newer one soon, and the buffer grants the prompt again for this one."""
        if self.lease.min_policy_version > learner_version:
            self.give_back()

    def give_back(self) -> None:
        """Unless the group has begun, its lease is released."""
        if not self.has_begun:
            self.is_given_back = True
            self.turn.set()


def due_of(lease: Lease) -> tuple[int, int]:
    """Smaller for a group that is due earlier."""
    return lease.min_policy_version, lease.prompt_index


def next_groups(groups: Iterable[LeasedGroup], policy_version: int) -> list[LeasedGroup]:
    """Those that begin in an engine of this version: the first that are due, in this order, up to
    one that a newer version has to sample."""
    waiting = sorted((g for g in groups if not g.has_begun), key=lambda group: group.due)
    return list(takewhile(lambda g: g.lease.min_policy_version <= policy_version, waiting))


def num_free_groups(
    groups: Iterable[LeasedGroup], settings: GeneratorSettings, num_episodes: int
) -> int:
    """Groups of `num_episodes` each, the most of a group, that an engine has room for.

    An episode that waits for its environment leaves its slot to others, so a slot is free only
    while no episode can use it, unless `episode.max_in_flight` keeps it free.
    """
    groups = tuple(groups)
    num_free = settings.max_num_seqs - sum(group.num_slots for group in groups)
    num_groups = math.ceil(num_free / num_episodes)
    if (most := settings.episode.max_in_flight) is not None:
        num_running = sum(group.num_running for group in groups)
        num_groups = min(num_groups, (most - num_running) // num_episodes)
    return max(0, num_groups)
