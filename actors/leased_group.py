"""A leased group, which groups begin next, and for how many more there is room.

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


log = logging.getLogger(__name__)

SHORTEST_S = 5.0
LOADS = 3
"""An update may wait for earlier receivers, and for one that is under way."""


@dataclass(eq=False)
class VersionGate:
    """Whether a generator's weights are the learner's, and new enough to lease for.

    A generator that joins has the model folder's weights, or unknown ones; one whose update failed
    has an older version. Leases it took now would hold their places in the prompt stream until the
    next update, so it takes none until it has caught up. A learner that went back reuses the
    version numbers that it abandoned, so a version belongs to one learner: with another learner's
    weights a generator neither leases nor begins a group.

    Invariant: the version waited for has been, or will be, published by the learner that the buffer
    reports; if a learner comes back at an earlier version, the version needed falls too.
    """

    publish_every: int
    max_staleness: int
    _: KW_ONLY
    lacks_weights: bool = False
    """Also true from a failed update until the next one is loaded."""
    published: int = 0
    """The newest version that the learner has published, as of the last heartbeat."""
    # Infinite until the first heartbeat's reply brings the learner's version.
    _min_version: float = math.inf
    _learner_id: str = ""

    def is_open(self, policy_version: int, learner_id: str) -> bool:
        """Whether a generator with this version of that learner may lease."""
        is_new = policy_version >= self._min_version
        return not self.lacks_weights and is_new and self.is_of_learner(learner_id)

    def is_of_learner(self, learner_id: str) -> bool:
        """Whether weights of `learner_id` ("": the model folder's) belong to the current learner's
        history, as far as is known."""
        return learner_id in ("", self._learner_id) or not self._learner_id

    def on_learner_version(self, learner_version: int, learner_id: str) -> None:
        """Update from a heartbeat's reply: the first sets the version to catch up to, later ones
        the oldest that may sample."""
        self._learner_id = learner_id
        self.published = learner_version - learner_version % self.publish_every
        self._min_version = max(
            learner_version - self.max_staleness, min(self._min_version, self.published)
        )

    def on_behind(self) -> None:
        """The published version does not arrive: close until it has."""
        self._min_version = max(self._min_version, self.published)

    def on_loaded(self, learner_id: str) -> None:
        """A version is loaded. An attached learner sends only its newest; `learner_id` is "" if
        unknown, as with weights from a store."""
        self.lacks_weights = False
        self._learner_id = learner_id or self._learner_id


class StarvedLeases:
    """Gives back leases that wait for published weights which do not arrive.

    A generator that updates skip, or that is cut off from them, would hold such leases forever, and
    the learner would wait for their prompts. So it gives them back, and takes no new ones until it
    has caught up. Only leases whose groups have not begun are given back, so nothing sampled is
    lost and no prompt is trained twice.
    """

    def __init__(self, gate: VersionGate) -> None:
        self._gate = gate
        self._since_s: Mapping[str, float] = {}
        self._longest_load_s = 0.0

    @property
    def patience_s(self) -> float:
        """How long a published version may take to arrive, judging by the loads so far."""
        return max(SHORTEST_S, LOADS * self._longest_load_s)

    def on_loaded(self, report: LoadReport) -> None:
        self._longest_load_s = max(self._longest_load_s, report.transfer_s + report.load_s)

    def give_back(
        self, groups: Iterable[LeasedGroup], policy_version: int, learner_id: str
    ) -> None:
        """Give back the groups that have waited too long, while the engine has this version of that
        learner.

        Closes the gate until the currently published version has arrived.
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
