"""The payloads of a journal: append-only files, `payloads/NUMBER.segment`, beside its ledger.

A segment is the payloads end to end. The ledger's row of a group has the place and the checksum of
its payload, so what no row names (the torn end of a write) is never read.

Invariant: `write` puts a payload into a file before the transaction that names it; `settle` deletes
a file after the transaction in which the last row that named it is gone. A transaction that failed
is followed by `discard`. A restart begins a new segment and deletes those that no row names.
Segments are never compacted: groups leave a buffer about in the order in which they came, so the
files are about as large as what waits, and SEGMENT_BYTES.
"""

import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import NamedTuple, TypeAlias, TypeVar

import xxhash

from streamrl.durable_files import sync
from streamrl.errors import StorageError

log = logging.getLogger(__name__)

Key = TypeVar("Key")
Payload: TypeAlias = bytes | memoryview
# Small enough to be deleted before the kernel writes it out, while groups come and go.
SEGMENT_BYTES = 16 * 2**20


class PayloadPlace(NamedTuple):
    """Where a payload is: its segment, first byte and size there, and its checksum (xxh3-64)."""

    segment: int
    position: int
    num_bytes: int
    checksum: bytes


class Segments:
    """The segments of one folder, which nobody else writes."""

    def __init__(self, folder: Path, *, is_synced: bool) -> None:
        """`is_synced`: `write` returns only when the disk has the payloads."""
        self._folder = folder
        self._is_synced = is_synced
        self._num_live: Counter[int] = Counter()
        self._number = 0
        self._end = 0
        self._file: int | None = None

    def recover(self, places: Mapping[Key, PayloadPlace]) -> dict[Key, bytes]:
        """The payloads by key, without those that are missing or damaged.

        Deletes the segments of which nothing is left.

        Raises:
            StorageError: a segment is there and cannot be read.
        """
        found = (path.stem for path in self._folder.glob("*.segment"))
        numbers = {int(stem) for stem in found if stem.isdecimal()}
        payloads: dict[Key, bytes] = {}
        in_order = sorted(places.items(), key=lambda item: item[1][:2])
        for number, of_one in groupby(in_order, key=lambda item: item[1].segment):
            payloads.update(self._read(number, of_one))
        self._num_live = Counter(places[key].segment for key in payloads)
        self._number = max([0, *numbers, *(place.segment for place in places.values())])
        for number in numbers - self._num_live.keys():
            self._delete(number)
        return payloads

    def write(self, payloads: Sequence[Payload]) -> list[PayloadPlace]:
        """Append the payloads, in one segment; `settle` or `discard` must follow.

        Raises:
            StorageError: nothing was written.
        """
        if not payloads:
            return []
        try:
            file = self._create() if self._file is None else self._file
            places = self._append(file, payloads)
            if self._is_synced:
                os.fdatasync(file)
        except OSError as error:
            self.discard()
            place = f"the journal {self._folder}"
            raise StorageError(f"{place} cannot be written: {error}") from error
        return places

    def settle(self, added: Iterable[PayloadPlace], freed: Iterable[PayloadPlace]) -> None:
        """A transaction that names `added`, and no longer `freed`, is committed."""
        for place in added:
            self._num_live[place.segment] += 1
            self._end = place.position + place.num_bytes
        emptied = set()
        for place in freed:
            self._num_live[place.segment] -= 1
            if not self._num_live[place.segment]:
                emptied.add(place.segment)
        if self._end >= SEGMENT_BYTES or self._number in emptied:
            self.close()
        for number in emptied:
            self._delete(number)

    def discard(self) -> None:
        """Free what was written since the last `settle`; its segment ends there."""
        if self._file is None:
            return
        with suppress(OSError):
            os.ftruncate(self._file, self._end)
        self.close()
        if not self._num_live[self._number]:
            self._delete(self._number)

    def close(self) -> None:
        if self._file is None:
            return
        file, self._file = self._file, None
        try:
            os.close(file)
        except OSError as error:
            # A network file system writes late, and says here that it is full; a restart finds what
            # is missing by its checksum.
            log.warning("a segment may lack its last payloads: %s", error)

    def _create(self) -> int:
        self._folder.mkdir(exist_ok=True)
        self._number += 1
        self._end = 0
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        file = self._file = os.open(self._path(self._number), flags, 0o666)
        if self._is_synced:
            sync(self._folder)
            sync(self._folder.parent)
        return file

    def _append(self, file: int, payloads: Sequence[Payload]) -> list[PayloadPlace]:
        places, position = [], self._end
        for payload in payloads:
            checksum = xxhash.xxh3_64_digest(payload)
            places.append(PayloadPlace(self._number, position, len(payload), checksum))
            rest = memoryview(payload)
            while rest:
                num_written = os.pwrite(file, rest, position)
                position += num_written
                rest = rest[num_written:]
        return places

    def _read(
        self, number: int, places: Iterable[tuple[Key, PayloadPlace]]
    ) -> Iterator[tuple[Key, bytes]]:
        """Those of one segment that are what was written."""
        path = self._path(number)
        try:
            with path.open("rb") as file:
                for key, place in places:
                    payload = os.pread(file.fileno(), place.num_bytes, place.position)
                    if xxhash.xxh3_64_digest(payload) == place.checksum:
                        yield key, payload
        except FileNotFoundError:
            return
        except OSError as error:
            raise StorageError(f"the journal {path} cannot be read: {error}") from error

    def _delete(self, number: int) -> None:
        self._num_live.pop(number, None)
        try:
            self._path(number).unlink(missing_ok=True)
        except OSError as error:
            log.warning("a segment is left over: %s", error)

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:08d}.segment"
