"""What the kernel knows of the processes of a run: memory, descriptors, threads, descendants.

Reads /proc, so it works on Linux only. Invariant: a process that ends while it is read is left out;
nothing here waits.
"""

import contextlib
import os
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from streamrl.errors import ConfigError

PROC = Path("/proc")
SHARED_MEMORY = Path("/dev/shm")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_ZOMBIE = "Z"

# The parent's id and the state of each process, by its id.
ProcessTable: TypeAlias = Mapping[int, tuple[int, str]]


@dataclass(frozen=True)
class FamilyReading:
    """Sums over a process and its descendants; `num_children` are the descendants that live."""

    rss_bytes: int
    num_descriptors: int
    num_sockets: int
    num_threads: int
    num_children: int
    num_zombies: int


def require_proc() -> None:
    """
    Raises:
        ConfigError: this system has no /proc.
    """
    if not (PROC / "self" / "statm").exists():
        raise ConfigError("a soak reads /proc, which only Linux has")


def process_table() -> ProcessTable:
    """All processes of this machine."""
    return {pid: found for pid in _process_ids() if (found := _parent_and_state(pid))}


def read_family(
    pid: int, table: ProcessTable, apart_from: Container[int] = ()
) -> FamilyReading | None:
    """Of the process and its descendants, without the families `apart_from`; None if it has
    ended."""
    if table.get(pid, (0, _ZOMBIE))[1] == _ZOMBIE:
        return None
    family = list(family_of(pid, table, apart_from))
    alive = [one for one in family if table[one][1] != _ZOMBIE]
    targets = [target for one in alive for target in _descriptor_targets(one)]
    return FamilyReading(
        rss_bytes=sum(_rss_bytes(one) for one in alive),
        num_descriptors=len(targets),
        num_sockets=sum(target.startswith("socket:") for target in targets),
        num_threads=sum(len(_names(PROC / str(one) / "task")) for one in alive),
        num_children=len(alive) - 1,
        num_zombies=len(family) - len(alive),
    )


def family_of(pid: int, table: ProcessTable, apart_from: Container[int] = ()) -> Iterator[int]:
    """The process and its descendants, without the families `apart_from`."""
    yield pid
    for child, (parent, _) in table.items():
        if parent == pid and child not in apart_from:
            yield from family_of(child, table, apart_from)


def shared_memory_of(pid: int) -> frozenset[str]:
    """Names in /dev/shm that the process has mapped."""
    prefix = f"{SHARED_MEMORY}/"
    lines = _text(PROC / str(pid) / "maps").splitlines()
    return frozenset(
        line.partition(prefix)[2]
        for line in lines
        if prefix in line and not line.endswith("(deleted)")
    )


def command_of(pid: int) -> str:
    """Its command line, cut after 100 characters."""
    return _text(PROC / str(pid) / "cmdline").replace("\0", " ").strip()[:100]


def _process_ids() -> Iterator[int]:
    return (int(name) for name in _names(PROC) if name.isdigit())


def _parent_and_state(pid: int) -> tuple[int, str] | None:
    # The second field, the program's name in brackets, may hold blanks and brackets.
    fields = _text(PROC / str(pid) / "stat").rpartition(")")[2].split()
    return (int(fields[1]), fields[0]) if fields else None


def _rss_bytes(pid: int) -> int:
    fields = _text(PROC / str(pid) / "statm").split()
    return int(fields[1]) * _PAGE_BYTES if fields else 0


def _descriptor_targets(pid: int) -> Iterator[str]:
    folder = PROC / str(pid) / "fd"
    for name in _names(folder):
        with contextlib.suppress(OSError):
            yield os.readlink(folder / name)


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""
