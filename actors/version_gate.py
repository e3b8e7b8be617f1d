"""Whether a generator's weights are the learner's, and new enough to lease for.

A generator that joins has the weights of the model folder, or none that anybody knows (an engine
that starts with random ones, a server elsewhere), and one whose update failed has those of an older
version. Its leases would hold their places in the prompt stream until the next update. So neither
leases before it has caught up, and none leases what only a newer version may sample.

A learner that went back makes versions of the same numbers as those it has abandoned, so a version
is one of a learner. With weights of another one a generator neither leases nor begins a group.

Invariant: the version waited for has been published, or will be by the learner that the buffer
reports: the version needed falls when a learner comes back at an earlier one.
"""

import math


class VersionGate:
    """`publish_every` and `max_staleness` are those of the run, in versions."""

    def __init__(
        self, publish_every: int, max_staleness: int, *, lacks_weights: bool = False
    ) -> None:
        self._publish_every = publish_every
        self._max_staleness = max_staleness
        # The first heartbeat's reply has the learner's version.
        self._min_version = math.inf
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
        published = learner_version - learner_version % self._publish_every
        self._min_version = max(
            learner_version - self._max_staleness, min(self._min_version, published)
        )

    def on_load_failed(self) -> None:
        """An update did not arrive."""
        self.lacks_weights = True

    def on_loaded(self, learner_id: str) -> None:
        """A version is loaded. The sender sends only the newest, once it has attached."""
        self.lacks_weights = False
        self._learner_id = learner_id
