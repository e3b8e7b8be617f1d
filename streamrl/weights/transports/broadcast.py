"""Weights by broadcasts of buckets in a torch.distributed group, both ends; with `weights.delta`
what changed of each bucket, to a group of those that have the version before.

Invariant: every rank starts the same broadcasts in the same order, and none outlasts the group's
timeout. After an error the group is closed; the next update forms another one.
"""

import itertools
import uuid
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch

from streamrl.config.weights import WeightSettings
from streamrl.errors import WeightTransferError
from streamrl.types import BroadcastDifference, BroadcastEndpoint, replace
from streamrl.weights.layout import Layout
from streamrl.weights.transports import groups
from streamrl.weights.transports.checksums import SIZE, checksums, require_equal
from streamrl.weights.transports.differences import Difference
from streamrl.weights.transports.groups import RendezvousServer


class BroadcastSender:
    """The sending end: rank 0 of a group that is formed anew when its members change."""

    def __init__(self, settings: WeightSettings, host: str, device: torch.device) -> None:
        self._settings = settings
        self._host = host
        self._device = device
        self._timeout_s = settings.deadline_s / 4
        self._store: RendezvousServer | groups.OpenStore | None = None
        self._members: tuple[str, ...] = ()
        self._group: groups.BroadcastGroup | None = None
        self._name = ""
        self._stream: torch.cuda.Stream | None = None

    def endpoints(
        self,
        members: Mapping[str, int],
        backend: str,
        *,
        verify: bool,
        difference: Difference | None = None,
    ) -> dict[str, BroadcastEndpoint]:
        """The endpoint of each member (name to number of ranks); `send` waits for them to join.
        With `verify` the checksums follow the last bucket; a `difference` is sent instead."""
        if self._store is None or self._group is None or self._members != tuple(members):
            self.close()
            self._members = tuple(members)
            self._name = uuid.uuid4().hex
            self._store = self._open_store(backend)
        announced = None
        if difference is not None:
            announced = BroadcastDifference(
                base=difference.base,
                frame_bytes=tuple(
                    0 if frame is None else len(frame) for frame in difference.frames
                ),
                checksums=difference.checksums,
            )
        first_ranks = itertools.accumulate(members.values(), initial=1)
        return {
            member: BroadcastEndpoint(
                host=self._host,
                port=self._store.port,
                group=self._name,
                rank=rank,
                world_size=1 + sum(members.values()),
                backend=backend,
                bucket_bytes=self._settings.bucket_bytes,
                timeout_s=self._timeout_s,
                key=self._store.key,
                verify=verify,
                is_base=self._settings.delta,
                difference=announced,
            )
            for member, rank in zip(members, first_ranks, strict=False)
        }

    def send(
        self,
        endpoint: BroadcastEndpoint,
        layout: Layout,
        data: torch.Tensor,
        key: bytes,
        difference: Difference | None = None,
    ) -> None:
        """Broadcast `data` [layout.num_bytes] uint8, all of which is there, with checksums of this
        key, or the difference that was announced; waits for the members of the endpoint's group,
        and for no other work of a GPU.

        Raises:
            WeightTransferError: a member is gone or too slow; the next update forms a new group.
        """
        assert self._store is not None, "endpoints() comes first"
        device = torch.device("cpu") if endpoint.backend == "gloo" else self._device
        try:
            if self._group is None:
                self._group = self._join(endpoint, data.device)
            outgoing = _outgoing(endpoint, layout, data, device, key)
            if difference is not None:
                outgoing = (frame for frame in difference.frames if frame is not None)
            with self._beside():
                for _ in self._group.pipelined(outgoing):
                    pass
        except WeightTransferError:
            self.close()
            raise

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None
        if isinstance(self._store, RendezvousServer):
            self._store.close()
            self._store = None

    def _beside(self) -> AbstractContextManager[object]:
        """In a stream of its own on a GPU: in the default one, copies wait for all that the learner
        has begun, and the learner for the copies."""
        if self._device.type != "cuda":
            return nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        return torch.cuda.stream(self._stream)

    def _open_store(self, backend: str) -> RendezvousServer | groups.OpenStore:
        """For gloo one for each group; torch's own is kept, since it ends with the process only."""
        if backend == "gloo":
            return RendezvousServer(self._host)
        if isinstance(self._store, groups.OpenStore):
            return self._store
        return groups.OpenStore(self._host, self._timeout_s)

    def _join(self, endpoint: BroadcastEndpoint, device: torch.device) -> groups.BroadcastGroup:
        if isinstance(self._store, groups.OpenStore):
            size, backend = endpoint.world_size, endpoint.backend
            return self._store.join(endpoint.group, size, backend, self._timeout_s, device)
        return groups.join(replace(endpoint, rank=0))


def _outgoing(
    endpoint: BroadcastEndpoint,
    layout: Layout,
    data: torch.Tensor,
    device: torch.device,
    key: bytes,
) -> Iterator[torch.Tensor]:
    """The buckets, then one checksum per tensor, computed while the buckets are being sent."""
    sums = bytearray()
    for bucket in layout.buckets:
        yield bucket.of(data).to(device)
        if endpoint.verify:
            sums += checksums(bucket.raws(bucket.of(data)), key)
    if sums:
        yield torch.frombuffer(sums, dtype=torch.uint8).to(device)


class BroadcastReceiver:
    """A receiver's end. Keeps the group of the last broadcast, since members seldom change."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._group: tuple[str, groups.BroadcastGroup] | None = None
        self._scratch = [torch.empty(0, dtype=torch.uint8)] * groups.IN_FLIGHT

    def difference(self, endpoint: BroadcastEndpoint) -> Difference | None:
        """What is broadcast, if that is a difference; waits as `tensors` does.

        Raises:
            WeightTransferError: the sender or a member is gone or too slow.
        """
        announced = endpoint.difference
        if announced is None:
            return None
        sizes = announced.frame_bytes
        empty = (torch.empty(size, dtype=torch.uint8) for size in sizes if size)
        group = self._join(endpoint)
        try:
            arrived = iter(list(group.pipelined(empty)))
        except BaseException:
            self.close()
            raise
        frames = tuple(next(arrived) if size else None for size in sizes)
        return Difference(announced.base, frames, announced.checksums)

    def tensors(
        self,
        endpoint: BroadcastEndpoint,
        layout: Layout,
        key: bytes,
        landing: torch.Tensor | None,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor by name; waits for the sender and the other members. `key` is that of the
        version's checksums.

        Raises:
            WeightTransferError: the sender or a member is gone or too slow, or a checksum differs,
                which is known after the last tensor only.
        """
        group = self._join(endpoint)
        received = bytearray()
        try:
            arriving = group.pipelined(self._incoming(endpoint, layout, landing))
            for bucket, data in zip(layout.buckets, arriving, strict=False):
                if endpoint.verify:
                    received += checksums(bucket.raws(data), key)
                yield from bucket.views(data)
            sent = [data.cpu().numpy().tobytes() for data in arriving]
        except BaseException:
            # Also if the consumer stops early: this rank would be out of step with the others.
            self.close()
            raise
        if sent:
            require_equal(layout.names, sent[0], bytes(received), "the sender")

    def close(self) -> None:
        if self._group is not None:
            self._group[1].close()
            self._group = None

    def _incoming(
        self, endpoint: BroadcastEndpoint, layout: Layout, landing: torch.Tensor | None
    ) -> Iterator[torch.Tensor]:
        """Memory to receive the buckets into, then the checksums."""
        device = torch.device("cpu") if endpoint.backend == "gloo" else self._device
        in_place = landing is not None and landing.device.type == device.type
        for number, bucket in enumerate(layout.buckets):
            if landing is not None and in_place:
                yield bucket.of(landing)
            else:
                yield self._reserve(number, bucket.num_bytes, device)
        if endpoint.verify and layout.slots:
            yield torch.empty(SIZE * len(layout.slots), dtype=torch.uint8, device=device)

    def _join(self, endpoint: BroadcastEndpoint) -> groups.BroadcastGroup:
        if self._group is None or self._group[0] != endpoint.group:
            self.close()
            self._group = (endpoint.group, groups.join(endpoint, self._device))
        return self._group[1]

    def _reserve(self, number: int, num_bytes: int, device: torch.device) -> torch.Tensor:
        turn = number % groups.IN_FLIGHT
        if len(self._scratch[turn]) < num_bytes or self._scratch[turn].device != device:
            self._scratch[turn] = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return self._scratch[turn][:num_bytes]
