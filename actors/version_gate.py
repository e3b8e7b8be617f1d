"""Whether a generator's weights are the learner's, and new enough to lease for and to keep leases.

A generator that joins has the weights of the model folder, or none that anybody knows (an engine
that starts with random ones, a server elsewhere), and one whose update failed has those of an older
version. Its leases would hold their places in the prompt stream until the next update. So neither
leases before it has caught up, and none leases what only a newer version may sample.

A learner that went back makes versions of the same numbers as those it has abandoned, so a version
is one of a learner. With weights of another one a generator neither leases nor begins a group.

Invariant: the version waited for has been published, or will be by the learner that the buffer
reports: the version needed falls when a learner comes back at an earlier one.

The oldest version that may sample a lease has been made when it is granted, and reaches a generator
once it is published. A generator that updates leave out, or that is cut off from them, would hold
such leases for good, and the learner would wait for their prompts. So it gives them back, to others
that have the weights, and asks for none before it has caught up. Only leases whose groups have not
begun are given back, so nothing sampled is lost and no prompt is trained twice.
"""

import logging
import math
import time
from collections.abc import Iterable, Mapping

from actors.leased_group import LeasedGroup
from streamrl.types import LoadReport

log = logging.getLogger(__name__)

SHORTEST_S = 5.0
LOADS = 3
"""An update may wait for others before this one, and for one that is under way."""


class VersionGate:
    """`publish_every` and `max_staleness` are those of the run, in versions; `published` is the
    newest version that the learner has published, by the last heartbeat."""

    def __init__(
        self, publish_every: int, max_staleness: int, *, lacks_weights: bool = False
    ) -> None:
        self._publish_every = publish_every
        self._max_staleness = max_staleness
        # The first heartbeat's reply has the learner's version.
        self._min_version = math.inf
        self.published = 0
        self._learner_id = ""
        self.lacks_weights = lacks_weights

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
        self.published = learner_version - learner_version % self._publish_every
        self._min_version = max(
            learner_version - self._max_staleness, min(self._min_version, self.published)
        )

    def on_behind(self) -> None:
        """The published version does not arrive: catch up to it first."""
        self._min_version = max(self._min_version, self.published)

    def on_load_failed(self) -> None:
        """An update did not arrive."""
        self.lacks_weights = True

    def on_loaded(self, learner_id: str) -> None:
        """A version is loaded. The sender sends only the newest, once it has attached; `learner_id`
        is "" where that is not known, as of what a store has."""
        self.lacks_weights = False
        self._learner_id = learner_id or self._learner_id


class StarvedLeases:
    """Of one generator; `gate` says which version the learner has published."""

    def __init__(self, gate: VersionGate) -> None:
        self._gate = gate
        self._since_s: Mapping[str, float] = {}
        self._longest_load_s = 0.0

    @property
    def patience_s(self) -> float:
        """How long a published version may take to arrive: by the loads so far."""
        return max(SHORTEST_S, LOADS * self._longest_load_s)

    def on_loaded(self, report: LoadReport) -> None:
        """A load took this long."""
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
