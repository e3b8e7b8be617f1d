"""Who receives weights: heard of, outdated, fenced, and with whom each shares a broadcast.

A broadcast fails for all its members together. Members that do not even say so are the ones to
blame: they are fenced, left out until they report again, and the others try once more together.
Where everybody has answered nobody can be blamed, so those it failed for are halved into groups of
their own, until a bad one stands alone; a group that succeeds joins the others again.

Invariant: nobody is waited for twice without having reported in between. One event loop;
`streamrl.weights.sender` calls this, and owns the clock's deadlines.
"""

import itertools
import logging
import time
from collections.abc import Callable, Iterable

from msgspec import Struct, structs

from streamrl.weights.protocol import HELLO_S, Hello

log = logging.getLogger(__name__)

ALIVE_S = 3 * HELLO_S


class Peer(Struct, frozen=True):
    """A receiver as the sender knows it."""

    address: bytes
    hello: Hello
    seen_s: float

    @property
    def name(self) -> str:
        return self.hello.receiver_id


class Membership:
    """The receivers of one learner life, whose versions belong to its `history`."""

    def __init__(self, history: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._history = history
        self._clock = clock
        self._peers: dict[str, Peer] = {}
        self._apart: dict[str, str] = {}
        self.fenced: frozenset[str] = frozenset()
        self.num_fenced = 0

    def hear(self, address: bytes, hello: Hello) -> bool:
        """It lives; if it was fenced, it is not any more, unless it is still at what it was fenced
        over. False: it is another process than before."""
        known = self._peers.get(hello.receiver_id)
        if known is not None or not hello.is_loading:
            self._peers[hello.receiver_id] = Peer(address, hello, self._clock())
            self.fenced -= {hello.receiver_id}
        return known is None or known.hello.session == hello.session

    def leave(self, name: str) -> None:
        self._peers.pop(name, None)
        self.fenced -= {name}

    def alive(self) -> list[Peer]:
        now_s = self._clock()
        return [peer for peer in self._peers.values() if now_s - peer.seen_s <= ALIVE_S]

    def outdated(self, version: int) -> list[Peer]:
        """Version 0 is the model folder's in every history; others count only in this one."""
        same = {self._history, ""} if version == 0 else {self._history}
        return [
            peer
            for peer in self.alive()
            if peer.hello.policy_version != version or peer.hello.history not in same
        ]

    def fence(self, silent: Iterable[Peer]) -> None:
        for peer in silent:
            known = self._peers.get(peer.name)
            if known is not None and known.hello.session == peer.hello.session:
                log.warning("%s is left out until it reports again", peer.name)
                del self._peers[peer.name]
                self.fenced |= {peer.name}
                self.num_fenced += 1

    def book(self, name: str, version: int) -> None:
        """It has loaded this version; its next Hello will say the same."""
        if peer := self._peers.get(name):
            hello = structs.replace(peer.hello, policy_version=version, history=self._history)
            self._peers[name] = structs.replace(peer, hello=hello)

    def groups(self, peers: Iterable[Peer]) -> list[list[Peer]]:
        """The peers, each with those it is to share a broadcast with; the healthy ones first."""
        keyed = sorted(peers, key=lambda peer: (self._apart.get(peer.name, ""), peer.name))
        by_group = itertools.groupby(keyed, lambda peer: self._apart.get(peer.name, ""))
        return [list(members) for _, members in by_group]

    def regroup(self, loaded: set[str], failed: set[str], silent: set[str]) -> bool:
        """Decide who tries again with whom after a broadcast; whether to try at once.

        One that failed all by itself waits for its next Hello.
        """
        names = sorted(failed)
        halves = (names,) if silent else (names[::2], names[1::2])
        together = loaded | failed | silent
        self._apart = {
            **{name: group for name, group in self._apart.items() if name not in together},
            **({} if silent else {name: half[0] for half in halves for name in half}),
        }
        return bool(failed) and (bool(silent) or len(failed) > 1)
