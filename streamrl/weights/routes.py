"""Which way a version takes to each receiver: a file, memory that is shared, or a broadcast.

    weights.transport files     files for everybody
    weights.catch_up files      a file for who comes late, so that it holds up nobody
    weights.backend auto        shared memory for those who can map the sender's buffers: on its
                                host, if they stand in host memory; on its GPU, if they are there.
                                The others share a broadcast: NCCL between GPUs that are all
                                different (it refuses two ranks on one), else gloo
    weights.backend shared      shared memory for everybody; who cannot map it says why, and goes on
                                with the weights it has
    weights.backend gloo, nccl  broadcasts

Invariant: who failed on a way that was chosen for it is given another one at once. Owned by
`streamrl.weights.sender`.
"""

import logging
from collections.abc import Iterable, Mapping
from typing import Literal, TypeAlias

from streamrl.config.weights import WeightSettings
from streamrl.errors import ConfigError
from streamrl.types import Locality
from streamrl.weights.membership import Peer

log = logging.getLogger(__name__)

Route: TypeAlias = Literal["file", "shared memory", "broadcast"]
ROUTES: tuple[Route, ...] = ("file", "shared memory", "broadcast")


class Routes:
    """The ways of one learner life, whose sender is at `locality`; `shares`: others can map its
    buffers."""

    def __init__(
        self, settings: WeightSettings, history: str, locality: Locality, *, shares: bool
    ) -> None:
        if settings.backend == "shared" and not shares:
            raise ConfigError(
                "weights.backend shared: this system has no memory that other processes can open; "
                "use auto, gloo or nccl"
            )
        self._settings = settings
        self._history = history
        self._locality = locality
        self._shares = shares
        self._has_delivered = False
        self._cannot_read_files: frozenset[str] = frozenset()
        self._cannot_share: frozenset[str] = frozenset()
        self._told: Mapping[str, Route] = {}

    def split(self, peers: Iterable[Peer]) -> dict[Route, list[Peer]]:
        """The peers of each way."""
        chosen = {peer: self._of(peer) for peer in peers}
        for peer, route in chosen.items():
            if self._told.get(peer.name) != route:
                log.info("%s gets its weights by %s", peer.name, route)
        self._told = {**self._told, **{peer.name: route for peer, route in chosen.items()}}
        return {route: [peer for peer in chosen if chosen[peer] == route] for route in ROUTES}

    def delivered(self) -> None:
        """From here on somebody has a version of this life, and who has none is late."""
        self._has_delivered = True

    def have_read_file(self, peers: Iterable[Peer], loaded: set[str]) -> None:
        names = {peer.name for peer in peers}
        self._cannot_read_files = (self._cannot_read_files | names) - loaded

    def have_shared(self, peers: Iterable[Peer], failed: set[str]) -> bool:
        """Whether some get another way at once."""
        if self._settings.backend != "auto":
            return False
        self._cannot_share |= {peer.hello.session for peer in peers if peer.name in failed}
        return bool(failed)

    def backend(self, peers: Iterable[Peer]) -> str:
        """Of a broadcast to these."""
        localities = [self._locality, *(peer.hello.locality for peer in peers)]
        return (
            backend_among(localities)
            if self._settings.backend == "auto"
            else self._settings.backend
        )

    def _of(self, peer: Peer) -> Route:
        if self._prefers_file(peer):
            return "file"
        match self._settings.backend:
            case "shared":
                return "shared memory"
            case "auto" if self._shares and peer.hello.session not in self._cannot_share:
                can = can_share(self._locality, peer.hello.locality)
                return "shared memory" if can else "broadcast"
            case _:
                return "broadcast"

    def _prefers_file(self, peer: Peer) -> bool:
        if self._settings.transport == "files":
            return True
        is_late = peer.hello.history != self._history and self._has_delivered
        readable = peer.name not in self._cannot_read_files
        return self._settings.catch_up == "files" and is_late and readable


def can_share(sender: Locality, receiver: Locality) -> bool:
    """Whether the receiver can map the memory the sender's buffers stand in."""
    if not sender.host or sender.host != receiver.host:
        return False
    return sender.device_type == "cpu" or (bool(sender.gpus) and sender.gpus == receiver.gpus)


def backend_among(localities: list[Locality]) -> Literal["gloo", "nccl"]:
    """GPUs that nobody knows count as different, as those of other machines are."""
    gpus = [gpu for locality in localities for gpu in locality.gpus]
    are_different = len(set(gpus)) == len(gpus)
    on_gpus = all(locality.device_type == "cuda" for locality in localities)
    return "nccl" if on_gpus and are_different else "gloo"
