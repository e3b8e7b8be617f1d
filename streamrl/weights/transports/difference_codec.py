"""What changed between two versions of the weights, as bytes: pure, and lossless by construction.

After an optimizer step of reinforcement learning, 98 to 99 % of bfloat16 weights are the same bits
again: a step of 1e-6 is less than half the distance between two numbers near 0.01. So a difference
lists the 16-bit words that changed, by their gaps, and which of their bits did:

    count u64, escapes u64        of what follows, little-endian
    zstd frame of
      gaps u8 [count]             words that are the same before this one; 255 stands for the next
      longer i64 [escapes]        of these, which has the gap
      low u8 [count]              the XOR of the words' low bytes, then that of
      high u8 [count]             their high bytes
      tail u8 [num_bytes % 8]     the XOR of the last bytes

The streams stand apart because each has a distribution of its own, which zstd's entropy coder finds
block by block. Changed bits instead of new ones: most words move by one unit in the last place.
That is half of what zstd makes of the whole XOR (`tests/benchmarks/bench_store.py`). Where most
has changed, as of float32 in every step, the frame has the whole XOR, and `count` is WHOLE.
"""

import struct
from typing import Any

import numpy as np
import torch
import zstandard
from numpy.typing import NDArray

_COUNTS = struct.Struct("<QQ")
WHOLE = 2**64 - 1
_ESCAPE = 255
_LANE = 8
"""Bytes of a sample; the bytes after the last whole one are the tail."""
_BLOCK = 2**18
"""Words that are worked on at once: few enough to stay in the processor's cache."""
_SAMPLE = 61
"""One lane in so many says whether most have changed."""

Bytes = NDArray[np.uint8]


def encode(base: torch.Tensor, data: torch.Tensor) -> torch.Tensor | None:
    """What turns `base` into `data`, both flat uint8 of one length, in host memory: flat uint8, or
    None if they are equal."""
    old, new = base.numpy(), data.numpy()
    whole = len(old) // _LANE * _LANE
    sample = old[:whole].view("<u8")[::_SAMPLE] != new[:whole].view("<u8")[::_SAMPLE]
    if 2 * np.count_nonzero(sample) > len(sample):
        return _frame((WHOLE, 0), (old ^ new).data)
    streams = _streams(old, new, whole)
    if not any(stream.any() for stream in streams[2:]):
        return None
    content = b"".join(stream.tobytes() for stream in streams)
    return _frame((len(streams[0]), len(streams[1])), content)


def decode(frame: torch.Tensor, base: torch.Tensor, into: torch.Tensor) -> None:
    """Fill `into` with what `frame` makes of `base`; they may be the same memory.

    Raises:
        ValueError: the frame is corrupt, or is not of that many bytes; `into` is undefined.
    """
    raw = frame.numpy()
    if len(raw) < _COUNTS.size:
        raise ValueError("it ends too early")
    count, num_longer = _COUNTS.unpack(raw[: _COUNTS.size].tobytes())
    if into.data_ptr() != base.data_ptr():
        into.copy_(base)
    target = into.numpy()
    if count == WHOLE:
        target ^= _decompressed(raw, len(target))
        return
    gaps, longer, planes, tail = _read(raw, count, num_longer, len(target))
    whole = len(target) - len(tail)
    words = target[:whole].view("<u2")
    last, num_longer = -1, 0
    for start in range(0, len(gaps), _BLOCK):
        part = slice(start, start + _BLOCK)
        gap = gaps[part].astype(np.int64)
        escaped = np.flatnonzero(gap == _ESCAPE)
        gap[escaped] = longer[num_longer : num_longer + len(escaped)]
        num_longer += len(escaped)
        places = last + np.cumsum(gap + 1)
        last = int(places[-1])
        if last >= len(words):
            raise ValueError(f"changes more than {len(base)} bytes")
        words[places] ^= planes[0, part] | planes[1, part].astype(np.uint16) << 8
    target[whole:] ^= tail


def _streams(old: Bytes, new: Bytes, whole: int) -> list[NDArray[Any]]:
    """Gaps, the longer ones, low and high bytes, and the tail, which begins at `whole`."""
    gaps: list[Bytes] = []
    longer: list[NDArray[np.int64]] = [np.empty(0, np.int64)]
    changes: list[NDArray[np.uint16]] = [np.empty(0, np.uint16)]
    last = -1
    before, after = old[:whole].view("<u2"), new[:whole].view("<u2")
    for start in range(0, len(before), _BLOCK):
        part = slice(start, start + _BLOCK)
        places = np.flatnonzero(before[part] != after[part])
        if len(places):
            gap = np.diff(places, prepend=last - start) - 1
            gaps.append(np.minimum(gap, _ESCAPE).astype(np.uint8))
            longer.append(gap[gap >= _ESCAPE])
            changes.append(before[part][places] ^ after[part][places])
            last = start + int(places[-1])
    planes = np.concatenate(changes).astype("<u2", copy=False).view(np.uint8).reshape(-1, 2)
    escaped = np.concatenate(longer).astype("<i8", copy=False)
    gap_bytes = np.concatenate([np.empty(0, np.uint8), *gaps])
    return [gap_bytes, escaped, planes[:, 0], planes[:, 1], old[whole:] ^ new[whole:]]


def _frame(counts: tuple[int, int], content: bytes | memoryview) -> torch.Tensor:
    frame = zstandard.ZstdCompressor(level=1, write_checksum=True).compress(content)
    return torch.frombuffer(bytearray(_COUNTS.pack(*counts) + frame), dtype=torch.uint8)


def _read(
    raw: Bytes, count: int, num_longer: int, num_bytes: int
) -> tuple[Bytes, NDArray[np.int64], Bytes, Bytes]:
    """Gaps, the longer ones, low and high bytes [2, count], and the tail."""
    whole = num_bytes // _LANE * _LANE
    if count > whole // 2 or num_longer > count:
        raise ValueError(f"changes more than {num_bytes} bytes")
    sizes = [count, 8 * num_longer, 2 * count, num_bytes - whole]
    content = _decompressed(raw, sum(sizes))
    gaps, longer, planes, tail = np.split(content, np.cumsum(sizes)[:-1])
    escaped = longer.copy().view("<i8")
    is_counted = np.count_nonzero(gaps == _ESCAPE) == num_longer
    if not is_counted or ((escaped < _ESCAPE) | (escaped > whole // 2)).any():
        raise ValueError("its gaps are not those of a difference")
    return gaps, escaped, planes.reshape(2, count), tail


def _decompressed(raw: Bytes, num_bytes: int) -> Bytes:
    """So many bytes, however many the frame says that it has."""
    content = np.empty(num_bytes, np.uint8)
    rest = content.data
    try:
        reader = zstandard.ZstdDecompressor().stream_reader(raw[_COUNTS.size :].data)
        while rest and (count := reader.readinto(rest)):
            rest = rest[count:]
        if rest or reader.read(1):
            raise ValueError(f"it has not the {num_bytes} bytes that it says")
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error
    return content
