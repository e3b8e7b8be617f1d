"""A receiver as the sender knows it, and what its failures cost it.

Pure: the caller reads the clock. Who is asked, and with whom, is in `streamrl.weights.membership`.
"""

import math

from msgspec import Struct, structs

from streamrl.weights.protocol import HELLO_S, Hello

FREE_MISSES = 8
"""Failed loads before a receiver is asked less often."""
MAX_WAIT_S = 60.0
LATE_FACTOR = 8
"""The others wait for a late receiver in one part of this many and one of their time at most."""


class Asked(Struct, frozen=True):
    """A message that a receiver was sent; `policy_version` is None for an announcement."""

    attempt: int
    policy_version: int | None
    time_s: float


class Peer(Struct, frozen=True):
    """A receiver as the sender knows it: its connection, its last Hello, and how it did since.

    `num_late` are the deadlines that it exceeded one after the other, and `took_s` is how long the
    last version took that it loaded after one, 0 if it has not; until `left_out_until_s` the others
    go on without it.
    """

    address: bytes
    hello: Hello
    seen_s: float
    has_loaded: bool = False
    num_misses: int = 0
    asked_again_s: float = 0.0
    asked: Asked | None = None
    num_late: int = 0
    took_s: float = 0.0
    left_out_until_s: float = 0.0

    @property
    def name(self) -> str:
        return self.hello.receiver_id

    @property
    def num_failures(self) -> int:
        return self.num_misses + FREE_MISSES * self.num_late

    def with_version(self, version: int, learner_id: str) -> "Peer":
        """As the next Hello of the receiver, which has loaded this, will say."""
        hello = structs.replace(
            self.hello, policy_version=version, learner_id=learner_id, is_loading=False
        )
        if hello.validator is not None:
            hello = structs.replace(hello, validator=structs.replace(hello.validator, is_busy=True))
        return structs.replace(self, hello=hello, has_loaded=True)

    def late(self, now_s: float) -> "Peer":
        """It has exceeded a deadline. Once may be a pause; after that it is left out for as long as
        it was waited for, and twice as long each time."""
        num_late = self.num_late + 1
        waited_s = 0.0 if self.asked is None else now_s - self.asked.time_s
        factor = 0 if num_late == 1 else min(LATE_FACTOR, 2 ** (num_late - 2))
        until_s = now_s + min(MAX_WAIT_S, factor * waited_s)
        return structs.replace(self, num_late=num_late, left_out_until_s=until_s)

    def missed(self, now_s: float) -> "Peer":
        """It has failed to load. It waits twice as long after each miss beyond FREE_MISSES."""
        num_misses = min(self.num_misses + 1, 3 * FREE_MISSES)
        excess = num_misses - FREE_MISSES
        wait_s = min(MAX_WAIT_S, HELLO_S * 2**excess) if excess > 0 else 0.0
        return structs.replace(self, num_misses=num_misses, asked_again_s=now_s + wait_s)

    def late_sentence(self, wait_s: float, deadline_s: float) -> str:
        """Of one that is left out for so much longer; a version is waited for half of
        `weights.deadline_s`."""
        sentence = (
            f"{self.name} has exceeded weights.deadline_s ({deadline_s:g} s) for {self.num_late} "
            "updates one after the other"
        )
        if wait_s > 0:
            sentence += f", and others go on without it for {wait_s:.1f} s more"
        if not self.took_s:
            return f"{sentence}; it has answered none of them"
        enough_s = max(2 * deadline_s, math.ceil(4 * self.took_s))
        return (
            f"{sentence}; the last one took {self.took_s:.2g} s: set weights.deadline_s to "
            f"{enough_s:g}"
        )

    def failing_sentence(self, wait_s: float) -> str:
        """Of one that is asked again so much later."""
        return (
            f"{self.name} has failed to load {self.num_misses} updates one after the other, and is "
            f"asked again in {wait_s:.0f} s; its log says why"
        )
