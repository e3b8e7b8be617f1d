"""Weights through a shared file system, both ends: whole files, and differences to the last one.

A whole file is plain safetensors under the parameters' own names. With `weights.delta` a receiver
that holds the version before gets only what differs (`codecs.delta`); whoever does not,
or failed, gets a whole file, and so does everyone after `weights.full_every` differences.

Invariant: a reader meets complete files only, and its file stays until it has answered or two
deadlines have passed. A checksum covers every byte that is handed on.
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
from streamrl.weights.codecs import delta
from streamrl.weights.codecs.checksums import checksum, checksums, require_equal
from streamrl.weights.layout import Layout
from streamrl.weights.transports import tensor_file
from streamrl.weights.transports.tensor_file import TensorFile

log = logging.getLogger(__name__)

_NEWEST = 2
"""Versions whose files stay in any case."""


def version_name(history: str, version: int) -> str:
    """What files and bases are called by; sorted as the versions are."""
    return f"{history}-{version:08d}"


class FileSender:
    """The sender's files of one learner life; calls from several threads take turns."""

    def __init__(
        self, settings: WeightSettings, layout: Layout, folder: Path, history: str
    ) -> None:
        self._settings = settings
        self._layout = layout
        self._folder = folder
        self._history = history
        self._base: tuple[int, torch.Tensor] | None = None
        self._before: int | None = None
        self._lock = threading.Lock()
        self._num_deltas = 0
        self._failed: frozenset[str] = frozenset()
        self._offered: dict[str, tuple[Path, float]] = {}

    async def offer(
        self, version: int, data: torch.Tensor, held: Mapping[str, int]
    ) -> dict[str, FilesEndpoint]:
        """`write` in a thread; {} if the disk takes no file.

        Waits for the file system as long as it takes, and says so each `deadline_s`.
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
        """The file each receiver is to read; `held` says which version of this life it has."""
        with self._lock:
            return self._write(version, data.cpu(), held)

    def answered(self, loaded: set[str], failed: set[str]) -> None:
        """Note who is done with its file, and remove the files that nobody needs."""
        with self._lock:
            self._answered(loaded, failed)

    def _write(
        self, version: int, data: torch.Tensor, held: Mapping[str, int]
    ) -> dict[str, FilesEndpoint]:
        by_delta = {name for name, has in held.items() if self._takes_delta(name, has, version)}
        whole = self._path(version, "")
        paths = {name: whole for name in held}
        if by_delta:
            paths |= dict.fromkeys(by_delta, self._delta_to(version, data))
        if whole in paths.values():
            _write_whole(whole, self._layout, data)
        if self._settings.delta:
            self._keep(version, data, is_delta=bool(by_delta))
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

    def _answered(self, loaded: set[str], failed: set[str]) -> None:
        self._failed = (self._failed | failed) - loaded
        now_s = time.monotonic()
        self._offered = {
            name: (path, until_s)
            for name, (path, until_s) in self._offered.items()
            if until_s > now_s and name not in loaded | failed
        }
        ours = self._folder.glob(f"{self._history}-*.safetensors")
        versions = sorted({path.name.split(".")[0] for path in ours})[-_NEWEST:]
        read = {path for path, _ in self._offered.values()}
        for path in self._folder.glob("*.safetensors*"):
            if path.name.split(".")[0] not in versions and path not in read:
                path.unlink(missing_ok=True)

    def _takes_delta(self, name: str, has: int, version: int) -> bool:
        if self._base is None or name in self._failed:
            return False
        if self._base[0] == version:
            return has == self._before
        return has == self._base[0] and self._num_deltas < self._settings.full_every

    def _delta_to(self, version: int, data: torch.Tensor) -> Path:
        """Written for the first who take it; those a round later find it there."""
        assert self._base is not None, "nobody takes a difference to nothing"
        before, base = self._base
        path = self._path(version, ".delta")
        if before != version:
            delta.write(path, self._layout, base, data, self._name(before))
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
        return version_name(self._history, version)


class FileReader:
    """A receiver's end. Holds the bytes of the last file where the next may be a difference."""

    def __init__(self) -> None:
        self._base: tuple[str, torch.Tensor] | None = None

    def tensors(
        self,
        endpoint: FilesEndpoint,
        manifest: tuple[TensorSpec, ...],
        name: str,
        landing: torch.Tensor | None,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor by name; `name` is the version's, as `version_name` makes it.

        Raises:
            WeightTransferError: the file or the base it changes is not what the sender had.
        """
        layout = Layout(manifest, endpoint.bucket_bytes)
        whole = landing if landing is not None and landing.device.type == "cpu" else None
        base, self._base = self._base, None
        with TensorFile(Path(endpoint.path)) as file:
            if file.about("format") == delta.FORMAT:
                if base is None or base[0] != file.about("base"):
                    has = base[0] if base else "nothing"
                    raise file.error(f"changes {file.about('base')}, but here is {has}")
                whole = base[1] if whole is None else whole
                delta.apply(file, layout, base[1], whole)
                yield from ((s.spec.name, s.read(s.of(whole))) for s in layout.slots)
            else:
                if endpoint.is_base and whole is None:
                    whole = torch.zeros(layout.num_bytes, dtype=torch.uint8)
                yield from _read_whole(file, layout, whole)
        if endpoint.is_base and whole is not None:
            self._base = (name, whole)


def _write_whole(path: Path, layout: Layout, data: torch.Tensor) -> None:
    tensors = {
        name: array for slot in layout.slots for name, array in slot.arrays(slot.of(data)).items()
    }
    about = {"format": "pt", "checksums": checksums(layout.slots, data).hex()}
    tensor_file.write(path, tensors, about)


def _read_whole(
    file: TensorFile, layout: Layout, whole: torch.Tensor | None
) -> Iterator[tuple[str, torch.Tensor]]:
    received = []
    for slot in layout.slots:
        raw = torch.zeros(slot.num_bytes, dtype=torch.uint8) if whole is None else slot.of(whole)
        for name, array in slot.arrays(raw).items():
            file.read_into(name, array)
        received.append(checksum(raw))
        yield slot.spec.name, slot.read(raw)
    if file.about("checksums") is not None:
        require_equal(layout.slots, file.bytes_about("checksums"), b"".join(received), file.path)
