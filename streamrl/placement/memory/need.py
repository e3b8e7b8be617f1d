"""What a process needs on each of its GPUs, part by part."""

from collections.abc import Iterable
from dataclasses import dataclass

_GIB, _MIB = 2**30, 2**20


@dataclass(frozen=True)
class Part:
    """`is_certain` where shapes and settings give the number; the rest is estimated roughly."""

    name: str
    num_bytes: int
    is_certain: bool = True


@dataclass(frozen=True)
class Need:
    """Of one process on one device, at its peak. `remedies` are the settings that lower it."""

    parts: tuple[Part, ...]
    remedies: tuple[str, ...] = ()

    @classmethod
    def of(cls, parts: Iterable[Part], remedies: Iterable[str] = ()) -> "Need":
        """Without the parts that need nothing."""
        return cls(tuple(part for part in parts if part.num_bytes > 0), tuple(remedies))

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    @property
    def certain_bytes(self) -> int:
        """What it needs in any case."""
        return sum(part.num_bytes for part in self.parts if part.is_certain)

    def describe(self) -> str:
        """The parts, the largest first."""
        largest = sorted(self.parts, key=lambda part: -part.num_bytes)
        return ", ".join(f"{part.name} {gib(part.num_bytes)}" for part in largest)


def gib(num_bytes: float) -> str:
    """
    >>> gib(80 * 2**30), gib(3 * 2**28), gib(2**20)
    ('80 GiB', '0.75 GiB', '1 MiB')
    """
    if num_bytes < _GIB / 10:
        return f"{num_bytes / _MIB:.3g} MiB"
    return f"{num_bytes / _GIB:.3g} GiB"
