"""Safetensors files, written from and read into memory that is already allocated.

The library itself copies all tensors into one more buffer to write, and maps the file to read: if a
mapped file vanishes from a network file system its reader is killed, a failing read is an error.

Invariant: under its final name a file is complete or absent.
Format: https://github.com/huggingface/safetensors#format
"""

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch

from streamrl.durable_files import open_private
from streamrl.errors import WeightTransferError

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_MAX_HEADER = 100 * 2**20
_UNFINISHED = ".unfinished"

_Offset = Annotated[int, msgspec.Meta(ge=0)]


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[_Offset, _Offset]

    def __post_init__(self) -> None:
        if self.num_bytes < 0:
            raise ValueError(f"data_offsets: were {self.data_offsets}")

    @property
    def num_bytes(self) -> int:
        start, stop = self.data_offsets
        return stop - start


def write(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Contiguous host tensors by name, with metadata, for the owner alone; creates the folder."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    stop = 0
    for name, tensor in tensors.items():
        start, stop = stop, stop + tensor.nbytes
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": [*tensor.shape],
            "data_offsets": [start, stop],
        }
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    unfinished = path.with_name(path.name + _UNFINISHED)
    try:
        with open(unfinished, "wb", opener=open_private) as file:
            file.write(struct.pack("<Q", len(encoded)) + encoded)
            for tensor in tensors.values():
                file.write(_bytes_of(tensor))
        unfinished.replace(path)
    finally:
        # On a full disk a checkpoint needs what it had taken.
        unfinished.unlink(missing_ok=True)


class TensorFile:
    """An open file; every error names it and says what is wrong.

    Raises:
        WeightTransferError: the file does not exist, is not safetensors, or is incomplete.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = path.open("rb", buffering=0)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise self.error(
                f"cannot be opened ({reason}); transport `files` needs a file system that "
                "learner and generators share"
            ) from error
        try:
            self._entries, self._metadata, self._start = self._header()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> "TensorFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def error(self, what: str) -> WeightTransferError:
        return WeightTransferError(f"cannot read weights from {self.path}: it {what}")

    def read(self, name: str) -> torch.Tensor:
        """The tensor's bytes in new memory, flat uint8 whatever its dtype."""
        entry = self._entry(name)
        raw = torch.empty(entry.num_bytes, dtype=torch.uint8)
        self._fill(raw, entry)
        return raw

    def read_into(self, name: str, tensor: torch.Tensor) -> None:
        """Fill a contiguous host tensor; its dtype and shape must be those in the file."""
        entry = self._entry(name)
        expected = (_NAMES[tensor.dtype], (*tensor.shape,))
        if (entry.dtype, entry.shape) != expected:
            raise self.error(f"holds {name} as {entry.dtype} {entry.shape}, not as {expected}")
        if entry.num_bytes != tensor.nbytes:
            raise self.error(f"holds {name} in {entry.num_bytes} bytes")
        self._fill(tensor, entry)

    def metadata(self, key: str) -> str | None:
        """The entry of the file's metadata; None if there is none."""
        return self._metadata.get(key)

    def metadata_bytes(self, key: str) -> bytes:
        """The bytes that the file's metadata have in hexadecimal."""
        try:
            return bytes.fromhex(self._metadata[key])
        except (KeyError, ValueError) as error:
            raise self.error(f"has no readable {key}") from error

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def _entry(self, name: str) -> _Entry:
        try:
            return self._entries[name]
        except KeyError as error:
            raise self.error(f"has no tensor {name}") from error

    def _fill(self, tensor: torch.Tensor, entry: _Entry) -> None:
        rest = _bytes_of(tensor)
        try:
            self._file.seek(self._start + entry.data_offsets[0])
            while rest:
                if not (count := self._file.readinto(rest)):
                    raise self.error("ends too early")
                rest = rest[count:]
        except OSError as error:
            raise self.error(f"cannot be read ({error.strerror})") from error

    def _header(self) -> tuple[dict[str, _Entry], dict[str, str], int]:
        """Entries by name, metadata, and where the first tensor starts."""
        try:
            size = os.fstat(self._file.fileno()).st_size
            (length,) = struct.unpack("<Q", self._file.read(8))
            if length > min(size, _MAX_HEADER):
                raise self.error("has no readable header (or was cut off)")
            parts = msgspec.json.decode(self._file.read(length), type=dict[str, msgspec.Raw])
            metadata = msgspec.json.decode(parts.pop("__metadata__", b"{}"), type=dict[str, str])
            entries = {n: msgspec.json.decode(raw, type=_Entry) for n, raw in parts.items()}
        except (OSError, struct.error, msgspec.MsgspecError, RecursionError) as error:
            raise self.error(f"has no readable header ({error})") from error
        stops = (entry.data_offsets[1] for entry in entries.values())
        expected = 8 + length + max(stops, default=0)
        if size != expected:
            raise self.error(f"has {size} bytes instead of {expected}")
        return entries, metadata, 8 + length


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous host tensor."""
    return tensor.view(-1).view(torch.uint8).numpy().data
