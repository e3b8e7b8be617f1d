"""Whether a generator's weights are new enough to lease for.

A generator that joins has those of the model folder, and one whose update failed has those of the
version before; the leases they took would keep a place in line until the next update comes. So
neither leases before it has caught up, and nobody leases what only a newer version may sample.

Invariant: what is waited for has been published, or will be by whichever learner the buffer names:
the version needed falls with a learner that came back at an earlier one. `actors.generator` asks,
and tells of every heartbeat and every load.
"""

import math


class VersionGate:
    """`publish_every` and `max_staleness` are those of the run, in versions."""

    def __init__(self, publish_every: int, max_staleness: int) -> None:
        self._publish_every = publish_every
        self._max_staleness = max_staleness
        # Where the learner is, the first heartbeat tells.
        self._needed = math.inf
        self.has_failed = False

    def is_done(self, policy_version: int) -> bool:
        """Whether a generator of this version may lease."""
        return not self.has_failed and policy_version >= self._needed

    def hear(self, learner_version: int) -> None:
        """The buffer's word: first it names the version to catch up to, later the oldest that may
        still sample."""
        published = learner_version - learner_version % self._publish_every
        self._needed = max(learner_version - self._max_staleness, min(self._needed, published))

    def fail(self) -> None:
        """An update did not arrive."""
        self.has_failed = True

    def load(self) -> None:
        """A version has arrived; the sender sends none but the newest."""
        self.has_failed = False
