"""The disk of the run's folder: room, and whether its file system keeps what the journal needs."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from streamrl.cli.doctor.findings import Finding, ok, problem, warn

FEW_BYTES, TIGHT_BYTES = 200 * 2**20, 10 * 2**30
_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p", "lustre", "beegfs", "gpfs", "ceph")
_VOLATILE = ("tmpfs", "ramfs")


class Disk(NamedTuple):
    """Where a folder is, or will be made; `file_system` is "" where it is not known."""

    folder: Path
    free: int
    file_system: str


def read_disk(folder: Path, mounts: Path = Path("/proc/self/mountinfo")) -> Disk:
    """Of the nearest folder above that exists."""
    existing = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    try:
        status = os.statvfs(existing)
        free = status.f_bavail * status.f_frsize
    except OSError:
        free = 0
    return Disk(existing, free, _file_system(existing.resolve(), mounts))


def check_disk(disk: Disk, *, has_journal: bool = True) -> Iterator[Finding]:
    """`has_journal`: the buffer keeps one in the folder."""
    sentence = f"{disk.folder} has {disk.free / 2**30:.3g} GiB free"
    remedy = "free some, or set run.folder to another disk"
    if disk.free < FEW_BYTES:
        yield problem("disk", sentence, remedy)
    elif disk.free < TIGHT_BYTES:
        yield warn("disk", f"{sentence}, which a few checkpoints fill", remedy)
    else:
        yield ok("disk", sentence)
    kind = disk.file_system
    if kind in _NETWORK and has_journal:
        yield warn(
            "file system",
            f"{disk.folder} is on {kind}, where the locks of the buffer's journal (SQLite) are not "
            "to be trusted",
            "set run.folder to a local disk for the buffer's host, or use buffer.url redis://",
        )
    elif kind in _VOLATILE:
        sentence = f"{disk.folder} is on {kind}: a restart of the machine loses the run"
        yield warn("file system", sentence, "set run.folder to a disk")
    else:
        yield ok("file system", f"{disk.folder} is on {kind or 'an unknown file system'}")


def _file_system(path: Path, mounts: Path) -> str:
    """That of the innermost mount above the path."""
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return ""
    best, found = -1, ""
    for line in lines:
        before, _, after = line.partition(" - ")
        words, kinds = before.split(), after.split()
        if len(words) < 5 or not kinds:
            continue
        place = Path(words[4].replace("\\040", " "))
        if path.is_relative_to(place) and len(place.parts) >= best:
            best, found = len(place.parts), kinds[0]
    return found
