"""Versions as differences to the version before, whatever takes them, and what a sender keeps.

A receiver that has the version before gets the difference to it; one that has not, or that failed,
gets a whole version, and so does everyone after `weights.full_every` differences.

A difference has one compressed frame per bucket (`streamrl.weights.transports.difference_codec`),
none where the bucket is the same, and the checksums of the result, per bucket: it counts as applied
only after those matched, which with another base they do not.
"""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch

from streamrl.config.weights import WeightSettings
from streamrl.errors import WeightTransferError
from streamrl.weights.layout import Bucket, Layout
from streamrl.weights.transports import difference_codec
from streamrl.weights.transports.checksums import SIZE, checksum

MAX_THREADS = 4
"""Buckets that are compared, or changed, at a time."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class Difference:
    """What turns the version with the name `base` into another one: for each bucket a flat uint8
    frame in host memory, or None, and SIZE bytes of `checksums` of the result."""

    base: str
    frames: tuple[torch.Tensor | None, ...]
    checksums: bytes

    @classmethod
    def between(
        cls, layout: Layout, base_name: str, base: torch.Tensor, data: torch.Tensor, key: bytes
    ) -> "Difference":
        """What turns `base` into `data`, both [layout.num_bytes] uint8."""

        def encoded(number: int, bucket: Bucket) -> tuple[torch.Tensor | None, bytes]:
            result = bucket.of(data)
            return difference_codec.encode(bucket.of(base), result), _checksum(number, result, key)

        pairs = _of_each(encoded, layout)
        sums = b"".join(one for _, one in pairs)
        return cls(base_name, tuple(frame for frame, _ in pairs), sums)

    @property
    def num_bytes(self) -> int:
        """Of the frames."""
        return sum(len(frame) for frame in self.frames if frame is not None)

    def apply(
        self, layout: Layout, base: torch.Tensor, into: torch.Tensor, key: bytes, source: object
    ) -> None:
        """Fill `into` with the version this makes of `base`; they may be the same memory.

        Raises:
            WeightTransferError: base, `source` or result is not what the sender had; `into` is
                undefined.
        """
        if len(self.frames) != len(layout.buckets):
            raise _error(source, f"has {len(self.frames)} frames for {len(layout.buckets)} buckets")

        def applied(number: int, bucket: Bucket) -> None:
            ours, target, frame = bucket.of(base), bucket.of(into), self.frames[number]
            if frame is not None:
                try:
                    difference_codec.decode(frame, ours, target)
                except ValueError as error:
                    raise _error(source, f"is corrupt in bucket {number}: {error}") from error
            elif target.data_ptr() != ours.data_ptr():
                target.copy_(ours)
            expected = self.checksums[number * SIZE : (number + 1) * SIZE]
            if _checksum(number, target, key) != expected:
                label = f"bucket {number} (from {bucket.slots[0].spec.name})"
                raise _error(source, f"does not give the sender's bytes: {label} differs")

        _of_each(applied, layout)


def _of_each(work: Callable[[int, Bucket], Result], layout: Layout) -> list[Result]:
    """What it returns for each bucket; several at a time, since most of it holds no lock."""
    with ThreadPoolExecutor(MAX_THREADS) as pool:
        return list(pool.map(work, range(len(layout.buckets)), layout.buckets))


def _checksum(number: int, result: torch.Tensor, key: bytes) -> bytes:
    """Of a bucket's bytes, under a name that is not that of another one."""
    return checksum(f"result {number}", result, key)


def _error(source: object, what: str) -> WeightTransferError:
    return WeightTransferError(f"cannot read weights from {source}: it {what}")


class SentVersion:
    """A sender's: the version that receivers were given last, and the difference that led to it.

    `name` and `key` are those of a version by its number. Calls take turns.
    """

    def __init__(
        self,
        settings: WeightSettings,
        layout: Layout,
        name: Callable[[int], str],
        key: Callable[[int], bytes],
    ) -> None:
        self._settings = settings
        self._layout = layout
        self._name = name
        self._key = key
        self._lock = threading.Lock()
        self._kept: tuple[int, torch.Tensor] | None = None
        self._before = -1
        self._difference: Difference | None = None
        self._num_differences = 0
        self.failed: frozenset[str] = frozenset()
        """Receivers that are given no difference before they have loaded a version again."""
        self.gauges: Mapping[str, float] = {}

    def difference_to(
        self, version: int, data: torch.Tensor, held: Mapping[str, int]
    ) -> tuple[Difference | None, frozenset[str]]:
        """The difference to `data` [layout.num_bytes] uint8, and the receivers that are to get it;
        None and nobody if all are to get the whole version. `held` is the version of this learner
        that each receiver has, -1 for none. It is computed once."""
        if not self._settings.delta:
            return None, frozenset()
        with self._lock:
            data = data.cpu()
            sound = {name: has for name, has in held.items() if name not in self.failed}
            if self._kept is None:
                self._kept = (version, data.clone())
            elif self._kept[0] != version:
                self._follow(version, data, *self._kept, is_wanted=self._kept[0] in sound.values())
            if self._difference is None:
                return None, frozenset()
            takers = frozenset(name for name, has in sound.items() if has == self._before)
            return self._difference, takers

    def on_answers(self, loaded: set[str], failed: set[str]) -> None:
        with self._lock:
            self.failed = (self.failed | failed) - loaded

    def _follow(
        self, version: int, data: torch.Tensor, before: int, base: torch.Tensor, *, is_wanted: bool
    ) -> None:
        is_due = self._num_differences >= self._settings.full_every
        self._before, self._difference = before, None
        if is_wanted and not is_due:
            name, key = self._name(before), self._key(version)
            self._difference = Difference.between(self._layout, name, base, data, key)
            self.gauges = {"difference_bytes": float(self._difference.num_bytes)}
        self._num_differences = self._num_differences + 1 if self._difference else 0
        self._kept = (version, base.copy_(data))
