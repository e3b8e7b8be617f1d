"""Weights through a shared file system: whole files, and differences to the last one
(`streamrl.weights.transports.differences`).

    whole   plain safetensors under the parameters' own names, with one checksum per tensor
    delta   one compressed difference per bucket; buckets without a difference are
            left out. The metadata name the base and have the checksums of the result, per bucket

Invariant: a reader sees complete files only, and its file stays until it has answered or two
deadlines have passed. A checksum covers every byte that is handed on; its key is not in the file,
so who changes the file cannot change it along. Files are readable by their owner alone, in a folder
that nobody else may enter.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from streamrl.config.weights import WeightSettings
from streamrl.types import FilesEndpoint
from streamrl.weights.layout import Layout
from streamrl.weights.transports import tensor_file
from streamrl.weights.transports.checksums import checksum, checksums, require_equal
from streamrl.weights.transports.differences import Difference, SentVersion
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
    file: TensorFile, layout: Layout, key: bytes, landing: torch.Tensor | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor by name: in `landing` [layout.num_bytes] uint8, if that is in host memory, or in
    memory of its own.

    Raises:
        WeightTransferError: the file lacks a tensor, or has it in another shape or with other bits
            than the sender; the latter is known after the last tensor.
    """
    in_place = landing is not None and landing.device.type == "cpu"
    received = []
    for slot in layout.slots:
        if landing is not None and in_place:
            raw = slot.of(landing)
        else:
            raw = torch.zeros(slot.num_bytes, dtype=torch.uint8)
        for name, array in slot.arrays(raw).items():
            file.read_into(name, array)
        received.append(checksum(slot.spec.name, raw, key))
        yield slot.spec.name, slot.read(raw)
    sent = file.metadata_bytes("checksums")
    require_equal(layout.names, sent, b"".join(received), file.path)


def write_delta(path: Path, difference: Difference) -> None:
    metadata = {
        "format": _DELTA_FORMAT,
        "base": difference.base,
        "checksums": difference.checksums.hex(),
    }
    frames = enumerate(difference.frames)
    differing = {str(number): frame for number, frame in frames if frame is not None}
    tensor_file.write(path, differing, metadata)


def is_delta(file: TensorFile) -> bool:
    return file.metadata("format") == _DELTA_FORMAT


def read_delta(file: TensorFile, layout: Layout) -> Difference:
    """
    Raises:
        WeightTransferError: the file does not have what a difference has.
    """
    names = map(str, range(len(layout.buckets)))
    frames = tuple(file.read(name) if name in file else None for name in names)
    return Difference(file.metadata("base") or "", frames, file.metadata_bytes("checksums"))


log = logging.getLogger(__name__)

RETRY_S = 2.0
MAX_RETRY_S = 30.0
_NEWEST = 2
"""Versions whose files stay in any case."""


def version_name(learner_id: str, version: int) -> str:
    """The name of a version in files and as a base; sorted as the versions are."""
    return f"{learner_id}-{version:08d}"


class FileSender:
    """The sender's files of one learner; calls from several threads take turns. `key` is that of a
    version's checksums, and `sent` knows who takes a difference."""

    def __init__(
        self,
        settings: WeightSettings,
        layout: Layout,
        folder: Path,
        learner_id: str,
        key: Callable[[int], bytes],
        sent: SentVersion,
    ) -> None:
        self._settings = settings
        self._layout = layout
        self._folder = folder
        self._learner_id = learner_id
        self._key = key
        self._sent = sent
        self._written: int | None = None
        self._lock = threading.Lock()
        self._offered: dict[str, tuple[Path, float]] = {}
        self.failure = ""
        """Why the last file is not written; "" if it is."""
        self._failed_version = -1
        self._wait_s = self._retried_s = 0.0

    async def offer(
        self, version: int, data: torch.Tensor, held: Mapping[str, int]
    ) -> dict[str, FilesEndpoint]:
        """`write` in a thread; {} if the file cannot be written, or could not a moment ago.

        Waits for the file system without a limit, and logs a warning every `deadline_s`. A disk
        that does not take the file is tried again after RETRY_S, then less and less often.
        """
        start = time.monotonic()
        if start < self._retried_s:
            return {}
        writing = asyncio.ensure_future(asyncio.to_thread(self.write, version, data, held))
        while not (await asyncio.wait([writing], timeout=self._settings.deadline_s))[0]:
            waited_s = time.monotonic() - start
            log.warning("version %d: its file is not written after %.0f s", version, waited_s)
        try:
            endpoints = await writing
        except OSError as error:
            self._wait_s = min(2 * self._wait_s or RETRY_S, MAX_RETRY_S)
            self._retried_s = time.monotonic() + self._wait_s
            if not self.failure:
                log.error("version %d: its file cannot be written: %s", version, error)
            self.failure = f"the weights' file cannot be written: {error}"
            self._failed_version = version
            return {}
        if self.failure:
            log.info("version %d: its file is written again", version)
        self.failure, self._wait_s = "", 0.0
        return endpoints

    def write(
        self, version: int, data: torch.Tensor, held: Mapping[str, int]
    ) -> dict[str, FilesEndpoint]:
        """The file that each receiver is to read, by name of the receiver.

        `data` [layout.num_bytes] uint8 is the version; `held` is the version of this learner that
        each receiver has, -1 for none.
        """
        data = data.cpu()
        whole, changes = self._path(version, ""), self._path(version, ".delta")
        with self._lock:
            difference, takers = self._sent.difference_to(version, data, held)
            paths = {name: changes if name in takers else whole for name in held}
            if difference and takers and not changes.exists():
                write_delta(changes, difference)
            if whole in paths.values() and not self._is_written(version, held):
                write_whole(whole, self._layout, data, self._key(version))
                self._written = version
            until_s = time.monotonic() + 2 * self._settings.deadline_s
            self._offered |= {name: (path, until_s) for name, path in paths.items()}
        return {
            name: FilesEndpoint(
                path=str(path.resolve()),
                bucket_bytes=self._layout.bucket_bytes,
                is_base=self._settings.delta,
            )
            for name, path in paths.items()
        }

    def on_unneeded(self, version: int) -> None:
        """Nobody is to read a file of the version: a failure to write an older one is over."""
        if version > self._failed_version:
            self.failure = ""
            self._wait_s = self._retried_s = 0.0

    def on_answers(self, loaded: set[str], failed: set[str]) -> None:
        """Note which receivers have answered, and remove the files that nobody needs."""
        self._sent.on_answers(loaded, failed)
        with self._lock:
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

    def _is_written(self, version: int, held: Mapping[str, int]) -> bool:
        """Whether the whole file is there, and none of these receivers has found it damaged."""
        is_there = self._written == version and self._path(version, "").exists()
        return is_there and not self._sent.failed & held.keys()

    def _remove_unneeded(self) -> None:
        ours = self._folder.glob(f"{self._learner_id}-*.safetensors")
        newest = sorted({path.name.split(".")[0] for path in ours})[-_NEWEST:]
        offered = {path for path, _ in self._offered.values()}
        for path in self._folder.glob("*.safetensors*"):
            if path.name.split(".")[0] not in newest and path not in offered:
                _remove(path)

    def _path(self, version: int, kind: str) -> Path:
        return self._folder / f"{version_name(self._learner_id, version)}{kind}.safetensors"


def _remove(path: Path) -> None:
    """What cannot be removed stays, and is tried again with the next answer."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s cannot be removed: %s", path, error.strerror)
