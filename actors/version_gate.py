"""Whether a generator's weights are new enough to lease for, and leases whose weights do not come.

`VersionGate` keeps a generator from leasing before it has caught up with the learner;
`StarvedLeases` gives back leases that wait for published weights which do not arrive.
"""

import logging
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass

from actors.leased_group import LeasedGroup
from streamrl.types import LoadReport

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
