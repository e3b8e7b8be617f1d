"""Weights through a shared file system, both ends: whole files, and differences to the last one.

With `weights.delta` a receiver that has the version before gets only the difference to it; one that
has not, or that failed, gets a whole file, and so does everyone after `weights.full_every`
differences.

Invariant: a reader sees complete files only, and its file stays until it has answered or two
deadlines have passed. A keyed checksum covers every byte that is handed on. Files are readable by
their owner alone, in a folder that nobody else may enter.

A weight file contains a whole version, or the difference to the version before.

    whole   plain safetensors under the parameters' own names, with one checksum per tensor
    delta   one compressed difference per bucket; buckets without a difference are
            left out. The metadata name the base and have the checksums of the result, per bucket

A tensor counts as read only after its checksum matched, a difference as applied only after those of
its result did, which with another base they do not. The checksums are keyed with the
version's key, which is not in the file: who changes the file cannot change them along.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from streamrl.config.weights import WeightSettings
from streamrl.types import FilesEndpoint, TensorSpec
from streamrl.weights.layout import Layout
from streamrl.weights.transports import delta, tensor_file
from streamrl.weights.transports.checksums import (
    SIZE,
    checksum,
    checksums,
    require_equal,
    version_key,
)
from streamrl.weights.transports.tensor_file import TensorFile

_DELTA_FORMAT = "streamrl-delta-2"


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
    frames = {
        str(number): delta.encode(bucket.of(base), bucket.of(data))
        for number, bucket in enumerate(layout.buckets)
    }
    metadata = {
        "format": _DELTA_FORMAT,
        "base": base_name,
        "checksums": checksums(_buckets(layout, data), key).hex(),
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
    after = file.metadata_bytes("checksums")
    for number, bucket in enumerate(layout.buckets):
        label = f"bucket {number} (from {bucket.slots[0].spec.name})"
        ours, target = bucket.of(base), bucket.of(into)
        expected = slice(number * SIZE, (number + 1) * SIZE)
        if str(number) in file:
            try:
                delta.decode(file.read(str(number)), ours, target)
            except ValueError as error:
                raise file.error(f"is corrupt in bucket {number}: {error}") from error
        elif target.data_ptr() != ours.data_ptr():
            target.copy_(ours)
        if checksum(f"result {number}", target, key) != after[expected]:
            raise file.error(f"does not give the sender's bytes: {label} differs")


def _buckets(layout: Layout, data: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Each bucket's bytes, under a name that is not that of another one."""
    return ((f"result {i}", bucket.of(data)) for i, bucket in enumerate(layout.buckets))


log = logging.getLogger(__name__)

_NEWEST = 2
"""Versions whose files stay in any case."""


def version_name(learner_id: str, version: int) -> str:
    """The name of a version in files and as a base; sorted as the versions are."""
    return f"{learner_id}-{version:08d}"


class FileSender:
    """The sender's files of one learner; calls from several threads take turns. `secret` is what
    the keys of the versions' checksums are made from."""

    def __init__(
        self,
        settings: WeightSettings,
        layout: Layout,
        folder: Path,
        learner_id: str,
        secret: bytes,
    ) -> None:
        self._settings = settings
        self._layout = layout
        self._folder = folder
        self._learner_id = learner_id
        self._secret = secret
        self._written: int | None = None
        self._base: tuple[int, torch.Tensor] | None = None
        self._before: int | None = None
        self._lock = threading.Lock()
        self._num_deltas = 0
        self._failed: frozenset[str] = frozenset()
        self._offered: dict[str, tuple[Path, float]] = {}

    async def offer(
        self, version: int, data: torch.Tensor, held: Mapping[str, int]
    ) -> dict[str, FilesEndpoint]:
        """`write` in a thread; {} if the file cannot be written.

        Waits for the file system without a limit, and logs a warning every `deadline_s`.
        """
        start = time.monotonic()
        writing = asyncio.ensure_future(asyncio.to_thread(self.write, version, data, held))
        while not (await asyncio.wait([writing], timeout=self._settings.deadline_s))[0]:
            waited_s = time.monotonic() - start
            log.warning("version %d: its file is not written after %.0f s", version, waited_s)
        try:
            return await writing
        except OSError as error:
            log.error("version %d: its file cannot be written: %s", version, error)
            return {}

    def write(
        self, version: int, data: torch.Tensor, held: Mapping[str, int]
    ) -> dict[str, FilesEndpoint]:
        """The file that each receiver is to read, by name of the receiver.

        `data` [layout.num_bytes] uint8 is the version; `held` is the version of this learner that
        each receiver has, -1 for none.
        """
        with self._lock:
            return self._write(version, data.cpu(), held)

    def on_answers(self, loaded: set[str], failed: set[str]) -> None:
        """Note which receivers have answered, and remove the files that nobody needs."""
        with self._lock:
            self._failed = (self._failed | failed) - loaded
            now_s = time.monotonic()
            self._offered = {
                name: (path, until_s)
                for name, (path, until_s) in self._offered.items()
                if until_s > now_s and name not in loaded | failed
            }
            self._remove_unneeded()

    def close(self) -> None:
        """Remove what this learner has written: nobody is told of it any more."""
        with self._lock:
            for path in self._folder.glob(f"{self._learner_id}-*.safetensors*"):
                _remove(path)

    def _write(
        self, version: int, data: torch.Tensor, held: Mapping[str, int]
    ) -> dict[str, FilesEndpoint]:
        by_delta = {name for name, has in held.items() if self._takes_delta(name, has, version)}
        whole = self._path(version, "")
        paths = {name: whole for name in held}
        if by_delta:
            paths |= dict.fromkeys(by_delta, self._delta_to(version, data))
        if whole in paths.values() and not self._is_written(version, held):
            write_whole(whole, self._layout, data, self._key(version))
            self._written = version
        if self._settings.delta:
            self._keep(version, data, is_delta=bool(by_delta))
        until_s = time.monotonic() + 2 * self._settings.deadline_s
        offered = {name: (path, until_s) for name, path in paths.items()}
        self._offered = {**self._offered, **offered}
        return {
            name: FilesEndpoint(
                path=str(path.resolve()),
                bucket_bytes=self._layout.bucket_bytes,
                is_base=self._settings.delta,
            )
            for name, path in paths.items()
        }

    def _is_written(self, version: int, held: Mapping[str, int]) -> bool:
        """Whether the whole file is there, and none of these receivers has found it damaged."""
        is_there = self._written == version and self._path(version, "").exists()
        return is_there and not self._failed & held.keys()

    def _remove_unneeded(self) -> None:
        ours = self._folder.glob(f"{self._learner_id}-*.safetensors")
        newest = sorted({path.name.split(".")[0] for path in ours})[-_NEWEST:]
        offered = {path for path, _ in self._offered.values()}
        for path in self._folder.glob("*.safetensors*"):
            if path.name.split(".")[0] not in newest and path not in offered:
                _remove(path)

    def _takes_delta(self, name: str, has: int, version: int) -> bool:
        if self._base is None or name in self._failed:
            return False
        if self._base[0] == version:
            return has == self._before
        return has == self._base[0] and self._num_deltas < self._settings.full_every

    def _delta_to(self, version: int, data: torch.Tensor) -> Path:
        """Written in the first update that needs it; a later one finds the file."""
        assert self._base is not None, "no receiver takes a difference to nothing"
        before, base = self._base
        path = self._path(version, ".delta")
        if before != version:
            key = self._key(version)
            write_delta(path, self._layout, base, data, self._name(before), key)
        return path

    def _keep(self, version: int, data: torch.Tensor, *, is_delta: bool) -> None:
        if self._base is None:
            self._base = (version, data.clone())
        elif self._base[0] != version:
            self._num_deltas = self._num_deltas + 1 if is_delta else 0
            self._before = self._base[0] if is_delta else None
            self._base[1].copy_(data)
            self._base = (version, self._base[1])

    def _path(self, version: int, kind: str) -> Path:
        return self._folder / f"{self._name(version)}{kind}.safetensors"

    def _name(self, version: int) -> str:
        return version_name(self._learner_id, version)

    def _key(self, version: int) -> bytes:
        return version_key(self._secret, self._name(version))


def _remove(path: Path) -> None:
    """What cannot be removed stays, and is tried again with the next answer."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s cannot be removed: %s", path, error.strerror)


class FileReader:
    """A receiver's end. Keeps the bytes of the last file if the next may be a difference to it."""

    def __init__(self) -> None:
        self._base: tuple[str, torch.Tensor] | None = None

    def tensors(
        self,
        endpoint: FilesEndpoint,
        manifest: tuple[TensorSpec, ...],
        name: str,
        landing: torch.Tensor | None,
        key: bytes,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor by name; `name` is the version's, from `version_name`, and `key` that of its
        checksums.

        Raises:
            WeightTransferError: the file or the base it changes is not what the sender had.
        """
        layout = Layout(manifest, endpoint.bucket_bytes)
        whole = landing if landing is not None and landing.device.type == "cpu" else None
        base, self._base = self._base, None
        with TensorFile(Path(endpoint.path)) as file:
            if is_delta(file):
                if base is None or base[0] != file.metadata("base"):
                    has = base[0] if base else "nothing"
                    raise file.error(f"changes {file.metadata('base')}, but here is {has}")
                whole = base[1] if whole is None else whole
                apply_delta(file, layout, base[1], whole, key)
                yield from ((s.spec.name, s.read(s.of(whole))) for s in layout.slots)
            else:
                if endpoint.is_base and whole is None:
                    whole = torch.zeros(layout.num_bytes, dtype=torch.uint8)
                yield from read_whole(file, layout, whole, key)
        if endpoint.is_base and whole is not None:
            self._base = (name, whole)
