"""Weights in memory that both ends map, on one host or on one GPU: the receiver's end.

The endpoint says where a version is in the sender's buffers (`streamrl.weights.send_buffers`); each
receiver reads it there in its own time. The learner's next writes may overwrite what a late
receiver reads; the buffer's stamp, compared after the last byte, shows that.

Invariant: after the last tensor the stamp was still the endpoint's and the sender alive, or the
reader raises.
"""

from collections.abc import Iterator

import torch

from streamrl.errors import WeightTransferError
from streamrl.types import CudaMemory, HostMemory, SharedEndpoint
from streamrl.weights.codecs.checksums import checksums, require_equal
from streamrl.weights.layout import Layout
from streamrl.weights.transports.memory import open_memory, require_present

STAMP_BYTES = 8


class SharedReader:
    """Keeps the sender's memory mapped from one update to the next."""

    def __init__(self) -> None:
        self._mapped: dict[HostMemory | CudaMemory, torch.Tensor] = {}

    def tensors(
        self,
        endpoint: SharedEndpoint,
        layout: Layout,
        landing: torch.Tensor | None,
        key: bytes,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor by name: in `landing`, if given, else read-only in the sender's memory.
        `key` is that of the checksums.

        Raises:
            WeightTransferError: the memory cannot be opened, or was overwritten during the read.
        """
        try:
            yield from self._read(endpoint, layout, landing, key)
        except WeightTransferError:
            self.close()
            raise

    def close(self) -> None:
        self._mapped = {}

    def _read(
        self,
        endpoint: SharedEndpoint,
        layout: Layout,
        landing: torch.Tensor | None,
        key: bytes,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        memory, stamps = self._map(endpoint.memory, endpoint.stamps)
        _require_inside(endpoint, layout)
        stamp = stamps[endpoint.stamp_at : endpoint.stamp_at + STAMP_BYTES].view(torch.int64)
        data = memory[endpoint.start : endpoint.start + layout.num_bytes]
        _require_same(stamp, endpoint)
        received = bytearray()
        for bucket in layout.buckets:
            raw = bucket.of(data)
            if landing is not None:
                raw = bucket.of(landing).copy_(raw)
            if endpoint.checksums:
                received += checksums(bucket.raws(raw), key)
            yield from bucket.views(raw)
        if data.is_cuda:
            # Copies out of it, the caller's too, may be under way until here.
            torch.cuda.current_stream(data.device).synchronize()
        _require_same(stamp, endpoint)
        require_present(endpoint.stamps)
        if endpoint.checksums:
            require_equal(layout.names, endpoint.checksums, bytes(received), "the sender")

    def _map(self, *wanted: HostMemory | CudaMemory) -> list[torch.Tensor]:
        """Unmap what is not wanted any more, and open what is not mapped yet."""
        self._mapped = {one: held for one, held in self._mapped.items() if one in wanted}
        missing = dict.fromkeys(one for one in wanted if one not in self._mapped)
        self._mapped = {**self._mapped, **{one: open_memory(one) for one in missing}}
        return [self._mapped[one] for one in wanted]


def _require_inside(endpoint: SharedEndpoint, layout: Layout) -> None:
    ends = {
        "version": (endpoint.start + layout.num_bytes, endpoint.memory.num_bytes),
        "stamp": (endpoint.stamp_at + STAMP_BYTES, endpoint.stamps.num_bytes),
    }
    for name, (end, size) in ends.items():
        if end > size or endpoint.stamp_at % STAMP_BYTES:
            raise WeightTransferError(f"the {name} ends at byte {end} of {size} of the memory")


def _require_same(stamp: torch.Tensor, endpoint: SharedEndpoint) -> None:
    if stamp.item() != endpoint.stamp:
        raise WeightTransferError(
            "the learner has overwritten the version before it was read: this receiver was too late"
        )
