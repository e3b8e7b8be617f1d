"""A model's parameters as one stretch of bytes, cut into buckets at tensor boundaries.

Invariant: sender and receiver compute the same layout from the same manifest and `bucket_bytes`, so
no offsets travel. A tensor larger than a bucket gets a bucket of its own.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch

from streamrl.types import TensorSpec

_ALIGNMENT = 64


@dataclass(frozen=True)
class Slot:
    """Where one tensor stands: bytes [start, start + num_bytes) of the whole."""

    spec: TensorSpec
    start: int
    num_bytes: int


@dataclass(frozen=True)
class Bucket:
    """Consecutive slots that travel together: bytes [start, stop) of the whole."""

    slots: tuple[Slot, ...]
    start: int
    stop: int

    def views(self, data: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Named tensors inside `data`, the bucket's bytes [stop - start] uint8."""
        for slot in self.slots:
            start = slot.start - self.start
            raw = data[start : start + slot.num_bytes]
            dtype: torch.dtype = getattr(torch, slot.spec.dtype)
            yield slot.spec.name, raw.view(dtype).view(slot.spec.shape)


@dataclass(frozen=True)
class Layout:
    manifest: tuple[TensorSpec, ...]
    bucket_bytes: int

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        return tuple(_cut(_slots(self.manifest), self.bucket_bytes))

    @cached_property
    def num_bytes(self) -> int:
        return self.buckets[-1].stop if self.buckets else 0


def manifest_of(
    parameters: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None
) -> tuple[TensorSpec, ...]:
    """The manifest of the parameters; `dtype` replaces that of the floating-point ones."""
    return tuple(
        TensorSpec(
            name, _name_of(dtype if dtype and t.is_floating_point() else t.dtype), (*t.shape,)
        )
        for name, t in parameters.items()
    )


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _slots(manifest: Iterable[TensorSpec]) -> Iterator[Slot]:
    start = 0
    for spec in manifest:
        dtype: torch.dtype = getattr(torch, spec.dtype)
        num_bytes = prod(spec.shape) * dtype.itemsize
        yield Slot(spec, start, num_bytes)
        start += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _cut(slots: Iterable[Slot], bucket_bytes: int) -> Iterator[Bucket]:
    pending: tuple[Slot, ...] = ()
    for slot in slots:
        stop = slot.start + slot.num_bytes
        if pending and stop - pending[0].start > bucket_bytes:
            yield _bucket(pending)
            pending = ()
        pending = (*pending, slot)
    if pending:
        yield _bucket(pending)


def _bucket(slots: tuple[Slot, ...]) -> Bucket:
    last = slots[-1]
    return Bucket(slots, slots[0].start, last.start + last.num_bytes)
