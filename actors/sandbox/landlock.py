"""Restricts a program that shares the machine's file system to its files, by Linux' Landlock.

Invariant: afterwards this process and its children can open only the named files, and rename,
create and remove files only below the writable folders. They can trace no process outside, nor
(from Linux 6.12 on) signal one. `seccomp` refuses what Landlock does not cover, such as `chmod`.
"""

import ctypes
import os
import stat
import struct
from collections.abc import Iterable
from pathlib import Path

from actors.sandbox.privileges import LIBC, call

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # On every architecture.
_ASK_VERSION, _PATH_BENEATH = 1, 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_MAKE_CHAR, _MAKE_BLOCK, _TRUNCATE, _DEVICE_IOCTL = 1 << 6, 1 << 11, 1 << 14, 1 << 15
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _DEVICE_IOCTL
_SCOPES = 3  # Abstract sockets and signals.


def version() -> int:
    """The version of Landlock's interface; 0 if the kernel has none."""
    found: int = LIBC.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _ASK_VERSION)
    return max(found, 0)


def restrict(readable: Iterable[Path], writable: Iterable[Path]) -> None:
    """Restrict this process to these files and to everything below these folders; paths that it
    cannot open are skipped. Needs `no_new_privs`. Raises OSError if the kernel has no Landlock."""
    handled = _rights(version())
    attributes = struct.pack("=QQQ", handled, 0, _SCOPES if version() >= 6 else 0)
    ruleset = _call(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    for path in readable:
        _allow(ruleset, path, _READ)
    for path in writable:
        _allow(ruleset, path, handled & ~(_MAKE_CHAR | _MAKE_BLOCK))
    _call(_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def _rights(version: int) -> int:
    """All rights that this version knows; a kernel refuses rights that it does not know."""
    return (1 << 13 + sum(version >= first for first in (2, 3, 5))) - 1


def _allow(ruleset: int, path: Path, rights: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    if not stat.S_ISDIR(os.fstat(place).st_mode):
        rights &= _OF_FILES
    _call(_ADD_RULE, ruleset, _PATH_BENEATH, struct.pack("=Qi", rights, place), 0)
    os.close(place)


def _call(number: int, *arguments: object) -> int:
    return call("Landlock", LIBC.syscall, ctypes.c_long(number), *arguments)
