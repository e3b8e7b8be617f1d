"""A program's own network, processes and file system, by Linux' namespaces.

Who is root makes them as root; who is not makes a user namespace first. Invariant: afterwards the
file system is read-only but for the working folder and /dev/shm, both in memory and of a bounded
size; the hidden folders are empty but for what Python needs; no network device is up.
"""

import ctypes
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

_NEWNS, _NEWUTS, _NEWIPC = 0x00020000, 0x04000000, 0x08000000
_NEWUSER, _NEWPID, _NEWNET = 0x10000000, 0x20000000, 0x40000000
_RDONLY, _NOSUID, _NODEV, _BIND, _REC, _PRIVATE = 1, 2, 4, 4096, 16384, 1 << 18
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE = 442, -100, 0x8000


class _MountAttributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns")]


def leave() -> None:
    """Leaves the machine's namespaces; children of this process get one of processes, too.

    Raises:
        OSError: the machine does not allow it.
    """
    uid, gid = os.getuid(), os.getgid()
    flags = _NEWNS | _NEWUTS | _NEWIPC | _NEWPID | _NEWNET
    if uid == 0:
        _call("unshare", flags)
        return
    _call("unshare", flags | _NEWUSER)
    for file, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{uid} {uid} 1"),
        ("gid_map", f"{gid} {gid} 1"),
    ):
        Path("/proc/self", file).write_text(text)


def hide_files(
    folder: Path, *, hidden: Sequence[Path], kept: Sequence[Path], folder_bytes: int
) -> None:
    """Mounts the file system that the program sees; called in the new namespace of processes.

    Args:
        hidden: folders that look empty, but for `kept` inside them.

    Raises:
        OSError: the machine does not allow it.
    """
    _mount("none", "/", "", _REC | _PRIVATE)
    originals = {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in _outermost(kept)}
    for path in _outermost(hidden):
        if any(path.is_relative_to(one) for one in originals):
            continue
        _mount("tmpfs", str(path), "tmpfs", _NOSUID | _NODEV, "mode=755")
        for one in (one for one in originals if one.is_relative_to(path)):
            one.mkdir(parents=True)
            _mount(f"/proc/self/fd/{originals[one]}", str(one), "", _BIND | _REC)
    folder.mkdir(parents=True, exist_ok=True)
    _make_read_only()
    for path in (folder, *(p for p in (Path("/dev/shm"),) if p.is_dir())):
        _mount("tmpfs", str(path), "tmpfs", _NOSUID | _NODEV, f"size={folder_bytes},mode=1777")
    try:
        _mount("proc", "/proc", "proc", _NOSUID | _NODEV)
    except OSError:  # A container that hides parts of /proc allows no second one.
        _mount("tmpfs", "/proc", "tmpfs", _NOSUID | _NODEV, "mode=555")


def files_below(folder: Path) -> Mapping[str, bytes]:
    """The contents of all files below a folder, by their path in it."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def _outermost(paths: Sequence[Path]) -> Iterator[Path]:
    """The folders that are there and in none of the others; never the root."""
    real = {path.resolve() for path in paths if path.is_dir()} - {Path("/")}
    yield from sorted(p for p in real if not real & {*p.parents})


def _make_read_only() -> None:
    attributes = _MountAttributes(_RDONLY, 0, 0, 0)
    size = ctypes.sizeof(attributes)
    _call(
        "syscall",
        ctypes.c_long(_MOUNT_SETATTR),
        _AT_FDCWD,
        b"/",
        _AT_RECURSIVE,
        ctypes.byref(attributes),
        ctypes.c_size_t(size),
    )


def _mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    texts = [os.fsencode(text) for text in (source, target, kind)]
    _call("mount", *texts, ctypes.c_ulong(flags), os.fsencode(data))


def _call(name: str, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments):
        number = ctypes.get_errno()
        place = "".join(f" {os.fsdecode(a)}" for a in arguments[1:2] if isinstance(a, bytes))
        raise OSError(number, f"{name}{place}: {os.strerror(number)}")
