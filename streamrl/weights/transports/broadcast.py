"""One update's bytes, both ends: a broadcast in buckets; and the receiving end of every other way
(`streamrl.weights.transports.files`, `streamrl.weights.transports.shared_memory`).

Invariant: a receiver either has yielded every tensor of the manifest, or has raised; loading is up
to the caller, who keeps the old weights until the last tensor is there.
"""

import itertools
import uuid
from collections.abc import Iterator, Mapping

import torch

from streamrl.config.weights import WeightSettings
from streamrl.errors import WeightTransferError
from streamrl.types import BroadcastEndpoint, FilesEndpoint, SharedEndpoint, WeightUpdate
from streamrl.weights.codecs.checksums import SIZE, checksums, require_equal
from streamrl.weights.layout import Layout
from streamrl.weights.transports import groups
from streamrl.weights.transports.files import FileReader, version_name
from streamrl.weights.transports.shared_memory import SharedReader


class BroadcastSender:
    """The sending end of broadcasts: rank 0 of a group that is formed anew when members change."""

    def __init__(self, settings: WeightSettings, host: str, device: torch.device) -> None:
        self._settings = settings
        self._host = host
        self._device = device
        self._timeout_s = settings.deadline_s / 4
        self._store: groups.Store | None = None
        self._members: tuple[str, ...] = ()
        self._group: groups.Group | None = None
        self._name = ""

    def endpoints(self, members: Mapping[str, int], backend: str) -> dict[str, BroadcastEndpoint]:
        """Where each member (name to number of ranks) is to join before `send` is called."""
        if self._store is None:
            self._store = groups.Store(self._host, self._timeout_s)
        if self._group is None or self._members != tuple(members):
            self.close()
            self._members = tuple(members)
            self._name = uuid.uuid4().hex
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
                verify=self._settings.verify,
            )
            for member, rank in zip(members, first_ranks, strict=False)
        }

    def send(self, endpoint: BroadcastEndpoint, layout: Layout, data: torch.Tensor) -> None:
        """Broadcast `data` [layout.num_bytes] uint8; waits for the members of the endpoint's group.

        Raises:
            WeightTransferError: a member is gone or too slow; the next update forms a new group.
        """
        assert self._store is not None, "endpoints() comes first"
        device = torch.device("cpu") if endpoint.backend == "gloo" else self._device
        try:
            if self._group is None:
                self._group = self._store.join(
                    endpoint.group, endpoint.world_size, endpoint.backend, self._timeout_s
                )
            for _ in self._group.pipelined(_outgoing(endpoint, layout, data, device)):
                pass
        except WeightTransferError:
            self.close()
            raise

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None


def _outgoing(
    endpoint: BroadcastEndpoint, layout: Layout, data: torch.Tensor, device: torch.device
) -> Iterator[torch.Tensor]:
    """The buckets, and one checksum per tensor, computed while the buckets are on their way."""
    sums = bytearray()
    for bucket in layout.buckets:
        yield bucket.of(data).to(device)
        if endpoint.verify:
            sums += checksums(bucket.slots, data)
    if sums:
        yield torch.frombuffer(sums, dtype=torch.uint8).to(device)


class TransferReceiver:
    """The receiving end, in the process that holds the model; one call at a time, in any thread.

    Keeps the group of the last broadcast, since membership seldom changes between two updates.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        self._group: tuple[str, groups.Group] | None = None
        self._scratch = [torch.empty(0, dtype=torch.uint8)] * groups.IN_FLIGHT
        self._files = FileReader()
        self._shared = SharedReader()

    def tensors(
        self, update: WeightUpdate, landing: torch.Tensor | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of the manifest by name; each is valid until the next one is asked for, and
        is only to be read.

        `landing` [num_bytes of the manifest's layout] uint8, zeros at first, lets them be received
        in place: tensors inside it are valid until it is given again. What arrives on another
        device or has to be decoded stands elsewhere all the same.

        Raises:
            WeightTransferError: the sender or a peer is gone, or something is not as it was sent,
                which may be known after the last tensor only.
        """
        match update.endpoint:
            case BroadcastEndpoint() as endpoint:
                layout = Layout(update.manifest, endpoint.bucket_bytes)
                yield from self._broadcast(endpoint, layout, landing)
            case FilesEndpoint() as endpoint:
                name = version_name(update.history, update.policy_version)
                yield from self._files.tensors(endpoint, update.manifest, name, landing)
            case SharedEndpoint() as endpoint:
                layout = Layout(update.manifest, endpoint.bucket_bytes)
                yield from self._shared.tensors(endpoint, layout, landing)

    def close(self) -> None:
        self._leave()
        self._shared.close()

    def _leave(self) -> None:
        if self._group is not None:
            self._group[1].close()
            self._group = None

    def _broadcast(
        self, endpoint: BroadcastEndpoint, layout: Layout, landing: torch.Tensor | None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        group = self._join(endpoint)
        received = bytearray()
        try:
            arriving = group.pipelined(self._incoming(endpoint, layout, landing))
            for bucket, data in zip(layout.buckets, arriving, strict=False):
                if endpoint.verify:
                    received += checksums(bucket.slots, data, bucket.start)
                yield from bucket.views(data)
            sent = [data.cpu().numpy().tobytes() for data in arriving]
        except BaseException:
            # Also if the consumer gives up: this end would be out of step with the others.
            self._leave()
            raise
        if sent:
            require_equal(layout.slots, sent[0], bytes(received), "the sender")

    def _incoming(
        self,
        endpoint: BroadcastEndpoint,
        layout: Layout,
        landing: torch.Tensor | None,
    ) -> Iterator[torch.Tensor]:
        """Where the buckets, and the checksums, are to be received."""
        device = torch.device("cpu") if endpoint.backend == "gloo" else self._device
        in_place = landing is not None and landing.device.type == device.type
        for number, bucket in enumerate(layout.buckets):
            if landing is not None and in_place:
                yield bucket.of(landing)
            else:
                yield self._reserve(number, bucket.num_bytes, device)
        if endpoint.verify and layout.slots:
            yield torch.empty(SIZE * len(layout.slots), dtype=torch.uint8, device=device)

    def _join(self, endpoint: BroadcastEndpoint) -> groups.Group:
        if self._group is None or self._group[0] != endpoint.group:
            self._leave()
            group = groups.join(
                endpoint.host,
                endpoint.port,
                endpoint.group,
                endpoint.rank,
                endpoint.world_size,
                endpoint.backend,
                endpoint.timeout_s,
            )
            self._group = (endpoint.group, group)
        return self._group[1]

    def _reserve(self, number: int, num_bytes: int, device: torch.device) -> torch.Tensor:
        turn = number % groups.IN_FLIGHT
        if len(self._scratch[turn]) < num_bytes or self._scratch[turn].device != device:
            self._scratch[turn] = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return self._scratch[turn][:num_bytes]
