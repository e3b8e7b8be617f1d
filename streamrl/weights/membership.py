"""Who receives weights: alive, outdated, fenced, and in which broadcast group.

A broadcast fails for all its members together. Members that do not even answer are fenced, that is,
left out until they report again, and the others try once more together. If everybody answered, the
culprit is unknown, so each failed member is sent the version alone until that succeeds. A receiver
that fails to load update after update is asked less and less often. One that keeps exceeding the
deadline is left out for as long as the others have waited for it, then longer, up to LATE_FACTOR
times that; the only receiver is never left out.

Invariant: nobody is waited for twice without having reported in between. A receiver is bound to one
connection, and a connection to one receiver: another connection gets the name only with the
session's secret, or after the name has been silent. Runs in one event loop; the sender keeps the
deadlines.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct, structs

from streamrl.errors import WeightTransferError
from streamrl.weights.protocol import HELLO_S, NO_LEARNER, Hello

FREE_MISSES = 8
"""Failed loads before a receiver is asked less often."""
MAX_WAIT_S = 60.0
LATE_FACTOR = 8
"""The others spend at most one part in (this + 1) of their time waiting for a late receiver."""


class Peer(Struct, frozen=True):
    """A receiver as the sender knows it: its connection, its last Hello, and its record since.

    `asked_s` is when it was sent the last message. `num_late` counts deadlines exceeded in a row,
    and `took_s` is how long the last version took that it loaded too late, 0 if none; until
    `left_out_until_s` the others go on without it.
    """

    address: bytes
    hello: Hello
    seen_s: float
    has_loaded: bool = False
    num_misses: int = 0
    asked_again_s: float = 0.0
    asked_s: float = 0.0
    num_late: int = 0
    took_s: float = 0.0
    left_out_until_s: float = 0.0

    @property
    def name(self) -> str:
        return self.hello.receiver_id

    @property
    def num_failures(self) -> int:
        """A deadline that it exceeded has cost the others more than a failed load."""
        return self.num_misses + FREE_MISSES * self.num_late

    def heard(self, address: bytes, hello: Hello, now_s: float) -> "Peer":
        """Update with its next Hello, which may say that it has loaded a version too late."""
        peer = structs.replace(self, address=address, hello=hello, seen_s=now_s)
        had = (self.hello.policy_version, self.hello.learner_id)
        has_other = had != (hello.policy_version, hello.learner_id) != (0, NO_LEARNER)
        if not self.num_late or not has_other:
            return peer
        return structs.replace(peer, has_loaded=True, took_s=now_s - self.asked_s)

    def late(self, now_s: float) -> "Peer":
        """It has exceeded a deadline. Once may be a pause; after that it is left out for as long as
        it was waited for, twice as long each time."""
        num_late = self.num_late + 1
        factor = 0 if num_late == 1 else min(LATE_FACTOR, 2 ** (num_late - 2))
        until_s = now_s + min(MAX_WAIT_S, factor * (now_s - self.asked_s))
        return structs.replace(self, num_late=num_late, left_out_until_s=until_s)

    def missed(self, now_s: float) -> "Peer":
        """It has failed to load. After FREE_MISSES, each miss doubles the time until it is asked
        again."""
        num_misses = min(self.num_misses + 1, 3 * FREE_MISSES)
        excess = num_misses - FREE_MISSES
        wait_s = min(MAX_WAIT_S, HELLO_S * 2**excess) if excess > 0 else 0.0
        return structs.replace(self, num_misses=num_misses, asked_again_s=now_s + wait_s)

    def late_sentence(self, wait_s: float, deadline_s: float) -> str:
        """The sentence about a receiver that is left out for this much longer; a version is waited
        for half of `weights.deadline_s`."""
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
        """The sentence about a receiver that is asked again after this time."""
        return (
            f"{self.name} has failed to load {self.num_misses} updates one after the other, and is "
            f"asked again in {wait_s:.0f} s; its log says why"
        )


log = logging.getLogger(__name__)

ALIVE_S = 3 * HELLO_S
MAX_RECEIVERS = 4096
HANDOVER_S = 10.0
"""How long a receiver that went silent in a load may still write to its inference server; no other
receiver on that server is sent a version meanwhile."""


class Membership:
    """The receivers of one learner; its versions carry its `learner_id`."""

    def __init__(self, learner_id: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._learner_id = learner_id
        self._clock = clock
        self._peers: dict[str, Peer] = {}
        self._fenced: dict[str, Peer] = {}
        self._names: dict[bytes, str] = {}
        self._alone: frozenset[str] = frozenset()
        self.num_fenced = 0
        self.is_last_version = False
        """Whether validators are sent the newest version, too, however early it comes."""

    @property
    def fenced(self) -> frozenset[str]:
        return frozenset(self._fenced)

    def on_hello(self, address: bytes, hello: Hello) -> bool:
        """Record a receiver's Hello; a fenced one returns, unless it is still loading what it was
        fenced for. False if it is another process than before.

        Raises:
            WeightTransferError: the name is that of another process that is alive, the connection
                that of another receiver, or there are too many.
        """
        known = self._known(hello.receiver_id)
        self._require_unbound(address, hello, known)
        is_same = known is None or known.hello.session == hello.session
        peer = Peer(address, hello, self._clock())
        if known is not None:
            self._names.pop(known.address, None)
        if known is not None and is_same:
            peer = known.heard(address, hello, self._clock())
        if hello.is_loading and known is None:
            return True
        self._names[address] = peer.name
        if hello.is_loading and peer.name in self._fenced:
            self._fenced[peer.name] = peer
        else:
            self._fenced.pop(peer.name, None)
            self._peers[peer.name] = peer
        return is_same

    def on_leave(self, name: str) -> None:
        for peers in (self._peers, self._fenced):
            if peer := peers.pop(name, None):
                self._names.pop(peer.address, None)

    def on_asked(self, names: Iterable[str]) -> None:
        """These were sent a message that they must answer."""
        for name in names:
            if peer := self._peers.get(name):
                self._peers[name] = structs.replace(peer, asked_s=self._clock())

    def on_loaded(self, name: str, version: int) -> None:
        """The receiver has loaded this version; its next Hello will confirm it."""
        if peer := self._peers.get(name):
            validator = peer.hello.validator
            hello = structs.replace(
                peer.hello,
                policy_version=version,
                learner_id=self._learner_id,
                is_loading=False,
                validator=validator and structs.replace(validator, is_busy=True),
            )
            # Its earlier failures are forgiven.
            known = (peer.address, hello, peer.seen_s)
            self._peers[name] = Peer(*known, has_loaded=True, asked_s=peer.asked_s)

    def on_failed(self, name: str) -> None:
        """The receiver has answered that it did not load what it was sent."""
        if peer := self._peers.get(name):
            self._peers[name] = peer.missed(self._clock())

    def address_of(self, name: str) -> bytes | None:
        """The connection that the receiver is bound to; None if it is unknown."""
        known = self._known(name)
        return None if known is None else known.address

    def alive(self) -> list[Peer]:
        return [peer for peer in self._peers.values() if self._is_alive(peer)]

    def lacks(self, hello: Hello, version: int) -> bool:
        """Whether the peer lacks the version. Version 0 is the model folder's for every learner;
        others are the same weights only if the learner is the same."""
        same = {self._learner_id, ""} if version == 0 else {self._learner_id}
        return hello.policy_version != version or hello.learner_id not in same

    def outdated(self, version: int) -> list[Peer]:
        """The living receivers that lack this version and may be asked."""
        now_s, alive = self._clock(), self.alive()
        left_out = self._left_out(alive)
        return [
            peer
            for peer in alive
            if self.lacks(peer.hello, version)
            and peer.asked_again_s <= now_s
            and peer.name not in left_out
            and self._wants(peer.hello, version)
        ]

    def by_server(
        self, outdated: Sequence[Peer], version: int, asked: set[str]
    ) -> tuple[list[Peer], list[Peer]]:
        """Which outdated receivers to send the version, and which to tell that their inference
        server has it. Of the receivers on one server one is sent the version, and none while one of
        them is `asked` or may still be loading."""
        holders = [peer for peer in self.alive() if self.version_of(peer) == version]
        held = {peer.hello.server for peer in holders} - {""}
        now_s = self._clock()
        silent = [peer for peer in self._fenced.values() if now_s - peer.seen_s <= HANDOVER_S]
        loading = [peer for peer in self._peers.values() if peer.name in asked]
        busy = {peer.hello.server for peer in [*silent, *loading]}
        alone = [peer for peer in outdated if not peer.hello.server]
        sharing = sorted(
            (peer for peer in outdated if peer.hello.server and peer.hello.server not in busy),
            key=lambda peer: (peer.hello.server, peer.num_failures, peer.name),
        )
        first = {peer.hello.server: peer for peer in reversed(sharing)}
        sent = [peer for server, peer in first.items() if server not in held]
        return [*alone, *sent], [peer for peer in sharing if peer.hello.server in held]

    def version_of(self, peer: Peer) -> int:
        """The version of this learner that the peer has; -1 if none."""
        return peer.hello.policy_version if peer.hello.learner_id == self._learner_id else -1

    def fence(self, silent: Iterable[Peer]) -> None:
        """Leave these out until they report again, unless another process has taken the name
        since."""
        for peer in silent:
            known = self._peers.get(peer.name)
            if known is not None and known.hello.session == peer.hello.session:
                log.warning("%s is left out until it reports again", peer.name)
                del self._peers[peer.name]
                self._fenced[peer.name] = known.late(self._clock())
                self.num_fenced += 1

    def late(self) -> list[tuple[Peer, float]]:
        """The receivers that exceeded several deadlines in a row, and for how many more seconds
        each is left out."""
        now_s = self._clock()
        known = (*self._peers.values(), *self._fenced.values())
        late = [peer for peer in known if peer.num_late > 1 and self._is_alive(peer)]
        left_out = self._left_out(late)
        return [
            (peer, peer.left_out_until_s - now_s if peer.name in left_out else 0.0)
            for peer in sorted(late, key=lambda peer: peer.name)
        ]

    def failing(self) -> list[tuple[Peer, float]]:
        """The receivers that keep failing to load, and in how many seconds each is asked again."""
        now_s = self._clock()
        failing = [peer for peer in self.alive() if peer.asked_again_s > now_s]
        return [(peer, peer.asked_again_s - now_s) for peer in failing]

    def groups(self, peers: Iterable[Peer]) -> list[list[Peer]]:
        """The peers by broadcast group: those without failures together, each other one alone."""
        peers = sorted(peers, key=lambda peer: peer.name)
        together = [peer for peer in peers if peer.name not in self._alone]
        alone = [[peer] for peer in peers if peer.name in self._alone]
        return [together, *alone] if together else alone

    def regroup(self, loaded: set[str], failed: set[str], silent: set[str]) -> bool:
        """Decide who tries again with whom after a broadcast; whether to try at once.

        One that failed all by itself waits for its next Hello.
        """
        self._alone -= loaded | failed | silent
        if not silent:
            self._alone |= failed
        return bool(failed) and (bool(silent) or len(failed) > 1)

    def _known(self, name: str) -> Peer | None:
        return self._peers.get(name) or self._fenced.get(name)

    def _is_alive(self, peer: Peer) -> bool:
        return self._clock() - peer.seen_s <= ALIVE_S

    def _wants(self, hello: Hello, version: int) -> bool:
        """Whether a validator should be sent the version now (always true for a generator). What it
        has from another learner says nothing about this learner's versions."""
        status = hello.validator
        if status is None:
            return True
        if status.is_busy:
            return False
        is_of_another = hello.learner_id not in (self._learner_id, "", NO_LEARNER)
        if is_of_another or self.is_last_version:
            return True
        return version >= status.next_version and not status.is_resting

    def _left_out(self, peers: Iterable[Peer]) -> set[str]:
        """The late receivers among these that the others currently go on without."""
        now_s = self._clock()
        go_on = any(
            other.hello.validator is None and other.left_out_until_s <= now_s
            for other in self.alive()
        )
        return {peer.name for peer in peers if go_on and peer.left_out_until_s > now_s}

    def _require_unbound(self, address: bytes, hello: Hello, known: Peer | None) -> None:
        name = self._names.get(address, hello.receiver_id)
        if name != hello.receiver_id:
            raise WeightTransferError(f"its connection is that of {name!r}")
        if known is None and len(self._peers) + len(self._fenced) >= MAX_RECEIVERS:
            self._forget_the_dead()
            if len(self._peers) + len(self._fenced) >= MAX_RECEIVERS:
                raise WeightTransferError(f"there are {MAX_RECEIVERS} receivers already")
        if known is None or known.hello.session == hello.session:
            return
        if self._is_alive(known):
            raise WeightTransferError(f"{known.name!r} is another process, which is alive")

    def _forget_the_dead(self) -> None:
        dead = [*self._peers.values(), *self._fenced.values()]
        for peer in dead:
            if not self._is_alive(peer):
                self.on_leave(peer.name)
                self._alone -= {peer.name}
