"""A leased group, which groups begin next, and for how many more there is room.

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
from actors.episodes.group import GroupProgress
from streamrl.config.generator import GeneratorSettings
from streamrl.types import MAX_NAMES, Lease

GROWTH = 1.25


@dataclass(eq=False)
class LeasedGroup:
    lease: Lease
    task: asyncio.Task[None]
    progress: GroupProgress = field(default_factory=GroupProgress)
    leased_at_s: float = field(default_factory=time.monotonic)
    turn: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the group begins or is given back."""
    is_given_back: bool = False
    kept: dict[int, float] = field(default_factory=dict)
    """By sibling number: how many of its tokens the buffer has; infinite if it needs no more."""
    _finished_before: frozenset[int] = frozenset()

    @property
    def has_begun(self) -> bool:
        return self.turn.is_set()

    def next_to_keep(self, *, at_once: bool) -> list[tuple[int, Rollout]]:
        """The siblings to put into the buffer, with their numbers: finished ones, and unfinished
        ones that have grown by the factor GROWTH since the last put. Unless `at_once`, a finished
        one waits for the second call, since the whole group may be put before that."""
        finished, standing = frozenset(self.progress.finished), self.progress.standing()
        due, growth = (finished, 1.0) if at_once else (self._finished_before, GROWTH)
        self._finished_before = finished
        return [
            (number, rollout)
            for number, rollout in sorted(standing.items())
            for kept in (self.kept.get(number, 0),)
            if (number in due and kept < math.inf)
            or (number not in finished and rollout.num_sampled_tokens > kept * growth)
        ]

    def on_learner_version(self, learner_version: int) -> None:
        """Give the lease back if the learner went back to a version that may not sample the group:
        a newer version will not come soon, and the buffer grants the prompt again for this one."""
        if self.lease.min_policy_version > learner_version:
            self.give_back()

    def give_back(self) -> None:
        """Release the lease, unless the group has begun."""
        if not self.has_begun:
            self.is_given_back = True
            self.turn.set()


def due_of(lease: Lease) -> tuple[int, int]:
    """Sort key: smaller for a group that is due earlier."""
    return lease.min_policy_version, lease.prompt_index


def next_groups(groups: Iterable[LeasedGroup], policy_version: int) -> list[LeasedGroup]:
    """The groups to begin with an engine at this version: in the order in which they are due, up to
    the first that needs a newer version."""
    waiting = sorted((g for g in groups if not g.has_begun), key=lambda group: due_of(group.lease))
    return list(takewhile(lambda g: g.lease.min_policy_version <= policy_version, waiting))


def num_free_groups(
    groups: Iterable[LeasedGroup], settings: GeneratorSettings, num_episodes: int
) -> int:
    """How many more groups an engine has room for, each of at most `num_episodes`.

    An episode that waits for its environment leaves its slot to others, and new groups fill it,
    within `episode.max_in_flight`. At most as many groups are held as a heartbeat can name.
    """
    groups = tuple(groups)
    num_free = settings.max_num_seqs - sum(group.progress.num_slots for group in groups)
    num_groups = math.ceil(num_free / num_episodes)
    if (most := settings.episode.max_in_flight) is not None:
        num_running = sum(group.progress.num_running for group in groups)
        num_groups = min(num_groups, (most - num_running) // num_episodes)
    return max(0, min(num_groups, MAX_NAMES - len(groups)))
