"""Rounds of one learner's versions: who gets a version by which route, and who has loaded it.

A round is for every live receiver that lacks the newest version. A receiver that dies or freezes is
fenced (`streamrl.weights.membership`), and a broadcast that it broke is tried once more without it.
A receiver that reads a file answers while later rounds go on without it.

Invariant: one round at a time, which waits for one answer at a time from each receiver. Every wait
has a deadline, a part of `weights.deadline_s`: for a broadcast 1/4 until all are ready, 1/4 if it
hangs, 3/8 to find out who is alive after that; for a read of shared memory 1/2; for one of a file
all of it, outside the round.

`Routes`: which route a version takes to each receiver.

    weights.transport files     files for everybody
    weights.catch_up files      a file for a receiver that joins late, so that nobody waits for it
    weights.backend auto        shared memory for those that can map the sender's buffers: on its
                                host, if they are in host memory; on its GPU, if they are there.
                                The others share a broadcast: NCCL between GPUs that are all
                                different (it refuses two ranks on one), else gloo
    weights.backend shared      shared memory for everybody; a receiver that cannot map it reports
                                why, and keeps the weights it has
    weights.backend gloo, nccl  broadcasts

A receiver that failed on a route that was chosen for it gets another one at once.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias
from urllib.parse import urlsplit

import torch

from streamrl.config.weights import WeightSettings
from streamrl.errors import ConfigError, WeightTransferError
from streamrl.types import (
    Endpoint,
    FilesEndpoint,
    HeldEndpoint,
    Locality,
    ValidationReport,
    ValidatorStatus,
    WeightUpdate,
)
from streamrl.weights.codecs.checksums import version_key
from streamrl.weights.locality import locality_of
from streamrl.weights.membership import Membership, Peer
from streamrl.weights.protocol import Failed, Hello, Loaded
from streamrl.weights.send_buffers import SendBuffers, Written
from streamrl.weights.sender_socket import SenderSocket
from streamrl.weights.transports.broadcast import BroadcastSender
from streamrl.weights.transports.files import FileSender, version_name

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
        """Some receiver has a version of this learner: from now on, one without is late."""
        self._has_loaded = True

    def on_file_answers(self, peers: Iterable[Peer], loaded: set[str]) -> None:
        """Those of the peers that did not load their file get no other one to catch up."""
        names = {peer.name for peer in peers}
        self._cannot_read_files = (self._cannot_read_files | names) - loaded

    def on_shared_answers(self, peers: Iterable[Peer], failed: set[str]) -> bool:
        """Those of the peers that failed get broadcasts, if the route was chosen for them; whether
        to try at once."""
        if self._settings.backend != "auto":
            return False
        self._cannot_share |= {peer.hello.session for peer in peers if peer.name in failed}
        return bool(failed)

    def backend(self, peers: Iterable[Peer]) -> str:
        """That of a broadcast to these."""
        if self._settings.backend != "auto":
            return self._settings.backend
        return backend_among([self._locality, *(peer.hello.locality for peer in peers)])

    def _route_of(self, peer: Peer) -> Route:
        if self._prefers_file(peer):
            return "file"
        match self._settings.backend:
            case "shared":
                return "shared memory"
            case "auto" if self._shares and peer.hello.session not in self._cannot_share:
                is_near = can_share(self._locality, peer.hello.locality)
                return "shared memory" if is_near else "broadcast"
            case _:
                return "broadcast"

    def _prefers_file(self, peer: Peer) -> bool:
        if self._settings.transport == "files":
            return True
        is_late = not peer.has_loaded and self._has_loaded
        can_read = peer.name not in self._cannot_read_files
        return self._settings.catch_up == "files" and is_late and can_read


def can_share(sender: Locality, receiver: Locality) -> bool:
    """Whether the receiver can map the memory that the sender's buffers are in."""
    if not sender.host or sender.host != receiver.host:
        return False
    return sender.device_type == "cpu" or (bool(sender.gpus) and sender.gpus == receiver.gpus)


def backend_among(localities: list[Locality]) -> Literal["gloo", "nccl"]:
    """Unknown GPUs count as different ones, as those of other machines are."""
    gpus = [gpu for locality in localities for gpu in locality.gpus]
    are_different = len(set(gpus)) == len(gpus)
    on_gpus = all(locality.device_type == "cuda" for locality in localities)
    return "nccl" if on_gpus and are_different else "gloo"


@dataclass(frozen=True)
class _Outcome:
    """Names of the receivers that loaded a version, failed to, or did not answer in time."""

    loaded: set[str]
    failed: set[str]
    silent: set[str]


class Rounds:
    """Sends what is in the buffers, which are on `device`; `request_round` asks for another one."""

    def __init__(
        self,
        settings: WeightSettings,
        buffers: SendBuffers,
        device: torch.device,
        folder: Path,
        request_round: Callable[[], None],
        curve: Path | None,
        learner_id: str,
    ) -> None:
        self._settings = settings
        self._buffers = buffers
        self._layout = buffers.layout
        self._request_round = request_round
        self._learner_id = learner_id
        self._secret = secrets.token_bytes(32)
        shares = buffers.exported is not None
        self._routes = Routes(settings, locality_of(device), shares=shares)
        self._membership = Membership(self._learner_id)
        self.socket = SenderSocket(settings.address, self._membership, self._on_hello, curve)
        host = urlsplit(self.socket.address).hostname or "127.0.0.1"
        self._broadcast = BroadcastSender(settings, host, device)
        self._files = FileSender(settings, buffers.layout, folder, self._learner_id, self._secret)
        self._num_failed = 0
        self._timings: Mapping[str, float] = {}
        self.on_report: Callable[[ValidationReport], None] = lambda _: None

    def gauges(self) -> dict[str, float]:
        """Seconds of each hop of the last update, how many receivers are alive, how many times one
        has been fenced, how many loads have failed, and how many messages were refused."""
        return {
            **self._timings,
            "num_receivers": float(
                sum(p.hello.validator is None for p in self._membership.alive())
            ),
            "num_fenced": float(self._membership.num_fenced),
            "num_failed_loads": float(self._num_failed),
            **self.socket.gauges(),
        }

    def validators(self) -> dict[str, ValidatorStatus]:
        """What each validator that is alive does, by its name."""
        alive = {peer.name: peer.hello.validator for peer in self._membership.alive()}
        return {name: status for name, status in alive.items() if status is not None}

    def validating(self) -> dict[int, ValidatorStatus]:
        """The versions of this learner that are being validated."""
        alive = {
            self._membership.version_of(p): p.hello.validator for p in self._membership.alive()
        }
        return {v: status for v, status in alive.items() if v >= 0 and status and status.is_busy}

    def send_last(self) -> None:
        """From now on validators are sent the newest version, too."""
        self._membership.is_last_version = True
        self._request_round()

    def behind(self) -> tuple[str, ...]:
        """Receivers that have not answered the last message to them, late already or not."""
        return tuple(sorted(self.socket.unanswered() | self._membership.fenced))

    def left_out(self) -> tuple[str, ...]:
        """A sentence for each receiver that updates do not reach, or not in time: why, for how long
        others go on without it, and what helps."""
        deadline_s = self._settings.deadline_s
        late, failing = self._membership.late(), self._membership.failing()
        return (
            *(peer.late_sentence(wait_s, deadline_s) for peer, wait_s in late),
            *(peer.failing_sentence(wait_s) for peer, wait_s in failing),
        )

    async def run(self, held: Written, tasks: asyncio.TaskGroup) -> None:
        """Send the version to everybody who lacks it; waits for all but those that read files."""
        asked = self.socket.asked()
        outdated = self._membership.outdated(held.policy_version)
        peers, informed = self._membership.by_server(
            [peer for peer in outdated if peer.name not in asked], held.policy_version, asked
        )
        if not (peers or informed):
            return
        by_route = self._routes.split(peers)
        self._note(ready_wait_s=0.0)
        async with asyncio.TaskGroup() as sending:
            sending.create_task(self._share(by_route["shared memory"], held))
            sending.create_task(self._send_broadcasts(by_route["broadcast"], held))
            sending.create_task(self._inform(informed, held.policy_version))
        await self._send_files(by_route["file"], held, tasks)

    def close(self) -> None:
        self._broadcast.close()
        self._files.close()
        self.socket.close()

    def _on_hello(self, hello: Hello) -> None:
        report = None if hello.validator is None else hello.validator.report
        # Version 0, of no learner, is the model folder's.
        if report is not None and report.learner_id in (self._learner_id, ""):
            self.on_report(report)
        self._request_round()

    async def _inform(self, peers: Sequence[Peer], version: int) -> None:
        """Tell those whose inference server has the version from another one. Waits for the
        answers, or for the deadline."""
        if peers:
            attempt = await self._transfer(dict.fromkeys(peers, HeldEndpoint()), version)
            await self._conclude(peers, attempt, version, self._settings.deadline_s / 4)

    async def _share(self, peers: Sequence[Peer], held: Written) -> None:
        """All read at once, each at its own pace; waits for the slowest, or for the deadline."""
        if not peers:
            return
        start = time.perf_counter()
        key = self._key(held.policy_version) if self._settings.verify else None
        endpoint = await asyncio.to_thread(self._buffers.endpoint, held, key)
        attempt = await self._transfer(dict.fromkeys(peers, endpoint), held.policy_version)
        self._note(transfer_s=time.perf_counter() - start)
        wait_s = self._settings.deadline_s / 2
        outcome = await self._conclude(peers, attempt, held.policy_version, wait_s)
        if self._routes.on_shared_answers(peers, outcome.failed):
            self._request_round()

    async def _send_broadcasts(self, peers: Sequence[Peer], held: Written) -> None:
        """To those that are ready in time, a group after the other."""
        if not peers:
            return
        start = time.perf_counter()
        attempt = await self.socket.announce(peers)
        answers = await self.socket.answers(attempt, self._settings.deadline_s / 4)
        self._note(ready_wait_s=time.perf_counter() - start)
        self._membership.fence(peer for peer in peers if peer.name not in answers)
        for group in self._membership.groups(peer for peer in peers if peer.name in answers):
            await self._send_broadcast(group, held)

    async def _send_broadcast(self, peers: Sequence[Peer], held: Written) -> None:
        by_session = {peer.hello.session: peer.hello.num_ranks for peer in peers}
        endpoints = self._broadcast.endpoints(by_session, self._routes.backend(peers))
        start, version = time.perf_counter(), held.policy_version
        by_peer = {peer: endpoints[peer.hello.session] for peer in peers}
        attempt = await self._transfer(by_peer, version)
        wait_s = self._settings.deadline_s / 2
        try:
            first = by_peer[peers[0]]
            key = self._key(version)
            await asyncio.to_thread(self._broadcast.send, first, self._layout, held.data, key)
        except WeightTransferError as error:
            log.warning("version %d did not reach every receiver: %s", version, error)
            # A receiver that is not to blame may notice only at the deadline of its own call.
            wait_s *= 3 / 4
        self._note(transfer_s=time.perf_counter() - start)
        outcome = await self._conclude(peers, attempt, version, wait_s)
        if self._membership.regroup(outcome.loaded, outcome.failed, outcome.silent):
            self._request_round()

    async def _send_files(
        self, peers: Sequence[Peer], held: Written, tasks: asyncio.TaskGroup
    ) -> None:
        """Waits for the file system; a receiver's answer is waited for in a task of its own."""
        if not peers:
            return
        endpoints = await self._write_files(peers, held)
        for peer in peers:
            if peer.name in endpoints:
                attempt = await self._transfer({peer: endpoints[peer.name]}, held.policy_version)
                tasks.create_task(self._conclude_file(peer, attempt, held.policy_version))

    async def _write_files(self, peers: Sequence[Peer], held: Written) -> dict[str, FilesEndpoint]:
        """Each receiver's file by name; {} if none can be written: the next Hello tries again."""
        start = time.perf_counter()
        versions = {peer.name: self._membership.version_of(peer) for peer in peers}
        endpoints = await self._files.offer(held.policy_version, held.data, versions)
        self._note(transfer_s=time.perf_counter() - start)
        return endpoints

    async def _conclude_file(self, peer: Peer, attempt: int, version: int) -> None:
        """Rounds leave this receiver out until it has answered."""
        outcome = await self._conclude([peer], attempt, version, self._settings.deadline_s)
        await asyncio.to_thread(self._files.on_answers, outcome.loaded, outcome.failed)
        if outcome.loaded:
            # A version may have been published since.
            self._request_round()
        self._routes.on_file_answers([peer], outcome.loaded)

    async def _transfer(self, endpoints: Mapping[Peer, Endpoint], version: int) -> int:
        updates = {
            peer: WeightUpdate(
                policy_version=version,
                learner_id=self._learner_id,
                manifest=self._layout.manifest,
                endpoint=endpoint,
                key=self._key(version),
            )
            for peer, endpoint in endpoints.items()
        }
        return await self.socket.transfer(updates)

    async def _conclude(
        self, peers: Sequence[Peer], attempt: int, version: int, wait_s: float
    ) -> _Outcome:
        """Note who loaded the version, and fence who did not answer within `wait_s`."""
        answers = await self.socket.answers(attempt, wait_s)
        silent = [peer for peer in peers if peer.name not in answers]
        self._membership.fence(silent)
        reports = {name: a.report for name, a in answers.items() if isinstance(a, Loaded)}
        for name, answer in answers.items():
            if isinstance(answer, Failed):
                self._num_failed += 1
                self._membership.on_failed(name)
                log.warning("%s did not load version %d: %s", name, version, answer.reason)
        for name in reports:
            self._membership.on_loaded(name, version)
        if any(peer.hello.server for peer in peers if peer.name in reports):
            # Now the others on these servers can be told.
            self._request_round()
        if reports:
            self._routes.on_loaded()
            self._note(
                receive_s=max(report.transfer_s for report in reports.values()),
                load_s=max(report.load_s for report in reports.values()),
                pause_s=max(report.pause_s for report in reports.values()),
            )
        failed = answers.keys() - reports.keys()
        return _Outcome(set(reports), failed, {peer.name for peer in silent})

    def _key(self, version: int) -> bytes:
        """Of the version's checksums; it is announced and written nowhere."""
        return version_key(self._secret, version_name(self._learner_id, version))

    def _note(self, **timings: float) -> None:
        self._timings = {**self._timings, **timings}
