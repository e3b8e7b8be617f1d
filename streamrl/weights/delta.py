"""A version as what differs from another one: per bucket the XOR of both, compressed with zstd.

After an optimizer step of reinforcement learning most weights are the same bits again in bfloat16
(1 to 5 % differ, see slime's and TRL's delta weight sync), and XOR leaves zeros there, which zstd
all but removes. Lossless by construction; buckets without a difference are left out.

Invariant: bytes count as applied only after the base's and the result's checksums matched. The file
says in its metadata what it changes, with all checksums. Called by
`streamrl.weights.files`.
"""

from pathlib import Path

import torch
import zstandard

from streamrl.weights import tensor_file
from streamrl.weights.checksums import SIZE, checksum
from streamrl.weights.layout import Bucket, Layout, bytes_of
from streamrl.weights.tensor_file import TensorFile

FORMAT = "streamrl-delta-1"


def write(path: Path, layout: Layout, base: torch.Tensor, data: torch.Tensor, name: str) -> None:
    """What turns `base` into `data`, both [layout.num_bytes] uint8; `name` is the base's."""
    compressor = zstandard.ZstdCompressor(level=1, write_checksum=True)
    frames = {}
    for number, bucket in enumerate(layout.buckets):
        difference = torch.bitwise_xor(bucket.of(base), bucket.of(data))
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
    decompressor = zstandard.ZstdDecompressor()
    before = file.bytes_about("base_checksums")
    after = file.bytes_about("checksums")
    for number, bucket in enumerate(layout.buckets):
        where = f"bucket {number} (from {bucket.slots[0].spec.name})"
        mine, theirs = bucket.of(base), slice(number * SIZE, (number + 1) * SIZE)
        if checksum(mine) != before[theirs]:
            raise file.error(f"changes another base: {where} differs")
        target = bucket.of(into)
        if str(number) not in file:
            if target.data_ptr() != mine.data_ptr():
                target.copy_(mine)
            continue
        torch.bitwise_xor(mine, _difference(file, decompressor, number, bucket), out=target)
        if checksum(target) != after[theirs]:
            raise file.error(f"does not give the sender's bytes: {where} differs")


def _difference(
    file: TensorFile, decompressor: zstandard.ZstdDecompressor, number: int, bucket: Bucket
) -> torch.Tensor:
    frame = file.read(str(number))
    try:
        data = decompressor.decompress(bytes_of(frame), max_output_size=bucket.stop - bucket.start)
    except zstandard.ZstdError as error:
        raise file.error(f"is corrupt in bucket {number} ({error})") from error
    if len(data) != bucket.stop - bucket.start:
        raise file.error(f"is corrupt in bucket {number} ({len(data)} bytes)")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _checksums(layout: Layout, data: torch.Tensor) -> bytes:
    return b"".join(checksum(bucket.of(data)) for bucket in layout.buckets)
