"""Chooses the route by which a version reaches each receiver.

    weights.transport files     files for everybody
    weights.catch_up files      a file for a receiver that joins late, so that nobody waits for it
    weights.backend auto        shared memory for those that can map the sender's buffers: on its
                                host, if they are in host memory; on its GPU, if they are there.
                                The others share a broadcast: NCCL between GPUs that are all
                                different (it refuses two ranks on one), else gloo
    weights.backend shared      shared memory for everybody; a receiver that cannot map it reports
                                why, and keeps the weights it has
    weights.backend gloo, nccl  broadcasts
    weights.delta               broadcasts are of differences, which are in host memory: gloo

A receiver that failed on an automatically chosen route gets another one at once.
"""

import logging
from collections.abc import Iterable, Mapping
from typing import Literal, TypeAlias

from streamrl.config.weights import WeightSettings
from streamrl.errors import ConfigError
from streamrl.types import Locality
from streamrl.weights.locality import backend_among, can_share
from streamrl.weights.membership import Peer

log = logging.getLogger(__name__)

Route: TypeAlias = Literal["file", "shared memory", "broadcast"]
ROUTES: tuple[Route, ...] = ("file", "shared memory", "broadcast")


class Routes:
    """The routes of one learner, whose sender is at `locality`; `shares`: others can map its
    buffers."""

    def __init__(self, settings: WeightSettings, locality: Locality, *, shares: bool) -> None:
        if settings.backend == "shared" and not shares:
            raise ConfigError(
                "weights.backend shared: this system has no memory that other processes can open; "
                "use auto, gloo or nccl"
            )
        self._settings = settings
        self._locality = locality
        self._shares = shares
        self._has_loaded = False
        self._cannot_read_files: frozenset[str] = frozenset()
        self._cannot_share: frozenset[str] = frozenset()
        self._logged: Mapping[str, Route] = {}

    def split(self, peers: Iterable[Peer]) -> dict[Route, list[Peer]]:
        """The peers by route; every route has a list."""
        chosen = {peer: self._route_of(peer) for peer in peers}
        for peer, route in chosen.items():
            if self._logged.get(peer.name) != route:
                log.info("%s gets its weights by %s", peer.name, route)
        self._logged = {**self._logged, **{peer.name: route for peer, route in chosen.items()}}
        return {route: [peer for peer in chosen if chosen[peer] == route] for route in ROUTES}

    def on_loaded(self) -> None:
        """A receiver has loaded a version of this learner: from now on, one without any joins
        late."""
        self._has_loaded = True

    def on_file_answers(self, peers: Iterable[Peer], loaded: set[str]) -> None:
        """Peers that did not load their file do not catch up by files again."""
        names = {peer.name for peer in peers}
        self._cannot_read_files = (self._cannot_read_files | names) - loaded

    def on_shared_answers(self, peers: Iterable[Peer], failed: set[str]) -> bool:
        """Failed peers get broadcasts instead, if the route was chosen automatically; whether to
        try at once."""
        if self._settings.backend != "auto":
            return False
        self._cannot_share |= {peer.hello.session for peer in peers if peer.name in failed}
        return bool(failed)

    def backend(self, peers: Iterable[Peer]) -> str:
        """The backend of a broadcast to these peers."""
        if self._settings.backend != "auto":
            return self._settings.backend
        if self._settings.delta:
            return "gloo"
        return backend_among([self._locality, *(peer.hello.locality for peer in peers)])

    def verifies(self, peers: Iterable[Peer], backend: str) -> bool:
        """Whether a broadcast to these peers carries checksums: if it uses gloo and leaves the
        host."""
        host = self._locality.host
        stays_here = host != "" and all(peer.hello.locality.host == host for peer in peers)
        return self._settings.verify or (backend == "gloo" and not stays_here)

    def _route_of(self, peer: Peer) -> Route:
        is_late = not peer.has_loaded and self._has_loaded
        catches_up = self._settings.catch_up == "files" and is_late
        if self._settings.transport == "files" or (
            catches_up and peer.name not in self._cannot_read_files
        ):
            return "file"
        match self._settings.backend:
            case "shared":
                return "shared memory"
            case "auto" if self._shares and peer.hello.session not in self._cannot_share:
                is_near = can_share(self._locality, peer.hello.locality)
                return "shared memory" if is_near else "broadcast"
            case _:
                return "broadcast"
