"""What a weight file contains: a whole version, or the difference to the version before.

    whole   plain safetensors under the parameters' own names, with one checksum per tensor
    delta   one compressed difference (`codecs.delta`) per bucket; buckets without a difference are
            left out. The metadata name the base and have the checksums of both versions, per bucket

Invariant: a tensor counts as read only after its checksum matched; a difference counts as applied
only after the checksums of its base and of its result matched. The checksums are keyed with the
version's key, which is not in the file: who changes the file cannot change them along.
"""

from collections.abc import Iterator
from pathlib import Path

import torch

from streamrl.weights.codecs.checksums import SIZE, checksum, checksums, require_equal
from streamrl.weights.codecs.delta import DeltaCodec
from streamrl.weights.layout import Layout
from streamrl.weights.transports import tensor_file
from streamrl.weights.transports.tensor_file import TensorFile

_DELTA_FORMAT = "streamrl-delta-1"


def write_whole(path: Path, layout: Layout, data: torch.Tensor, key: bytes) -> None:
    """A version's bytes [layout.num_bytes] uint8 as a file."""
    tensors = {
        name: array for slot in layout.slots for name, array in slot.arrays(slot.of(data)).items()
    }
    sums = checksums(layout.raws(data), key)
    tensor_file.write(path, tensors, {"format": "pt", "checksums": sums.hex()})


def read_whole(
    file: TensorFile, layout: Layout, whole: torch.Tensor | None, key: bytes
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor by name: in `whole` [layout.num_bytes] uint8, or in memory of its own.

    Raises:
        WeightTransferError: the file lacks a tensor, or has it in another shape or with other bits
            than the sender; the latter is known after the last tensor.
    """
    received = []
    for slot in layout.slots:
        raw = torch.zeros(slot.num_bytes, dtype=torch.uint8) if whole is None else slot.of(whole)
        for name, array in slot.arrays(raw).items():
            file.read_into(name, array)
        received.append(checksum(slot.spec.name, raw, key))
        yield slot.spec.name, slot.read(raw)
    sent = file.metadata_bytes("checksums")
    require_equal(layout.names, sent, b"".join(received), file.path)


def write_delta(
    path: Path,
    layout: Layout,
    base: torch.Tensor,
    data: torch.Tensor,
    base_name: str,
    key: bytes,
) -> None:
    """What turns `base` into `data`, both [layout.num_bytes] uint8, as a file."""
    codec = DeltaCodec(layout.largest_bucket)
    frames = {
        str(number): codec.encode(bucket.of(base), bucket.of(data))
        for number, bucket in enumerate(layout.buckets)
    }
    metadata = {
        "format": _DELTA_FORMAT,
        "base": base_name,
        "base_checksums": checksums(_buckets("base", layout, base), key).hex(),
        "checksums": checksums(_buckets("result", layout, data), key).hex(),
    }
    differing = {number: frame for number, frame in frames.items() if frame is not None}
    tensor_file.write(path, differing, metadata)


def is_delta(file: TensorFile) -> bool:
    return file.metadata("format") == _DELTA_FORMAT


def apply_delta(
    file: TensorFile, layout: Layout, base: torch.Tensor, into: torch.Tensor, key: bytes
) -> None:
    """Fill `into` with the version the file makes of `base`; they may be the same memory.

    Raises:
        WeightTransferError: base, file or result is not what the sender had; `into` is undefined.
    """
    before = file.metadata_bytes("base_checksums")
    after = file.metadata_bytes("checksums")
    codec = DeltaCodec(layout.largest_bucket)
    for number, bucket in enumerate(layout.buckets):
        label = f"bucket {number} (from {bucket.slots[0].spec.name})"
        ours, target = bucket.of(base), bucket.of(into)
        expected = slice(number * SIZE, (number + 1) * SIZE)
        if checksum(f"base {number}", ours, key) != before[expected]:
            raise file.error(f"changes another base: {label} differs")
        if str(number) in file:
            try:
                codec.decode(file.read(str(number)), ours, target)
            except ValueError as error:
                raise file.error(f"is corrupt in bucket {number}: {error}") from error
        elif target.data_ptr() != ours.data_ptr():
            target.copy_(ours)
        if checksum(f"result {number}", target, key) != after[expected]:
            raise file.error(f"does not give the sender's bytes: {label} differs")


def _buckets(name: str, layout: Layout, data: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Each bucket's bytes, under a name that is not that of another one or of another version."""
    return ((f"{name} {i}", bucket.of(data)) for i, bucket in enumerate(layout.buckets))
