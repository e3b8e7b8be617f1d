"""The learner's end of the weight protocol: sends each version to those that lack it, by their
routes.

An update goes to every live receiver that lacks the newest version. It waits for those that answer
in time; a receiver that misses it is part of the next one. One that dies or freezes is fenced
(`streamrl.weights.membership`), and a broadcast that it broke is tried once more without it. A
receiver that reads a file may answer during later updates, which go on without it.

Invariant: the learner waits for nobody: it copies a version into a send buffer and goes on. There
is one update at a time, with one outstanding answer per receiver. Every wait has a deadline, as
part of `weights.deadline_s`: in a broadcast 1/4 until all are ready, 1/4 if it hangs, and 3/8 to
find out who is still alive; 1/2 for a read of shared memory; all of it for a file, outside the
update.
"""

import asyncio
import logging
import secrets
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from streamrl.config.addresses import host_of
from streamrl.config.weights import WeightSettings
from streamrl.errors import WeightTransferError
from streamrl.types import (
    Endpoint,
    HeldEndpoint,
    ValidationReport,
    ValidatorStatus,
    WeightUpdate,
)
from streamrl.weights.layout import Layout
from streamrl.weights.locality import locality_of
from streamrl.weights.membership import Membership, Peer
from streamrl.weights.protocol import Failed, Hello, Loaded, digest_of
from streamrl.weights.routes import Routes
from streamrl.weights.sender_socket import SenderSocket
from streamrl.weights.transports.broadcast import BroadcastSender
from streamrl.weights.transports.checksums import version_key
from streamrl.weights.transports.differences import Difference, SentVersion
from streamrl.weights.transports.files import FileSender, version_name
from streamrl.weights.transports.shared_memory import SendBuffers, Written
from streamrl.weights.transports.store import ObjectStore, StoredVersion, StoreSender

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Outcome:
    """The names of the receivers that loaded a version, failed to, or did not answer in time."""

    loaded: set[str]
    failed: set[str]
    silent: set[str]


class WeightSender:
    """Sends versions from the learner's event loop; only `snapshot` is called in the training
    thread.

    `folder` is for files, `device` is where the parameters are, and `curve` the folder of the keys.
    `learner_id` is new for every learner process and distinguishes its versions from others with
    the same number; "" makes one up. `run` is the run's name in `weights.store`, where nothing is
    written once `survives` says that another learner has taken over.
    """

    def __init__(
        self,
        settings: WeightSettings,
        layout: Layout,
        device: torch.device,
        folder: Path,
        curve: Path | None = None,
        learner_id: str = "",
        run: str = "run",
        survives: Callable[[], bool] = lambda: True,
    ) -> None:
        self._settings = settings
        self._layout = layout
        self._manifest_digest = digest_of(layout.manifest)
        self._learner_id = learner_id or uuid.uuid4().hex[:12]
        self._secret = secrets.token_bytes(32)
        self._changed = asyncio.Event()
        self._buffers = SendBuffers(layout, device)
        shares = self._buffers.exported is not None
        self._routes = Routes(settings, locality_of(device), shares=shares)
        self._membership = Membership(self._learner_id)
        self._socket = SenderSocket(settings.address, self._membership, self._on_hello, curve)
        self.address = self._socket.address
        self._broadcast = BroadcastSender(settings, host_of(self.address), device)
        self._sent = SentVersion(settings, layout, self._version_name, self._key)
        self._files = FileSender(settings, layout, folder, self._learner_id, self._key, self._sent)
        self._store: StoreSender | None = None
        if settings.store is not None:
            place = ObjectStore(settings.store, run)
            self._store = StoreSender(
                settings, place, layout, folder, self._learner_id, self._secret, survives
            )
        self._version = -1
        self._num_failed = 0
        self._snapshot_s: float | None = None
        self._timings: Mapping[str, float] = {}
        self._on_report: Callable[[ValidationReport], None] = lambda _: None

    def snapshot(self, parameters: Mapping[str, torch.Tensor], policy_version: int) -> None:
        """Copy the parameters into a send buffer; the caller must not change them during the
        call."""
        start = time.perf_counter()
        self._buffers.write(parameters, policy_version)
        self._snapshot_s = time.perf_counter() - start

    def publish(self) -> None:
        """Make the newest snapshot the version that receivers should have."""
        self._changed.set()

    def send_last(self) -> None:
        """The newest snapshot is the run's last version, which validators get in any case."""
        self._membership.is_last_version = True
        self._changed.set()

    def handle_reports(self, on_report: Callable[[ValidationReport], None]) -> None:
        """Set a callback for reports on this learner's versions; it is called again with each Hello
        of the validator."""
        self._on_report = on_report

    def gauges(self) -> dict[str, float]:
        """Seconds of the last snapshot and of each hop of the last update; numbers of live
        receivers, fencings, failed loads and refused messages."""
        snapshot = {} if self._snapshot_s is None else {"snapshot_s": self._snapshot_s}
        return {
            **snapshot,
            **self._timings,
            "num_receivers": float(
                sum(p.hello.validator is None for p in self._membership.alive())
            ),
            "num_fenced": float(self._membership.num_fenced),
            "num_failed_loads": float(self._num_failed),
            **({} if self._store is None else self._store.gauges),
            **self._sent.gauges,
            "num_refused_messages": float(self._socket.num_refused),
        }

    def validators(self) -> dict[str, ValidatorStatus]:
        """What each live validator is doing, by its name."""
        alive = {peer.name: peer.hello.validator for peer in self._membership.alive()}
        return {name: status for name, status in alive.items() if status is not None}

    def validating(self) -> dict[int, ValidatorStatus]:
        """The versions of this learner that are being validated."""
        alive = {
            self._membership.version_of(p): p.hello.validator for p in self._membership.alive()
        }
        return {v: status for v, status in alive.items() if v >= 0 and status and status.is_busy}

    def behind(self) -> tuple[str, ...]:
        """Receivers that have not answered their last message yet, whether late or not."""
        return tuple(sorted(self._socket.unanswered() | self._membership.fenced))

    def stored(self) -> str:
        """A sentence about what `weights.store` has; "" without a store."""
        return "" if self._store is None else self._store.sentence()

    def left_out(self) -> tuple[str, ...]:
        """A sentence for each receiver that updates do not reach in time: why, for how long others
        go on without it, and what helps; also one if a file cannot be written."""
        deadline_s = self._settings.deadline_s
        late, failing = self._membership.late(), self._membership.failing()
        return (
            *(peer.late_sentence(wait_s, deadline_s) for peer, wait_s in late),
            *(peer.failing_sentence(wait_s) for peer, wait_s in failing),
            *filter(None, [self._files.failure]),
        )

    async def run(self) -> None:
        """Handle the receivers' messages and send them the published version, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._socket.receive())
            tasks.create_task(self._send_versions(tasks))

    def close(self) -> None:
        self._broadcast.close()
        self._files.close()
        self._socket.close()

    async def _send_versions(self, tasks: asyncio.TaskGroup) -> None:
        """Send updates. Waits for a published version, a Hello, or anything else that may call for
        one."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            with self._buffers.reading() as held:
                if held is not None:
                    await self._update(held, tasks)
                    await self._begin_to_store(held, tasks)

    async def _update(self, held: Written, tasks: asyncio.TaskGroup) -> None:
        """Send the version to everybody who lacks it. Waits for all except those that read
        files."""
        self._version = held.policy_version
        asked = self._socket.asked()
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

    def _on_hello(self, hello: Hello) -> None:
        report = None if hello.validator is None else hello.validator.report
        # Version 0 belongs to no learner: it is the model folder's.
        if report is not None and report.learner_id in (self._learner_id, ""):
            self._on_report(report)
        # Each update looks at all receivers, and a thousand of them may say Hello in a second.
        if self._membership.lacks(hello, self._version):
            self._changed.set()

    async def _inform(self, peers: Sequence[Peer], version: int) -> None:
        """Tell receivers whose inference server already got the version through another one. Waits
        for the answers, or for the deadline."""
        if peers:
            attempt = await self._transfer(dict.fromkeys(peers, HeldEndpoint()), version)
            await self._conclude(peers, attempt, version, self._settings.deadline_s / 4)

    async def _share(self, peers: Sequence[Peer], held: Written) -> None:
        """Have these read shared memory, all at once, each at its own pace. Waits for the slowest,
        or for the deadline."""
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
            self._changed.set()

    async def _send_broadcasts(self, peers: Sequence[Peer], held: Written) -> None:
        """Broadcast to those that are ready in time, one group after the other."""
        if not peers:
            return
        difference, takers = await asyncio.to_thread(
            self._sent.difference_to, held.policy_version, held.data, self._versions_of(peers)
        )
        start = time.perf_counter()
        attempt = await self._socket.ask(dict.fromkeys(peers))
        answers = await self._socket.answers(attempt, self._settings.deadline_s / 4)
        self._note(ready_wait_s=time.perf_counter() - start)
        self._membership.fence(peer for peer in peers if peer.name not in answers)
        for group in self._membership.groups(peer for peer in peers if peer.name in answers):
            by_difference = [peer for peer in group if peer.name in takers]
            await self._send_broadcast(by_difference, held, difference)
            await self._send_broadcast([p for p in group if p.name not in takers], held, None)

    async def _send_broadcast(
        self, peers: Sequence[Peer], held: Written, difference: Difference | None
    ) -> None:
        if not peers:
            return
        by_session = {peer.hello.session: peer.hello.num_ranks for peer in peers}
        backend = self._routes.backend(peers)
        verify = self._routes.verifies(peers, backend)
        endpoints = self._broadcast.endpoints(
            by_session, backend, verify=verify, difference=difference
        )
        start, version = time.perf_counter(), held.policy_version
        by_peer = {peer: endpoints[peer.hello.session] for peer in peers}
        # Start this before the receivers wait for this end.
        await asyncio.to_thread(held.wait)
        attempt = await self._transfer(by_peer, version)
        wait_s = self._settings.deadline_s / 2
        try:
            first = by_peer[peers[0]]
            key = self._key(version)
            await asyncio.to_thread(
                self._broadcast.send, first, self._layout, held.data, key, difference
            )
        except WeightTransferError as error:
            log.warning("version %d did not reach every receiver: %s", version, error)
            # A receiver that is not to blame may notice only at its own call's deadline.
            wait_s *= 3 / 4
        self._note(transfer_s=time.perf_counter() - start)
        outcome = await self._conclude(peers, attempt, version, wait_s)
        # If one was silent, the others failed because of it.
        self._sent.on_answers(outcome.loaded, set() if outcome.silent else outcome.failed)
        if self._membership.regroup(outcome.loaded, outcome.failed, outcome.silent):
            self._changed.set()

    async def _send_files(
        self, peers: Sequence[Peer], held: Written, tasks: asyncio.TaskGroup
    ) -> None:
        """Have these read files. Waits for the file system; a separate task waits for each
        receiver's answer. If no file can be written, a later Hello tries again."""
        if not peers:
            self._files.on_unneeded(held.policy_version)
            return
        start = time.perf_counter()
        versions = self._versions_of(peers)
        endpoints = await self._files.offer(held.policy_version, held.data, versions)
        self._note(transfer_s=time.perf_counter() - start)
        if not endpoints:
            # Receivers that would only catch up by file get the version by another route.
            self._routes.on_file_answers(peers, set())
        for peer in peers:
            if peer.name in endpoints:
                attempt = await self._transfer({peer: endpoints[peer.name]}, held.policy_version)
                tasks.create_task(self._conclude_file(peer, attempt, held.policy_version))

    async def _conclude_file(self, peer: Peer, attempt: int, version: int) -> None:
        """Wait for the answer of a receiver that reads a file; updates leave it out until then."""
        outcome = await self._conclude([peer], attempt, version, self._settings.deadline_s)
        await asyncio.to_thread(self._files.on_answers, outcome.loaded, outcome.failed)
        if outcome.loaded:
            # A newer version may have been published since.
            self._changed.set()
        self._routes.on_file_answers([peer], outcome.loaded)

    async def _begin_to_store(self, held: Written, tasks: asyncio.TaskGroup) -> None:
        """Begin to store a version. Waits for the local disk; a separate task uploads it."""
        store, version = self._store, held.policy_version
        if store is not None and store.wants(version):
            stored = await asyncio.to_thread(store.begin, version, held.data)
            tasks.create_task(self._finish_to_store(store, stored))

    async def _finish_to_store(self, store: StoreSender, stored: StoredVersion | None) -> None:
        """A newer version may have been published since, or the store must be tried again."""
        if stored is not None:
            await asyncio.to_thread(store.finish, stored)
        await asyncio.sleep(store.wait_s())
        self._changed.set()

    async def _transfer(self, endpoints: Mapping[Peer, Endpoint], version: int) -> int:
        manifest = self._layout.manifest
        updates = {
            peer: WeightUpdate(
                policy_version=version,
                learner_id=self._learner_id,
                manifest=() if peer.hello.manifest == self._manifest_digest else manifest,
                endpoint=endpoint,
                key=self._key(version),
            )
            for peer, endpoint in endpoints.items()
        }
        return await self._socket.ask(updates)

    async def _conclude(
        self, peers: Sequence[Peer], attempt: int, version: int, wait_s: float
    ) -> _Outcome:
        """Wait for the answers; note who loaded the version, and fence those who did not answer
        within `wait_s`."""
        answers = await self._socket.answers(attempt, wait_s)
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
            # Now the other receivers on these servers can be told.
            self._changed.set()
        if reports:
            self._routes.on_loaded()
            self._note(
                receive_s=max(report.transfer_s for report in reports.values()),
                load_s=max(report.load_s for report in reports.values()),
                pause_s=max(report.pause_s for report in reports.values()),
            )
        failed = answers.keys() - reports.keys()
        return _Outcome(set(reports), failed, {peer.name for peer in silent})

    def _versions_of(self, peers: Sequence[Peer]) -> dict[str, int]:
        return {peer.name: self._membership.version_of(peer) for peer in peers}

    def _version_name(self, version: int) -> str:
        return version_name(self._learner_id, version)

    def _key(self, version: int) -> bytes:
        """The key of the version's checksums; it is never announced or written to disk."""
        return version_key(self._secret, self._version_name(version))

    def _note(self, **timings: float) -> None:
        self._timings = {**self._timings, **timings}
