"""Weights through an object store, both ends: `weights.store`, by fsspec.

    STORE/RUN/LEARNER-00000007.whole.safetensors    a version (`streamrl.weights.transports.files`)
    STORE/RUN/LEARNER-00000008.delta.safetensors    the difference to the version before it there
    STORE/RUN/newest.json                           the manifest: the last whole version, and the
                                                    differences from there to the newest, in order

The learner writes the newest version as soon as the last one is in the store; versions in between
are left out. A chain of differences ends, and a whole version begins the next one, after
`weights.full_every` of them, when together they would have more bytes than it, and when a learner
starts. A reader that has a version of the chain takes the differences after it; any other takes the
whole version and all after it. One that computes another checksum does so, too.

Invariants: an object is in the manifest only after all of it is in the store, and the manifest is
exchanged as one; what is damaged all the same has another checksum, so a reader either has exactly
the sender's bits or the weights it had before. The objects of the manifest's chain and of the chain
before it are there; older ones are deleted once the manifest of a new chain is written, so a reader
has the time of a whole chain for what it reads.

The keys of the checksums are in the manifest: they find errors, and who may write to the store may
change the weights.
"""

import logging
import os
import re
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
import torch
from msgspec import Meta, Struct

from streamrl.config.weights import WeightSettings
from streamrl.errors import ConfigError, WeightTransferError
from streamrl.object_store import StoreFolder
from streamrl.types import SharedEndpoint, TensorSpec, WeightUpdate
from streamrl.types.ranges import Count, PolicyVersion
from streamrl.weights.layout import Layout
from streamrl.weights.transports.checksums import version_key
from streamrl.weights.transports.differences import Difference
from streamrl.weights.transports.files import (
    read_delta,
    read_whole,
    version_name,
    write_delta,
    write_whole,
)
from streamrl.weights.transports.shared_memory import STAMP_BYTES, make_on_host
from streamrl.weights.transports.tensor_file import TensorFile

log = logging.getLogger(__name__)

RETRY_S = 5.0
"""Between two tries to write to a store that has refused."""
_MANIFEST = "newest.json"
_OBJECT = re.compile(r"[0-9A-Za-z_-]+-\d{8,}\.(whole|delta)\.safetensors")
_FORMAT = 1
_PAGE = 4096


class StoredVersion(Struct, frozen=True, kw_only=True):
    """An object of the store; `key` is that of its checksums."""

    policy_version: PolicyVersion
    is_delta: bool
    num_bytes: Count
    key: bytes


class StoreManifest(Struct, frozen=True, kw_only=True):
    """The newest version of the learner that has written it is the last of `chain`, whose first is
    a whole one."""

    format: Annotated[int, Meta(ge=_FORMAT, le=_FORMAT)] = _FORMAT
    learner_id: Annotated[str, Meta(pattern=r"^[0-9A-Za-z_-]{1,64}$")]
    tensors: tuple[TensorSpec, ...]
    bucket_bytes: Count
    chain: Annotated[tuple[StoredVersion, ...], Meta(min_length=1)]

    def name_of(self, stored: StoredVersion) -> str:
        kind = "delta" if stored.is_delta else "whole"
        return f"{version_name(self.learner_id, stored.policy_version)}.{kind}.safetensors"

    @property
    def names(self) -> set[str]:
        """Of the objects that a reader of this manifest may need."""
        return {self.name_of(stored) for stored in self.chain}


class ObjectStore(StoreFolder):
    """The run's folder in `weights.store`."""

    failure = WeightTransferError

    def __init__(self, url: str, run: str) -> None:
        super().__init__("weights.store", f"{url.rstrip('/')}/{run}")

    def replace_manifest(self, manifest: StoreManifest) -> None:
        self.replace(_MANIFEST, msgspec.json.encode(manifest))

    def manifest(self) -> StoreManifest | None:
        """The newest; None if there is none yet."""
        try:
            content = self.read(_MANIFEST)
            return None if content is None else msgspec.json.decode(content, type=StoreManifest)
        except msgspec.MsgspecError as error:
            raise WeightTransferError(f"{self.url}/{_MANIFEST} is not readable: {error}") from error

    def names(self) -> set[str]:
        """Of the versions that are there."""
        return {name for name in super().names() if _OBJECT.fullmatch(name)}


class StoreSender:
    """The learner's end. Calls take turns; `folder` is for the object that is under way, and
    `survives` tells whether no other learner goes on with the run.

    Keeps a copy of the version that was stored last, which the next one is a difference to.
    """

    def __init__(
        self,
        settings: WeightSettings,
        store: ObjectStore,
        layout: Layout,
        folder: Path,
        learner_id: str,
        secret: bytes,
        survives: Callable[[], bool] = lambda: True,
    ) -> None:
        self._settings = settings
        self._survives = survives
        self._store = store
        self._layout = layout
        self._file = folder / "store" / "newest.safetensors"
        self._learner_id = learner_id
        self._secret = secret
        self._base: torch.Tensor | None = None
        self._manifest: StoreManifest | None = None
        self._before: set[str] = set()
        """The names of the chain before that of the manifest, which stay."""
        self._old: set[str] | None = None
        """Those of earlier learners and chains; None before the store was asked."""
        self._is_busy, self._retry_s = False, 0.0
        self._error = ""
        self._begun_s = 0.0
        self.gauges: dict[str, float] = {"num_store_failures": 0.0}

    @property
    def stored(self) -> int:
        """The version that is in the store; -1 for none of this learner."""
        return -1 if self._manifest is None else self._manifest.chain[-1].policy_version

    def wants(self, version: int) -> bool:
        """Whether to write this version now; not while another one is on its way."""
        return version != self.stored and not self._is_busy and not self.wait_s()

    def wait_s(self) -> float:
        """Until the store may be tried again."""
        return max(0.0, self._retry_s - time.monotonic())

    def sentence(self) -> str:
        """What the store has, for who looks at the run."""
        has = "no version yet" if self.stored < 0 else f"version {self.stored}"
        return f"{has} in {self._store.url}" + (f" ({self._error})" if self._error else "")

    def begin(self, version: int, data: torch.Tensor) -> StoredVersion | None:
        """Write the version [layout.num_bytes] uint8 to this machine's disk, from where it takes
        its way; None if it cannot be written."""
        self._is_busy, self._begun_s = True, time.perf_counter()
        try:
            return self._write(version, data.cpu())
        except OSError as error:
            self._fail(f"{self._file} cannot be written: {error}")
            return None

    def finish(self, stored: StoredVersion) -> None:
        """Take it to the store, then the manifest. What fails is logged, and tried again with the
        newest version then."""
        try:
            self._upload(stored)
        except (WeightTransferError, OSError) as error:
            self._fail(str(error))
            return
        if self._error:
            log.info("weights.store has version %d", stored.policy_version)
        self._is_busy, self._error = False, ""
        self.gauges = {
            **self.gauges,
            "store_s": time.perf_counter() - self._begun_s,
            "store_bytes": float(stored.num_bytes),
        }

    def _fail(self, reason: str) -> None:
        self._retry_s = time.monotonic() + RETRY_S
        self._is_busy, self._error = False, reason
        failures = self.gauges["num_store_failures"] + 1
        self.gauges = {**self.gauges, "num_store_failures": failures}
        log.warning("%s; generators that follow it keep the weights they have", reason)

    def _write(self, version: int, data: torch.Tensor) -> StoredVersion:
        key = version_key(self._secret, version_name(self._learner_id, version))
        is_delta = False
        if self._base is not None and self._manifest is not None:
            base_name = version_name(self._learner_id, self.stored)
            difference = Difference.between(self._layout, base_name, self._base, data, key)
            write_delta(self._file, difference)
            whole, *deltas = self._manifest.chain
            together = sum(delta.num_bytes for delta in deltas) + self._file.stat().st_size
            is_delta = len(deltas) < self._settings.full_every and together < whole.num_bytes
        if not is_delta:
            write_whole(self._file, self._layout, data, key)
        num_bytes = self._file.stat().st_size
        return StoredVersion(
            policy_version=version, is_delta=is_delta, num_bytes=num_bytes, key=key
        )

    def _upload(self, stored: StoredVersion) -> None:
        """Object, manifest, own copy, old objects, in this order."""
        if self._old is None:
            self._old = self._store.names()
            found = self._manifest_of_another()
            self._before = found.names if found else set()
        chain = self._chain() if stored.is_delta else ()
        manifest = StoreManifest(
            learner_id=self._learner_id,
            tensors=self._layout.manifest,
            bucket_bytes=self._layout.bucket_bytes,
            chain=(*chain, stored),
        )
        # Also where the manifest then seems not to be written: readers may have it.
        self._before = self._before | {manifest.name_of(stored)}
        self._require_surviving()
        self._store.put(self._file, manifest.name_of(stored))
        # An upload takes long.
        self._require_surviving()
        self._store.replace_manifest(manifest)
        if not stored.is_delta and self._manifest is not None:
            self._old |= self._before
            self._before = self._manifest.names
        self._manifest = manifest
        self._keep(stored)
        self._remove_old(manifest)

    def _require_surviving(self) -> None:
        """
        Raises:
            WeightTransferError: generators would wait with these weights, and another learner for
                their groups.
        """
        if not self._survives():
            raise WeightTransferError(
                f"weights.store {self._store.url}: another learner goes on with the run"
            )

    def _chain(self) -> tuple[StoredVersion, ...]:
        """What a difference follows.

        Raises:
            WeightTransferError: somebody has removed a part of it; the next version is whole.
        """
        assert self._manifest is not None, "a difference is to a version that is stored"
        if missing := self._manifest.names - self._store.names():
            self._base = None
            raise WeightTransferError(
                f"weights.store {self._store.url}: {min(missing)} was removed by another process"
            )
        return self._manifest.chain

    def _manifest_of_another(self) -> StoreManifest | None:
        """That of the learner before; one that cannot be read is replaced."""
        try:
            return self._store.manifest()
        except WeightTransferError as error:
            log.warning("%s", error)
            return None

    def _keep(self, stored: StoredVersion) -> None:
        """Do with the file what a reader does, so that the next difference is to what it has."""
        base, self._base = self._base, None
        if base is None:
            base = torch.zeros(self._layout.num_bytes, dtype=torch.uint8)
        read_into(self._file, self._layout, base, stored)
        self._base = base
        self._file.unlink(missing_ok=True)

    def _remove_old(self, manifest: StoreManifest) -> None:
        """What cannot be removed stays, and is tried again with the next version."""
        assert self._old is not None, "the store was asked before"
        self._old -= self._before | manifest.names
        for name in sorted(self._old):
            try:
                self._store.remove(name)
            except WeightTransferError as error:
                log.warning("%s cannot be removed: %s", name, error)
                return
            self._old = self._old - {name}


def read_into(file: Path, layout: Layout, base: torch.Tensor, stored: StoredVersion) -> None:
    """Turn `base` [layout.num_bytes] uint8 into the version that is in the file.

    Raises:
        WeightTransferError: it is not what the sender had; `base` is undefined.
    """
    size = os.path.getsize(file)
    if size != stored.num_bytes:
        raise WeightTransferError(f"{file} has {size} bytes, not {stored.num_bytes}")
    with TensorFile(file) as opened:
        if stored.is_delta:
            read_delta(opened, layout).apply(layout, base, base, stored.key, file)
        else:
            for _ in read_whole(opened, layout, stored.key, base):
                pass


class VersionMemory:
    """A version [layout.num_bytes] uint8 of weights that processes of this host can read, such as
    an engine's workers: `data`, zeros at first.

    Raises:
        ConfigError: this system has no such memory.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._memory, host = make_on_host(_PAGE + layout.num_bytes, self)
        if host is None:
            raise ConfigError(
                "weights.transport store: this system has no memory that other processes can open; "
                "use broadcast, or files"
            )
        self._host = host
        self._stamp = self._memory[:STAMP_BYTES].view(torch.int64)
        self.data = self._memory[_PAGE:]

    def change(self) -> torch.Tensor:
        """The memory, to be changed: who still reads it finds another stamp."""
        self._stamp[0] = secrets.randbits(63)
        return self.data

    def endpoint(self) -> SharedEndpoint:
        """Where the version is that is there now."""
        return SharedEndpoint(
            memory=self._host,
            start=_PAGE,
            stamps=self._host,
            stamp_at=0,
            stamp=int(self._stamp.item()),
            bucket_bytes=self.layout.bucket_bytes,
        )


class StoreReader:
    """A generator's end: the newest version of the store in memory. `folder` is for the objects,
    under a `name` that only this process uses."""

    def __init__(self, store: ObjectStore, folder: Path, name: str) -> None:
        self._store = store
        self._file = folder / f"{name}.safetensors"
        self._memory: VersionMemory | None = None
        self._has: StoreManifest | None = None
        """The manifest whose newest version is in the memory, to its last bit."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def newest(self, known: tuple[str, int] | None) -> WeightUpdate | None:
        """The newest version, to be loaded before the next call; None if there is none, or if it is
        the `known` learner's version. Waits for the store.

        Raises:
            WeightTransferError: it cannot be read, or is not what the sender had.
        """
        manifest = self._store.manifest()
        if manifest is None:
            return None
        last = manifest.chain[-1]
        if known == (manifest.learner_id, last.policy_version):
            return None
        layout = Layout(manifest.tensors, manifest.bucket_bytes)
        if self._memory is None or self._memory.layout != layout:
            self._memory, self._has = VersionMemory(layout), None
        try:
            self._read(manifest, self._memory)
        except OSError as error:
            raise WeightTransferError(f"{error.filename}: {error.strerror or error}") from error
        return WeightUpdate(
            policy_version=last.policy_version,
            learner_id=manifest.learner_id,
            manifest=manifest.tensors,
            endpoint=self._memory.endpoint(),
            key=last.key,
        )

    def forget(self) -> None:
        """Take a whole version next: what was read could not be loaded."""
        self._has = None

    def _read(self, manifest: StoreManifest, memory: VersionMemory) -> None:
        """By the differences to what is here if they lead there, else from the whole version."""
        has, self._has = self._has, None
        rest = None if has is None else _after(has, manifest)
        try:
            self._apply(manifest, manifest.chain if rest is None else rest, memory)
        except WeightTransferError as error:
            if rest is None:
                raise
            log.warning("%s; taking the whole version", error)
            self._apply(manifest, manifest.chain, memory)
        self._has = manifest

    def _apply(
        self, manifest: StoreManifest, chain: tuple[StoredVersion, ...], memory: VersionMemory
    ) -> None:
        for stored in chain:
            self._store.get(manifest.name_of(stored), self._file)
            read_into(self._file, memory.layout, memory.change(), stored)
        self._file.unlink(missing_ok=True)


def _after(has: StoreManifest, newest: StoreManifest) -> tuple[StoredVersion, ...] | None:
    """What leads from the last version of one to that of the other; None if nothing does."""
    last = has.chain[-1]
    if has.learner_id != newest.learner_id or last not in newest.chain:
        return None
    return newest.chain[newest.chain.index(last) + 1 :]
