"""The learner's end of the weight channel: it keeps every live receiver at the newest version.

Nobody waits for the slow: the learner copies its parameters into a send buffer and goes on, a round
goes to those who are ready in time, and whoever misses it is in the next one.

A broadcast fails for all its members together, whoever is to blame. Those it failed for are halved
into groups of their own for the next try, so that one bad receiver soon stands alone and keeps
nobody else from the update; a group that succeeds joins the others again.

Invariant: one round at a time; every wait for a receiver has a deadline, and together they keep
`weights.deadline_s`. The words spoken here are those of `streamrl.weights.channel`.
"""

import asyncio
import itertools
import logging
import time
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import torch
import zmq
import zmq.asyncio
from msgspec import Struct, structs

from streamrl import wire
from streamrl.config.sections import WeightSettings
from streamrl.errors import WeightTransferError, WireError
from streamrl.types import BroadcastEndpoint, FilesEndpoint, WeightUpdate
from streamrl.weights.channel import (
    HELLO_S,
    Announce,
    Answer,
    Failed,
    FromReceiver,
    FromSender,
    Goodbye,
    Hello,
    Loaded,
    Ready,
    Transfer,
)
from streamrl.weights.files import FileSender
from streamrl.weights.layout import Layout
from streamrl.weights.send_buffers import SendBuffers
from streamrl.weights.transfer import BroadcastSender

log = logging.getLogger(__name__)

ALIVE_S = 3 * HELLO_S


class _Peer(Struct, frozen=True):
    """A receiver as the sender knows it."""

    address: bytes
    hello: Hello
    seen_s: float

    @property
    def name(self) -> str:
        return self.hello.receiver_id


class WeightSender:
    """The learner's end, in its event loop; only `snapshot` runs in the training thread."""

    def __init__(
        self, settings: WeightSettings, layout: Layout, device: torch.device, folder: Path
    ) -> None:
        self._settings = settings
        self._layout = layout
        self._device = device
        self._history = uuid.uuid4().hex[:12]
        self._files = FileSender(settings, layout, folder, self._history)
        self._buffers = SendBuffers(layout, device)
        self._peers: dict[str, _Peer] = {}
        self._cannot_read_files: set[str] = set()
        self._apart: dict[str, str] = {}
        self._has_delivered = False
        self._attempt = 0
        self._num_failed = 0
        self._answers: dict[str, asyncio.Future[Answer]] = {}
        self._changed = asyncio.Event()
        self._timings: dict[str, float] = {}
        self._socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(settings.address)
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        host = urlsplit(self.address).hostname or "127.0.0.1"
        self._broadcast = BroadcastSender(settings, host, device)

    def snapshot(self, parameters: Mapping[str, torch.Tensor], policy_version: int) -> None:
        """Copy the parameters into a send buffer; the caller must not change them meanwhile."""
        start = time.perf_counter()
        self._buffers.write(parameters, policy_version)
        self._timings["snapshot_s"] = time.perf_counter() - start

    def publish(self) -> None:
        """From here on the newest snapshot is the version receivers should have."""
        self._changed.set()

    def gauges(self) -> dict[str, float]:
        """Seconds of each hop of the last update, of the slowest receiver (README, Weights); how
        many receivers are alive, and how many loads have failed."""
        counts = {"num_receivers": len(self._alive()), "num_failed_loads": self._num_failed}
        return {**self._timings, **{name: float(count) for name, count in counts.items()}}

    def behind(self) -> tuple[str, ...]:
        """Receivers that have not answered the last word to them, be it too late already or not."""
        return tuple(name for name, answer in self._answers.items() if not answer.done())

    async def run(self) -> None:
        """Until cancelled: hear the receivers, and bring them to the published version."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._listen())
            tasks.create_task(self._serve())

    def close(self) -> None:
        self._broadcast.close()
        self._socket.close()

    async def _listen(self) -> None:
        """Waits for a receiver's word; a Hello unblocks `_serve`, an answer `_conclude`."""
        while True:
            address, data = await self._socket.recv_multipart()
            try:
                message: FromReceiver = wire.decode(data, FromReceiver)  # type: ignore[arg-type]
            except WireError as error:
                log.warning("unreadable message on the weight channel: %s", error)
                continue
            match message:
                case Hello(receiver_id):
                    self._peers[receiver_id] = _Peer(address, message, time.monotonic())
                    self._changed.set()
                case Goodbye(receiver_id):
                    self._peers.pop(receiver_id, None)
                case Ready(name, attempt) | Loaded(name, attempt) | Failed(name, attempt):
                    answer = self._answers.get(name)
                    if attempt == self._attempt and answer is not None and not answer.done():
                        answer.set_result(message)

    async def _serve(self) -> None:
        """Waits until a live receiver lacks the newest version; a publish or a Hello unblocks."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            with self._buffers.reading() as held:
                if held is None:
                    continue
                version, data = held
                ready = await self._announce(self._outdated(version), version)
                by_file = [peer for peer in ready if self._prefers_file(peer)]
                if by_file:
                    await self._send_file(by_file, version, data)
                for group in self._groups(peer for peer in ready if peer not in by_file):
                    await self._send_broadcast(group, version, data)

    def _alive(self) -> list[_Peer]:
        now_s = time.monotonic()
        return [peer for peer in self._peers.values() if now_s - peer.seen_s <= ALIVE_S]

    def _outdated(self, version: int) -> list[_Peer]:
        """Version 0 is the model folder's in every history; others count only in this one."""
        same = {self._history, ""} if version == 0 else {self._history}
        return [
            peer
            for peer in self._alive()
            if peer.hello.policy_version != version or peer.hello.history not in same
        ]

    async def _announce(self, targets: list[_Peer], version: int) -> list[_Peer]:
        """Those of the targets that are ready within a hop's deadline."""
        if not targets:
            return []
        start = time.perf_counter()
        announce = Announce(self._next_attempt(), version, self._layout.manifest)
        await self._send({peer: announce for peer in targets})
        answers = await self._collect(self._settings.deadline_s / 4)
        self._timings["ready_wait_s"] = time.perf_counter() - start
        self._fence(peer for peer in targets if peer.name not in answers)
        return [peer for peer in targets if peer.name in answers]

    def _prefers_file(self, peer: _Peer) -> bool:
        if self._settings.transport == "files":
            return True
        is_late = peer.hello.history != self._history and self._has_delivered
        readable = peer.name not in self._cannot_read_files
        return self._settings.catch_up == "files" and is_late and readable

    async def _send_file(self, peers: list[_Peer], version: int, data: torch.Tensor) -> None:
        start = time.perf_counter()
        held = {peer.name: self._version_of(peer) for peer in peers}
        endpoints = await asyncio.to_thread(self._files.write, version, data, held)
        self._timings["transfer_s"] = time.perf_counter() - start
        await self._send(self._transfers({p: endpoints[p.name] for p in peers}, version))
        loaded, failed = await self._conclude(peers, version, self._settings.deadline_s)
        await asyncio.to_thread(self._files.answered, loaded, failed)
        self._cannot_read_files |= {peer.name for peer in peers} - loaded

    def _version_of(self, peer: _Peer) -> int:
        """Of this history; -1 if the receiver has none of it."""
        return peer.hello.policy_version if peer.hello.history == self._history else -1

    def _groups(self, peers: Iterable[_Peer]) -> list[list[_Peer]]:
        """The peers, each with those it is to share a broadcast with; the healthy ones first."""
        keyed = sorted(peers, key=lambda peer: (self._apart.get(peer.name, ""), peer.name))
        by_group = itertools.groupby(keyed, lambda peer: self._apart.get(peer.name, ""))
        return [list(members) for _, members in by_group]

    def _regroup(self, peers: list[_Peer], loaded: set[str]) -> None:
        failed = [peer.name for peer in peers if peer.name in self._peers.keys() - loaded]
        halves = (failed[::2], failed[1::2])
        together = {peer.name for peer in peers}
        self._apart = {
            **{name: group for name, group in self._apart.items() if name not in together},
            **{name: half[0] for half in halves for name in half},
        }
        if len(failed) > 1:
            self._changed.set()

    async def _send_broadcast(self, peers: list[_Peer], version: int, data: torch.Tensor) -> None:
        on_gpu = all(peer.hello.device_type == "cuda" for peer in peers)
        automatic = "nccl" if on_gpu and self._device.type == "cuda" else "gloo"
        backend = automatic if self._settings.backend == "auto" else self._settings.backend
        by_session = {peer.hello.session: peer.hello.num_ranks for peer in peers}
        endpoints = self._broadcast.endpoints(by_session, backend)
        start = time.perf_counter()
        by_peer = {peer: endpoints[peer.hello.session] for peer in peers}
        await self._send(self._transfers(by_peer, version))
        try:
            first = by_peer[peers[0]]
            await asyncio.to_thread(self._broadcast.send, first, self._layout, data)
        except WeightTransferError as error:
            log.warning("version %d did not reach every receiver: %s", version, error)
        self._timings["transfer_s"] = time.perf_counter() - start
        loaded, _ = await self._conclude(peers, version, self._settings.deadline_s / 2)
        self._regroup(peers, loaded)

    def _transfers(
        self, endpoints: Mapping[_Peer, BroadcastEndpoint | FilesEndpoint], version: int
    ) -> dict[_Peer, FromSender]:
        attempt = self._next_attempt()
        return {
            peer: Transfer(
                attempt,
                WeightUpdate(
                    policy_version=version,
                    history=self._history,
                    manifest=self._layout.manifest,
                    endpoint=endpoint,
                ),
            )
            for peer, endpoint in endpoints.items()
        }

    async def _conclude(
        self, peers: list[_Peer], version: int, wait_s: float
    ) -> tuple[set[str], set[str]]:
        """Book who loaded the version, and leave out who did not answer.

        The names of those that loaded it and are still here, and of those that said they failed.
        """
        answers = await self._collect(wait_s)
        self._fence(peer for peer in peers if peer.name not in answers)
        reports = {name: a.report for name, a in answers.items() if isinstance(a, Loaded)}
        for name, answer in answers.items():
            if isinstance(answer, Failed):
                self._num_failed += 1
                log.warning("%s did not load version %d: %s", name, version, answer.reason)
            elif peer := self._peers.get(name):
                hello = structs.replace(peer.hello, policy_version=version, history=self._history)
                self._peers[name] = structs.replace(peer, hello=hello)
        if reports:
            self._has_delivered = True
            self._timings |= {
                "receive_s": max(report.transfer_s for report in reports.values()),
                "load_s": max(report.load_s for report in reports.values()),
                "pause_s": max(report.pause_s for report in reports.values()),
            }
        return reports.keys() & self._peers.keys(), answers.keys() - reports.keys()

    def _fence(self, silent: Iterable[_Peer]) -> None:
        for peer in silent:
            log.warning("%s is left out until it reports again", peer.name)
            self._peers.pop(peer.name, None)

    def _next_attempt(self) -> int:
        self._attempt += 1
        return self._attempt

    async def _send(self, messages: Mapping[_Peer, FromSender]) -> None:
        loop = asyncio.get_running_loop()
        self._answers = {peer.name: loop.create_future() for peer in messages}
        for peer, message in messages.items():
            await self._socket.send_multipart([peer.address, wire.encode(message)])

    async def _collect(self, wait_s: float) -> dict[str, Answer]:
        """Answers to the last `_send`. Waits until all are there or for `wait_s`."""
        await asyncio.wait(self._answers.values(), timeout=wait_s)
        return {name: answer.result() for name, answer in self._answers.items() if answer.done()}
