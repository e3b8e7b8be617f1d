"""A version as what differs from another one: per bucket the XOR of both, compressed with zstd.

After an optimizer step of reinforcement learning most weights are the same bits again in bfloat16
(1 to 5 % differ, see slime's and TRL's delta weight sync), and XOR leaves zeros there, which zstd
all but removes. Lossless by construction; buckets without a difference are left out.

Invariant: bytes count as applied only after the base's and the result's checksums matched. The file
says in its metadata what it changes, with all checksums. Called by
`streamrl.weights.transports.files`.
"""

from pathlib import Path

import torch
import zstandard

from streamrl.weights.codecs.checksums import SIZE, checksum
from streamrl.weights.layout import Layout, bytes_of
from streamrl.weights.transports import tensor_file
from streamrl.weights.transports.tensor_file import TensorFile

FORMAT = "streamrl-delta-1"


def write(path: Path, layout: Layout, base: torch.Tensor, data: torch.Tensor, name: str) -> None:
    """What turns `base` into `data`, both [layout.num_bytes] uint8; `name` is the base's."""
    compressor = zstandard.ZstdCompressor(level=1, write_checksum=True)
    scratch = _scratch(layout)
    frames = {}
    for number, bucket in enumerate(layout.buckets):
        difference = scratch[: bucket.num_bytes]
        torch.bitwise_xor(bucket.of(base), bucket.of(data), out=difference)
        if difference.any():
            frame = bytearray(compressor.compress(bytes_of(difference)))
            frames[str(number)] = torch.frombuffer(frame, dtype=torch.uint8)
    about = {
        "format": FORMAT,
        "base": name,
        "base_checksums": _checksums(layout, base).hex(),
        "checksums": _checksums(layout, data).hex(),
    }
    tensor_file.write(path, frames, about)


def apply(file: TensorFile, layout: Layout, base: torch.Tensor, into: torch.Tensor) -> None:
    """Fill `into` with the version the file makes of `base`; they may be the same memory.

    Raises:
        WeightTransferError: base, file or result is not what the sender had; `into` is undefined.
    """
    before = file.bytes_about("base_checksums")
    after = file.bytes_about("checksums")
    scratch = _scratch(layout)
    for number, bucket in enumerate(layout.buckets):
        where = f"bucket {number} (from {bucket.slots[0].spec.name})"
        mine, theirs = bucket.of(base), slice(number * SIZE, (number + 1) * SIZE)
        if checksum(mine) != before[theirs]:
            raise file.error(f"changes another base: {where} differs")
        target = bucket.of(into)
        if str(number) in file:
            difference = scratch[: bucket.num_bytes]
            _decompress(file, number, difference)
            torch.bitwise_xor(mine, difference, out=target)
            if checksum(target) != after[theirs]:
                raise file.error(f"does not give the sender's bytes: {where} differs")
        elif target.data_ptr() != mine.data_ptr():
            target.copy_(mine)


def _decompress(file: TensorFile, number: int, difference: torch.Tensor) -> None:
    """Fill `difference`, uint8, with the bucket's."""
    rest = bytes_of(difference)
    try:
        reader = zstandard.ZstdDecompressor().stream_reader(bytes_of(file.read(str(number))))
        while rest and (count := reader.readinto(rest)):
            rest = rest[count:]
        is_whole = not rest and not reader.read(1)
    except zstandard.ZstdError as error:
        raise file.error(f"is corrupt in bucket {number} ({error})") from error
    if not is_whole:
        raise file.error(f"is corrupt in bucket {number}: not {len(difference)} bytes")


def _scratch(layout: Layout) -> torch.Tensor:
    largest = max((bucket.num_bytes for bucket in layout.buckets), default=0)
    return torch.empty(largest, dtype=torch.uint8)


def _checksums(layout: Layout, data: torch.Tensor) -> bytes:
    return b"".join(checksum(bucket.of(data)) for bucket in layout.buckets)
