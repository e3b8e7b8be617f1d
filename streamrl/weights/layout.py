"""A model's parameters as one range of bytes, cut into buckets at tensor boundaries.

Invariant: sender and receiver compute the same layout from the same manifest and `bucket_bytes`, so
no offsets are sent; a tensor's offset depends on the manifest alone. A tensor larger than a bucket
gets its own bucket.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch

from streamrl.types import TensorSpec
from streamrl.weights import float8

_ALIGNMENT = 64


@dataclass(frozen=True)
class Slot:
    """One tensor's place in the layout: bytes [start, start + num_bytes) of the whole."""

    spec: TensorSpec
    start: int
    num_bytes: int

    def of(self, data: torch.Tensor, origin: int = 0) -> torch.Tensor:
        """The slot's bytes in `data`, whose first byte is byte `origin` of the whole."""
        start = self.start - origin
        return data[start : start + self.num_bytes]

    def arrays(self, raw: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views into `raw`, the slot's bytes, by name: the tensor, and a float8 matrix's scales."""
        count = prod(self.spec.shape) * dtype_of(self.spec).itemsize
        arrays = {self.spec.name: raw[:count].view(dtype_of(self.spec)).view(self.spec.shape)}
        if dtype_of(self.spec) != float8.DTYPE:
            return arrays
        scales = raw[_aligned(count) :].view(torch.float32)
        shape = float8.scale_shape(self.spec.shape)
        return {**arrays, self.spec.name + float8.SCALE_SUFFIX: scales.view(shape)}

    def write(self, raw: torch.Tensor, tensor: torch.Tensor) -> None:
        """Cast the tensor into `raw`, the slot's bytes."""
        first, *scales = self.arrays(raw).values()
        if scales:
            float8.encode(tensor, first, *scales)
        else:
            first.copy_(tensor)

    def read(self, raw: torch.Tensor) -> torch.Tensor:
        """The tensor in `raw`, the slot's bytes: a view, or a matrix decoded to bfloat16."""
        first, *scales = self.arrays(raw).values()
        return float8.decode(first, *scales) if scales else first


@dataclass(frozen=True)
class Bucket:
    """Consecutive slots that are sent together: bytes [start, stop) of the whole."""

    slots: tuple[Slot, ...]
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start

    def of(self, data: torch.Tensor) -> torch.Tensor:
        """The bucket's bytes in `data`, the whole."""
        return data[self.start : self.stop]

    def raws(self, data: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Each slot's name and bytes inside `data`, the bucket's bytes [stop - start] uint8."""
        return ((slot.spec.name, slot.of(data, self.start)) for slot in self.slots)

    def views(self, data: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Named tensors inside `data`, the bucket's bytes [stop - start] uint8."""
        for slot in self.slots:
            yield slot.spec.name, slot.read(slot.of(data, self.start))


@dataclass(frozen=True)
class Layout:
    """Slots and buckets of a manifest; a bucket has at most `bucket_bytes` or one tensor."""

    manifest: tuple[TensorSpec, ...]
    bucket_bytes: int

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        return tuple(_cut(_slots(self.manifest), self.bucket_bytes))

    @cached_property
    def slots(self) -> tuple[Slot, ...]:
        return tuple(slot for bucket in self.buckets for slot in bucket.slots)

    @cached_property
    def num_bytes(self) -> int:
        return self.buckets[-1].stop if self.buckets else 0

    def raws(self, data: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Each slot's name and bytes inside `data`, the whole."""
        return ((slot.spec.name, slot.of(data)) for slot in self.slots)

    def views(self, data: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Named tensors inside `data`, the whole."""
        return ((slot.spec.name, slot.read(slot.of(data))) for slot in self.slots)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(spec.name for spec in self.manifest)


def manifest_of(
    parameters: Mapping[str, torch.Tensor],
    dtype: torch.dtype | None = None,
    exact: Collection[str] = (),
) -> tuple[TensorSpec, ...]:
    """The manifest of the parameters; `dtype` replaces that of floating-point parameters, except
    those in `exact`.

    float8_e4m3fn is for matrices (see `float8.is_sent_in_float8`); the rest becomes bfloat16.
    """
    return tuple(
        TensorSpec(
            name,
            dtype_name(t.dtype if name in exact else _sent_dtype(name, t, dtype)),
            (*t.shape,),
        )
        for name, t in parameters.items()
    )


def dtype_of(spec: TensorSpec) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name without its prefix, as in a manifest."""
    return str(dtype).removeprefix("torch.")


def _sent_dtype(name: str, parameter: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    if dtype is None or not parameter.is_floating_point():
        return parameter.dtype
    if dtype == float8.DTYPE and not float8.is_sent_in_float8(name, parameter):
        return torch.bfloat16
    return dtype


def _slots(manifest: Iterable[TensorSpec]) -> Iterator[Slot]:
    start = 0
    for spec in manifest:
        num_bytes = prod(spec.shape) * dtype_of(spec).itemsize
        if dtype_of(spec) == float8.DTYPE:
            num_bytes = _aligned(num_bytes) + 4 * prod(float8.scale_shape(spec.shape))
        yield Slot(spec, start, num_bytes)
        start += _aligned(num_bytes)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _cut(slots: Iterable[Slot], bucket_bytes: int) -> Iterator[Bucket]:
    pending: list[Slot] = []
    for slot in slots:
        stop = slot.start + slot.num_bytes
        if pending and stop - pending[0].start > bucket_bytes:
            yield _bucket(pending)
            pending = []
        pending.append(slot)
    if pending:
        yield _bucket(pending)


def _bucket(slots: list[Slot]) -> Bucket:
    last = slots[-1]
    return Bucket(tuple(slots), slots[0].start, last.start + last.num_bytes)
