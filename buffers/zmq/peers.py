"""What a server does for those who send what it refuses: less and less.

Refusals of all connections have a budget for each turn of the server; when it is spent, the server
rests, while the connections' queues fill and their senders wait.

A connection is read until it has sent MAX_MALFORMED malformed messages within WINDOW_S. For
IGNORED_S from then on its messages are discarded unread and unanswered; then it is read again. Good
clients behind the same address have connections of their own.

Invariant: a connection that sends no malformed message is never ignored, and at most MAX_PEERS are
remembered, those with the latest malformed messages.
"""

import logging
from collections import OrderedDict

import zmq
from msgspec import Struct

from buffers.sampling import Sampler
from streamrl.errors import WireError

log = logging.getLogger(__name__)

MAX_MALFORMED = 20
WINDOW_S = 10.0
IGNORED_S = 10.0
MAX_PEERS = 4096
REPORT_S = 1.0
# A turn's refusals: so many, or so many bytes of them, at a rate that leaves the cores to others.
MAX_REFUSED = 8
MAX_REFUSED_BYTES = 2**20


class RefusalBudget:
    """The refusals of one turn; `is_spent` when they are enough for it."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self._num_messages = self._num_bytes = 0

    def add(self, num_bytes: int = 0) -> None:
        self._num_messages += 1
        self._num_bytes += num_bytes

    @property
    def is_spent(self) -> bool:
        return self._num_messages >= MAX_REFUSED or self._num_bytes >= MAX_REFUSED_BYTES


class _Malformed(Struct, frozen=True):
    """The malformed messages of one connection since `since_s`."""

    since_s: float
    count: int = 0
    ignored_until_s: float = float("-inf")


class Peers:
    """By routing id, the connection with the latest malformed message last."""

    def __init__(self) -> None:
        self._malformed: OrderedDict[bytes, _Malformed] = OrderedDict()
        self._num_ignored = 0
        self._reported_s = float("-inf")
        self._warnings = Sampler(burst=5, every_s=10.0)

    def ignores(self, peer: bytes, now_s: float) -> bool:
        """Whether this message of the connection is to be discarded; it is counted then."""
        known = self._malformed.get(peer)
        if known is None or now_s >= known.ignored_until_s:
            return False
        self._num_ignored += 1
        return True

    def take_num_ignored(self, now_s: float) -> int:
        """The messages ignored since the last call, once in REPORT_S; else 0."""
        if now_s - self._reported_s < REPORT_S:
            return 0
        num_ignored, self._num_ignored, self._reported_s = self._num_ignored, 0, now_s
        return num_ignored

    def note_malformed(self, sender: zmq.Frame, error: WireError, now_s: float) -> None:
        """Count a malformed message; `sender` is the frame with the connection's routing id."""
        peer = sender.bytes
        known = self._malformed.pop(peer, None)
        if known is None or now_s - known.since_s > WINDOW_S:
            known = _Malformed(now_s)
        is_over = known.count + 1 >= MAX_MALFORMED
        until_s = now_s + IGNORED_S if is_over else known.ignored_until_s
        self._malformed[peer] = _Malformed(known.since_s, known.count + 1, until_s)
        if len(self._malformed) > MAX_PEERS:
            self._malformed.popitem(last=False)
        if is_over and self._warnings.admits(now_s):
            log.warning(
                "a connection from %s is ignored for %g s; of %d malformed messages the last: %s%s",
                *(sender.get("Peer-Address"), IGNORED_S, MAX_MALFORMED, error),
                self._warnings.take_omitted(),
            )
