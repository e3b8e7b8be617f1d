"""A program's own network, processes and file system, by Linux' namespaces.

Root creates them directly; any other user creates a user namespace first. Invariant: afterwards the
file system contains only the named files and is read-only, except for the working folder and
/dev/shm, which are in memory and of bounded size. /proc shows the program's own processes; no
network device is up.
"""

import contextlib
import ctypes
import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

from actors.sandbox.privileges import LIBC, call

_NEWNS, _NEWCGROUP, _NEWUTS, _NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
_NEWUSER, _NEWPID, _NEWNET = 0x10000000, 0x20000000, 0x40000000
_RDONLY, _NOSUID, _NODEV, _BIND, _REC, _PRIVATE = 1, 2, 4, 4096, 16384, 1 << 18
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _DETACH = 442, -100, 0x8000, 2


def leave() -> None:
    """Leave the machine's namespaces; children of this process get a new process namespace, too.
    Raises OSError if the machine does not allow it."""
    uid, gid = os.getuid(), os.getgid()
    flags = _NEWNS | _NEWCGROUP | _NEWUTS | _NEWIPC | _NEWPID | _NEWNET
    if uid == 0:
        call("unshare", LIBC.unshare, flags)
        return
    call("unshare", LIBC.unshare, flags | _NEWUSER)
    for file, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{uid} {uid} 1"),
        ("gid_map", f"{gid} {gid} 1"),
    ):
        Path("/proc/self", file).write_text(text)


def enter_files(
    folder: str, readable: Iterable[str], links: Mapping[str, str], folder_bytes: int
) -> None:
    """Enter a new file system that consists of these files, folders and links, and of an empty,
    writable `folder`. Call it in the new process namespace. Raises OSError if the machine does not
    allow it.

    Args:
        readable: real paths, without links on the way; none lies inside another.
        links: the target of each link.
    """
    _mount("none", "/", "", _REC | _PRIVATE)
    _mount("tmpfs", folder, "tmpfs", _NOSUID | _NODEV, "mode=755")
    for path in readable:
        _make_place(folder + path, is_folder=os.path.isdir(path))
        _mount(path, folder + path, "", _BIND | _REC)
    for path in ("/proc", "/dev/shm", folder):
        _make_place(folder + path, is_folder=True)
    for path, target in links.items():
        os.makedirs(os.path.dirname(folder + path), exist_ok=True)
        os.symlink(target, folder + path)
    # A container that hides parts of /proc allows no second /proc.
    with contextlib.suppress(OSError):
        _mount("proc", f"{folder}/proc", "proc", _NOSUID | _NODEV)
    os.chdir(folder)
    call("pivot_root", LIBC.pivot_root, b".", b".")
    call("umount2", LIBC.umount2, b".", _DETACH)
    os.chdir("/")
    _make_read_only()
    for path in (folder, "/dev/shm"):
        _mount("tmpfs", path, "tmpfs", _NOSUID | _NODEV, f"size={folder_bytes},mode=1777")


def _make_place(path: str, *, is_folder: bool) -> None:
    """Create a mount point."""
    os.makedirs(path if is_folder else os.path.dirname(path), exist_ok=True)
    if not is_folder:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY))


def _make_read_only() -> None:
    # Attributes to set, attributes to clear, mount propagation, user namespace.
    attributes = struct.pack("=QQQQ", _RDONLY, 0, 0, 0)
    size = ctypes.c_size_t(len(attributes))
    number = ctypes.c_long(_MOUNT_SETATTR)
    call("mount_setattr", LIBC.syscall, number, _AT_FDCWD, b"/", _AT_RECURSIVE, attributes, size)


def _mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    texts = [os.fsencode(text) for text in (source, target, kind)]
    call(f"mount {target}", LIBC.mount, *texts, ctypes.c_ulong(flags), os.fsencode(data))
