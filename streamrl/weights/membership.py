"""Who receives weights: alive, outdated, fenced, and in which broadcast group.

A broadcast fails for all its members together. Members that do not even answer are fenced: left out
until they report again, and the others try once more together. If everybody answered, the culprit
is unknown, so those it failed for are halved into groups of their own, until a bad one is alone; a
group that succeeds joins the others again.

Invariant: nobody is waited for twice without having reported in between. Runs in one event loop;
the deadlines are the sender's.
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
    """A receiver as the sender knows it: its socket's address and its last Hello."""

    address: bytes
    hello: Hello
    seen_s: float

    @property
    def name(self) -> str:
        return self.hello.receiver_id


class Membership:
    """The receivers of one learner, whose versions have its `learner_id`."""

    def __init__(self, learner_id: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._learner_id = learner_id
        self._clock = clock
        self._peers: dict[str, Peer] = {}
        self._group_of: dict[str, str] = {}
        self.fenced: frozenset[str] = frozenset()
        self.num_fenced = 0

    def on_hello(self, address: bytes, hello: Hello) -> bool:
        """Keep the receiver; a fenced one returns unless it is still loading what it was fenced
        over. False: it is another process than before."""
        known = self._peers.get(hello.receiver_id)
        if known is not None or not hello.is_loading:
            self._peers[hello.receiver_id] = Peer(address, hello, self._clock())
            self.fenced -= {hello.receiver_id}
        return known is None or known.hello.session == hello.session

    def on_leave(self, name: str) -> None:
        self._peers.pop(name, None)
        self.fenced -= {name}

    def on_loaded(self, name: str, version: int) -> None:
        """The receiver has this version, as its next Hello will confirm."""
        if peer := self._peers.get(name):
            hello = structs.replace(peer.hello, policy_version=version, learner_id=self._learner_id)
            self._peers[name] = structs.replace(peer, hello=hello)

    def alive(self) -> list[Peer]:
        now_s = self._clock()
        return [peer for peer in self._peers.values() if now_s - peer.seen_s <= ALIVE_S]

    def outdated(self, version: int) -> list[Peer]:
        """Those alive that lack this version. Version 0 is the model folder's with every learner;
        others are the same weights only with the same learner."""
        same = {self._learner_id, ""} if version == 0 else {self._learner_id}
        return [
            peer
            for peer in self.alive()
            if peer.hello.policy_version != version or peer.hello.learner_id not in same
        ]

    def version_of(self, peer: Peer) -> int:
        """The version of this learner that the peer has; -1 for none."""
        return peer.hello.policy_version if peer.hello.learner_id == self._learner_id else -1

    def fence(self, silent: Iterable[Peer]) -> None:
        """Leave these out until they report again; not a process that has replaced one of them."""
        for peer in silent:
            known = self._peers.get(peer.name)
            if known is not None and known.hello.session == peer.hello.session:
                log.warning("%s is left out until it reports again", peer.name)
                del self._peers[peer.name]
                self.fenced |= {peer.name}
                self.num_fenced += 1

    def groups(self, peers: Iterable[Peer]) -> list[list[Peer]]:
        """The peers by broadcast group; the group without failures comes first."""
        keyed = sorted(peers, key=lambda peer: (self._group_of.get(peer.name, ""), peer.name))
        by_group = itertools.groupby(keyed, lambda peer: self._group_of.get(peer.name, ""))
        return [list(members) for _, members in by_group]

    def regroup(self, loaded: set[str], failed: set[str], silent: set[str]) -> bool:
        """Decide who tries again with whom after a broadcast; whether to try at once.

        One that failed all by itself waits for its next Hello.
        """
        names = sorted(failed)
        halves = (names,) if silent else (names[::2], names[1::2])
        together = loaded | failed | silent
        self._group_of = {
            **{name: group for name, group in self._group_of.items() if name not in together},
            **({} if silent else {name: half[0] for half in halves for name in half}),
        }
        return bool(failed) and (bool(silent) or len(failed) > 1)
