"""One update's bytes by memory that both ends map: on one host, or on one GPU; no socket.

The sender tells where a version stands in its send buffer; the receiver reads it there, in its own
time, and nobody waits for anybody else's reading. What the learner writes next would tear what a
late receiver reads; the stamps (`streamrl.weights.send_buffers`) show that, at the last byte.

Invariant: after the last tensor the stamp was still the endpoint's and the sender alive, or the
receiver raises. Called by the sender, and by `streamrl.weights.transports.broadcast`.
"""

from collections.abc import Iterator

import torch

from streamrl.errors import WeightTransferError
from streamrl.types import CudaMemory, HostMemory, SharedEndpoint
from streamrl.weights.codecs.checksums import checksums, require_equal
from streamrl.weights.layout import Layout
from streamrl.weights.send_buffers import STAMP_BYTES, SendBuffers, Written
from streamrl.weights.transports.memory import open_memory, require_present


def endpoint_of(buffers: SendBuffers, held: Written, *, verify: bool) -> SharedEndpoint:
    """Where receivers read the version that is held. Waits for a GPU to have written it."""
    assert buffers.exported is not None, "routes give nobody what cannot be shared"
    stamps, memory = buffers.exported
    if held.event is not None:
        held.event.synchronize()
    slots = buffers.layout.slots if verify else ()
    return SharedEndpoint(
        memory=memory,
        start=held.start,
        stamps=stamps,
        stamp_at=held.buffer * STAMP_BYTES,
        stamp=held.stamp,
        bucket_bytes=buffers.layout.bucket_bytes,
        checksums=checksums(slots, held.data),
    )


class SharedReader:
    """A receiver's end. Keeps the sender's memory mapped from one update to the next."""

    def __init__(self) -> None:
        self._mapped: dict[HostMemory | CudaMemory, torch.Tensor] = {}

    def tensors(
        self, endpoint: SharedEndpoint, layout: Layout, landing: torch.Tensor | None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor by name: in `landing`, if there is one, or in the sender's memory, which is
        only to be read.

        Raises:
            WeightTransferError: the memory is not to be had, or was overwritten while it was read.
        """
        try:
            yield from self._read(endpoint, layout, landing)
        except WeightTransferError:
            self.close()
            raise

    def close(self) -> None:
        self._mapped = {}

    def _read(
        self, endpoint: SharedEndpoint, layout: Layout, landing: torch.Tensor | None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        memory, stamps = self._map(endpoint.memory, endpoint.stamps)
        stamp = stamps[endpoint.stamp_at : endpoint.stamp_at + STAMP_BYTES].view(torch.int64)
        data = memory[endpoint.start : endpoint.start + layout.num_bytes]
        _require_same(stamp, endpoint)
        received = bytearray()
        for bucket in layout.buckets:
            raw = bucket.of(data)
            if landing is not None:
                raw = bucket.of(landing).copy_(raw)
            if endpoint.checksums:
                received += checksums(bucket.slots, raw, bucket.start)
            yield from bucket.views(raw)
        if data.is_cuda:
            # Copies out of it, the caller's too, are under way until here.
            torch.cuda.current_stream(data.device).synchronize()
        _require_same(stamp, endpoint)
        require_present(endpoint.stamps)
        if endpoint.checksums:
            require_equal(layout.slots, endpoint.checksums, bytes(received), "the sender")

    def _map(self, *wanted: HostMemory | CudaMemory) -> list[torch.Tensor]:
        """What is mapped already stays; what is not wanted any more is given back."""
        self._mapped = {one: held for one, held in self._mapped.items() if one in wanted}
        missing = dict.fromkeys(one for one in wanted if one not in self._mapped)
        opened = {one: open_memory(one) for one in missing}
        self._mapped = {**self._mapped, **opened}
        return [self._mapped[one] for one in wanted]


def _require_same(stamp: torch.Tensor, endpoint: SharedEndpoint) -> None:
    if stamp.item() != endpoint.stamp:
        raise WeightTransferError(
            "the learner has overwritten the version before it was read: this receiver was too late"
        )
