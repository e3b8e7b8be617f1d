"""A group from its lease to its put, which one begins next, and how many more there is room for.

Invariant: groups begin in the order in which they are due: by `min_policy_version`, the oldest
version that may sample them, then by their place in the prompt stream.
"""

import asyncio
import logging
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from itertools import takewhile

from actors.episode_record import Rollout
from actors.episodes.group import GroupProgress
from streamrl.config.generator import GeneratorSettings
from streamrl.types import MAX_NAMES, Lease, LoadReport

GROWTH = 1.25


@dataclass(eq=False)
class LeasedGroup:
    lease: Lease
    task: asyncio.Task[None]
    progress: GroupProgress = field(default_factory=GroupProgress)
    leased_at_s: float = field(default_factory=time.monotonic)
    turn: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it begins, or is given back."""
    is_given_back: bool = False
    kept: dict[int, float] = field(default_factory=dict)
    """By the number of a sibling: the tokens that the buffer has of it; infinite if it needs no
    more."""
    _finished_before: frozenset[int] = frozenset()

    @property
    def has_begun(self) -> bool:
        return self.turn.is_set()

    def next_to_keep(self, *, at_once: bool) -> list[tuple[int, Rollout]]:
        """The siblings that the buffer lacks, by number: finished ones, unless `at_once` those that
        were finished at the last call, since a group that is put soon need not cost more; and
        unfinished ones that have GROWTH times the tokens it has."""
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
    waiting = sorted((g for g in groups if not g.has_begun), key=lambda group: due_of(group.lease))
    return list(takewhile(lambda g: g.lease.min_policy_version <= policy_version, waiting))


def num_free_groups(
    groups: Iterable[LeasedGroup], settings: GeneratorSettings, num_episodes: int
) -> int:
    """Groups of `num_episodes` each, the most of a group, that an engine has room for.

    An episode that waits for its environment leaves its slot to others, so a slot is free only
    while no episode can use it, unless `episode.max_in_flight` keeps it free. No more groups than a
    heartbeat can name are held.
    """
    groups = tuple(groups)
    num_free = settings.max_num_seqs - sum(group.progress.num_slots for group in groups)
    num_groups = math.ceil(num_free / num_episodes)
    if (most := settings.episode.max_in_flight) is not None:
        num_running = sum(group.progress.num_running for group in groups)
        num_groups = min(num_groups, (most - num_running) // num_episodes)
    return max(0, min(num_groups, MAX_NAMES - len(groups)))


log = logging.getLogger(__name__)

SHORTEST_S = 5.0
LOADS = 3
"""An update may wait for others before this one, and for one that is under way."""


@dataclass(eq=False)
class VersionGate:
    """Whether a generator's weights are the learner's, and new enough to lease for.

    A generator that joins has the weights of the model folder, or none that anybody knows, and one
    whose update failed those of an older version. Its leases would hold their places in the prompt
    stream until the next update, so it leases none before it has caught up. A learner that went
    back makes versions of the same numbers as those it has abandoned, so a version is one of a
    learner: with weights of another one a generator neither leases nor begins a group.

    Invariant: the version waited for has been published, or will be by the learner that the buffer
    reports: the version needed falls when a learner comes back at an earlier one.
    """

    publish_every: int
    max_staleness: int
    _: KW_ONLY
    lacks_weights: bool = False
    """Also once an update has failed, until another one is loaded."""
    published: int = 0
    """The newest version that the learner has published, by the last heartbeat."""
    # The first heartbeat's reply has the learner's version.
    _min_version: float = math.inf
    _learner_id: str = ""

    def is_open(self, policy_version: int, learner_id: str) -> bool:
        """Whether a generator with this version of that learner may lease."""
        is_new = policy_version >= self._min_version
        return not self.lacks_weights and is_new and self.is_of_learner(learner_id)

    def is_of_learner(self, learner_id: str) -> bool:
        """Whether the weights of `learner_id`, "" for those of the model's folder, are of the
        history that goes on, as far as is known."""
        return learner_id in ("", self._learner_id) or not self._learner_id

    def on_learner_version(self, learner_version: int, learner_id: str) -> None:
        """A heartbeat's reply: the first one sets the version to catch up to, later ones the oldest
        that may sample."""
        self._learner_id = learner_id
        self.published = learner_version - learner_version % self.publish_every
        self._min_version = max(
            learner_version - self.max_staleness, min(self._min_version, self.published)
        )

    def on_behind(self) -> None:
        """The published version does not arrive: catch up to it first."""
        self._min_version = max(self._min_version, self.published)

    def on_loaded(self, learner_id: str) -> None:
        """A version is loaded. The sender sends only the newest, once it has attached; `learner_id`
        is "" where that is not known, as of what a store has."""
        self.lacks_weights = False
        self._learner_id = learner_id or self._learner_id


class StarvedLeases:
    """Leases that wait for weights which have been published and do not arrive.

    A generator that updates leave out, or that is cut off from them, would hold such leases for
    good, and the learner would wait for their prompts. So it gives them back, and asks for none
    before it has caught up: only those whose groups have not begun, so that nothing sampled is lost
    and no prompt is trained twice.
    """

    def __init__(self, gate: VersionGate) -> None:
        self._gate = gate
        self._since_s: Mapping[str, float] = {}
        self._longest_load_s = 0.0

    @property
    def patience_s(self) -> float:
        """How long a published version may take to arrive: by the loads so far."""
        return max(SHORTEST_S, LOADS * self._longest_load_s)

    def on_loaded(self, report: LoadReport) -> None:
        self._longest_load_s = max(self._longest_load_s, report.transfer_s + report.load_s)

    def give_back(
        self, groups: Iterable[LeasedGroup], policy_version: int, learner_id: str
    ) -> None:
        """Those of the groups that wait for too long; the engine has this version of that learner.

        The gate is closed until the version that is published now has arrived.
        """
        now_s, published = time.monotonic(), self._gate.published
        has_version = policy_version if self._gate.is_of_learner(learner_id) else -1
        starving = {
            group.lease.lease_id: group
            for group in groups
            if not group.has_begun and has_version < group.lease.min_policy_version <= published
        }
        self._since_s = {name: self._since_s.get(name, now_s) for name in starving}
        if not any(now_s - since_s >= self.patience_s for since_s in self._since_s.values()):
            return
        log.warning(
            "has version %d for %.0f s while the learner's is %d: %d leases that need its weights "
            "are given back",
            policy_version,
            max(now_s - since_s for since_s in self._since_s.values()),
            published,
            len(starving),
        )
        self._gate.on_behind()
        for group in starving.values():
            group.give_back()
