"""The learner's end of the weight channel: it keeps every live receiver at the newest version.

Nobody waits for the slow: the learner copies its parameters into a send buffer and goes on, a round
goes to those who are ready in time, and whoever misses it is in the next one.

Which way a version takes to whom is for `streamrl.weights.routes` to say. A receiver that dies or
freezes is fenced (`streamrl.weights.membership`), and a broadcast that it spoiled is tried once
more without it. Who catches up from a file holds up nobody else's round.

Invariant: one round at a time, of one question at a time to each receiver; every wait for one has
a deadline, a part of `weights.deadline_s`: 1/4 to get ready, 1/4 for a broadcast that hangs, 3/8 to
hear who is alive after it (1/2 where memory is shared); a second try follows at once. The words
spoken here are those of `streamrl.weights.protocol`.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import torch
import zmq
import zmq.asyncio

from streamrl import wire
from streamrl.config.weights import WeightSettings
from streamrl.errors import WeightTransferError, WireError
from streamrl.types import Endpoint, FilesEndpoint, WeightUpdate
from streamrl.weights.layout import Layout
from streamrl.weights.locality import locality_of
from streamrl.weights.membership import Membership, Peer
from streamrl.weights.protocol import (
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
from streamrl.weights.routes import Routes
from streamrl.weights.send_buffers import SendBuffers, Written
from streamrl.weights.transports.broadcast import BroadcastSender
from streamrl.weights.transports.files import FileSender
from streamrl.weights.transports.shared_memory import endpoint_of

log = logging.getLogger(__name__)


class WeightSender:
    """The learner's end, in its event loop; only `snapshot` runs in the training thread."""

    def __init__(
        self, settings: WeightSettings, layout: Layout, device: torch.device, folder: Path
    ) -> None:
        self._settings = settings
        self._layout = layout
        self._num_failed = 0
        self._history = uuid.uuid4().hex[:12]
        self._buffers = SendBuffers(layout, device)
        self._membership = Membership(self._history)
        self._files = FileSender(settings, layout, folder, self._history)
        shares = self._buffers.exported is not None
        self._routes = Routes(settings, self._history, locality_of(device), shares=shares)
        self._attempt = 0
        self._asked: dict[int, dict[str, asyncio.Future[Answer]]] = {}
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
        """Seconds of each hop of the last update, how many receivers are alive, and how many times
        one has been fenced."""
        return {
            **self._timings,
            "num_receivers": float(len(self._membership.alive())),
            "num_fenced": float(self._membership.num_fenced),
            "num_failed_loads": float(self._num_failed),
        }

    def behind(self) -> tuple[str, ...]:
        """Receivers that have not answered the last word to them, be it too late already or not."""
        asked = (pair for answers in self._asked.values() for pair in answers.items())
        waited_for = {name for name, answer in asked if not answer.done()}
        return tuple(sorted(waited_for | self._membership.fenced))

    async def run(self) -> None:
        """Until cancelled: hear the receivers, and bring them to the published version."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._listen())
            tasks.create_task(self._serve(tasks))

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
                    if not self._membership.hear(address, message):
                        self._expect_no_answer(receiver_id)
                    self._changed.set()
                case Goodbye(receiver_id):
                    self._membership.leave(receiver_id)
                    self._expect_no_answer(receiver_id)
                case Ready(name, attempt) | Loaded(name, attempt) | Failed(name, attempt):
                    answer = self._asked.get(attempt, {}).get(name)
                    if answer is not None and not answer.done():
                        answer.set_result(message)

    def _expect_no_answer(self, name: str) -> None:
        """The process that was asked is gone."""
        for answers in self._asked.values():
            if name in answers:
                answers[name].cancel()

    async def _serve(self, tasks: asyncio.TaskGroup) -> None:
        """Waits until a live receiver lacks the newest version; a publish or a Hello unblocks."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            with self._buffers.reading() as held:
                if held is None:
                    continue
                version = held.policy_version
                to = self._routes.split(await self._announce(version))
                async with asyncio.TaskGroup() as sending:
                    if to["shared memory"]:
                        sending.create_task(self._share(to["shared memory"], held))
                    for group in self._membership.groups(to["broadcast"]):
                        await self._send_broadcast(group, held)
                if by_file := to["file"]:
                    endpoints = await self._write_files(by_file, version, held.data)
                    for peer in (peer for peer in by_file if peer.name in endpoints):
                        to_one = {peer: endpoints[peer.name]}
                        attempt = await self._send_transfers(to_one, version)
                        tasks.create_task(self._conclude_file(peer, attempt, version))

    async def _announce(self, version: int) -> list[Peer]:
        """Those who lack the version and are ready for it within a hop's deadline."""
        busy = {name for answers in self._asked.values() for name in answers}
        targets = [p for p in self._membership.outdated(version) if p.name not in busy]
        if not targets:
            return []
        start = time.perf_counter()
        attempt = self._next_attempt()
        announce = Announce(attempt, version, self._layout.manifest)
        await self._send(attempt, dict.fromkeys(targets, announce))
        answers = await self._collect(attempt, self._settings.deadline_s / 4)
        self._timings["ready_wait_s"] = time.perf_counter() - start
        self._membership.fence(peer for peer in targets if peer.name not in answers)
        return [peer for peer in targets if peer.name in answers]

    async def _write_files(
        self, peers: Sequence[Peer], version: int, data: torch.Tensor
    ) -> dict[str, FilesEndpoint]:
        """Where each finds its file; nowhere while there is none: the next Hello tries again."""
        start = time.perf_counter()
        held = {
            peer.name: peer.hello.policy_version if peer.hello.history == self._history else -1
            for peer in peers
        }
        endpoints = await self._files.offer(version, data, held)
        self._timings["transfer_s"] = time.perf_counter() - start
        return endpoints

    async def _conclude_file(self, peer: Peer, attempt: int, version: int) -> None:
        """Beside the rounds, which leave this receiver out until it has answered."""
        loaded, failed, _ = await self._conclude(
            [peer], attempt, version, self._settings.deadline_s
        )
        await asyncio.to_thread(self._files.answered, loaded, failed)
        if loaded:
            # A version may have been published since.
            self._changed.set()
        self._routes.have_read_file([peer], loaded)

    async def _share(self, peers: Sequence[Peer], held: Written) -> None:
        """All read at once, each at its own pace; waits for the slowest, or for the deadline."""
        start, version = time.perf_counter(), held.policy_version
        verify = self._settings.verify
        endpoint = await asyncio.to_thread(endpoint_of, self._buffers, held, verify=verify)
        attempt = await self._send_transfers(dict.fromkeys(peers, endpoint), version)
        self._timings["transfer_s"] = time.perf_counter() - start
        retry_timeout_s = self._settings.deadline_s / 2
        _, failed, _ = await self._conclude(peers, attempt, version, retry_timeout_s)
        if self._routes.have_shared(peers, failed):
            self._changed.set()

    async def _send_broadcast(self, peers: Sequence[Peer], held: Written) -> None:
        by_session = {peer.hello.session: peer.hello.num_ranks for peer in peers}
        endpoints = self._broadcast.endpoints(by_session, self._routes.backend(peers))
        start, version = time.perf_counter(), held.policy_version
        by_peer = {peer: endpoints[peer.hello.session] for peer in peers}
        attempt = await self._send_transfers(by_peer, version)
        retry_timeout_s = self._settings.deadline_s / 2
        try:
            first = by_peer[peers[0]]
            await asyncio.to_thread(self._broadcast.send, first, self._layout, held.data)
        except WeightTransferError as error:
            log.warning("version %d did not reach every receiver: %s", version, error)
            # Who is not to blame may notice only at the deadline of its own call.
            retry_timeout_s *= 3 / 4
        self._timings["transfer_s"] = time.perf_counter() - start
        loaded, failed, silent = await self._conclude(peers, attempt, version, retry_timeout_s)
        if self._membership.regroup(loaded, failed, silent):
            self._changed.set()

    async def _send_transfers(self, endpoints: Mapping[Peer, Endpoint], version: int) -> int:
        attempt = self._next_attempt()
        updates = {
            peer: WeightUpdate(
                policy_version=version,
                history=self._history,
                manifest=self._layout.manifest,
                endpoint=endpoint,
            )
            for peer, endpoint in endpoints.items()
        }
        messages = {peer: Transfer(attempt, update) for peer, update in updates.items()}
        await self._send(attempt, messages)
        return attempt

    async def _conclude(
        self, peers: Sequence[Peer], attempt: int, version: int, wait_s: float
    ) -> tuple[set[str], set[str], set[str]]:
        """Book who loaded the version, and fence who did not answer: names of those who loaded it,
        who failed to, and who said nothing."""
        answers = await self._collect(attempt, wait_s)
        silent = [peer for peer in peers if peer.name not in answers]
        self._membership.fence(silent)
        reports = {name: a.report for name, a in answers.items() if isinstance(a, Loaded)}
        for name, answer in answers.items():
            if isinstance(answer, Failed):
                self._num_failed += 1
                log.warning("%s did not load version %d: %s", name, version, answer.reason)
        for name in reports:
            self._membership.book(name, version)
        if reports:
            self._routes.delivered()
            self._timings |= {
                "receive_s": max(report.transfer_s for report in reports.values()),
                "load_s": max(report.load_s for report in reports.values()),
                "pause_s": max(report.pause_s for report in reports.values()),
            }
        return set(reports), answers.keys() - reports.keys(), {peer.name for peer in silent}

    def _next_attempt(self) -> int:
        self._attempt += 1
        return self._attempt

    async def _send(self, attempt: int, messages: Mapping[Peer, FromSender]) -> None:
        loop = asyncio.get_running_loop()
        self._asked[attempt] = {peer.name: loop.create_future() for peer in messages}
        for peer, message in messages.items():
            await self._socket.send_multipart([peer.address, wire.encode(message)])

    async def _collect(self, attempt: int, wait_s: float) -> dict[str, Answer]:
        """Answers to what was sent. Waits until all are there or for `wait_s`."""
        await asyncio.wait(self._asked[attempt].values(), timeout=wait_s)
        answers = self._asked.pop(attempt)
        given = {name: a for name, a in answers.items() if a.done() and not a.cancelled()}
        return {name: answer.result() for name, answer in given.items()}
