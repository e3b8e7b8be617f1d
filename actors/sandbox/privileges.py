"""What a program of the sandbox may use: its user and its limits; and that it ends with its parent.

Invariant: a program that root starts stops being root, if another user can read Python and reach
the program's folder.
"""

import contextlib
import ctypes
import os
import resource
import signal
import stat
import struct
from collections.abc import Callable, Mapping
from pathlib import Path

# Unnamed users from systemd's range for services; many, since process limits count per user.
_FIRST_UID, _NUM_UIDS = 61184, 4336
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
_NUM_CAPABILITIES, _CAPABILITIES_VERSION_3 = 64, 0x20080522
# Pending signals and timers are counted per user.
_ALWAYS = {"core_bytes": 0, "num_pending_signals": 256}

_LIMITS: Mapping[str, int] = {
    "cpu_s": resource.RLIMIT_CPU,
    "memory_bytes": resource.RLIMIT_AS,
    "folder_bytes": resource.RLIMIT_FSIZE,
    "num_files": resource.RLIMIT_NOFILE,
    "num_processes": resource.RLIMIT_NPROC,
    "core_bytes": resource.RLIMIT_CORE,
    "num_pending_signals": resource.RLIMIT_SIGPENDING,
}


def end_with_parent(number: signal.Signals) -> None:
    """Ask the kernel for this signal when the parent ends, in whatever way."""
    _prctl(_PR_SET_PDEATHSIG, int(number))


def stop_being_root(folder: Path, seed: int) -> None:
    """Become an unnamed user, one of thousands, who owns the folder and the pipes of the standard
    streams, so that these can be opened by name. Stay root if the change is not allowed."""
    if os.getuid() != 0:
        return
    uid = _FIRST_UID + seed % _NUM_UIDS
    with contextlib.suppress(OSError):
        for path in (folder, *folder.rglob("*")):
            os.chown(path, uid, uid, follow_symlinks=False)
        for stream in range(3):
            # A device, such as /dev/null, belongs to the machine.
            if stat.S_ISFIFO(os.fstat(stream).st_mode):
                os.fchown(stream, uid, uid)
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
        _prctl(_PR_SET_DUMPABLE, 1)


def give_up_capabilities() -> None:
    """Give up all capabilities, including those that root gains with a new program: with them it
    could undo its restrictions."""
    for capability in range(_NUM_CAPABILITIES):
        _prctl(_PR_CAPBSET_DROP, capability)
    header, none = struct.pack("=Ii", _CAPABILITIES_VERSION_3, 0), bytes(24)
    call("the program's capabilities cannot be given up", LIBC.capset, header, none)


def can_be_read_by_others(path: Path) -> bool:
    """Whether any user may read and enter the folder and all folders above it."""
    return all(p.stat().st_mode & 0o005 == 0o005 for p in (path, *path.parents))


def limit(limits: Mapping[str, int]) -> None:
    """Set the limits of this process, by the names of `SandboxLimits`."""
    for name, value in {**limits, **_ALWAYS}.items():
        if (kind := _LIMITS.get(name)) is not None:
            _, hard = resource.getrlimit(kind)
            allowed = value if hard == resource.RLIM_INFINITY else min(value, hard)
            # A second of difference to the hard limit: SIGXCPU, which tells the reason, comes
            # first.
            more = kind == resource.RLIMIT_CPU and hard == resource.RLIM_INFINITY
            resource.setrlimit(kind, (allowed, allowed + more))
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def _prctl(option: int, value: int) -> None:
    LIBC.prctl(option, ctypes.c_ulong(value), 0, 0, 0)


def call(what: str, function: Callable[..., int], *arguments: object) -> int:
    """Call a function of the C library and return its result.

    Raises:
        OSError: it failed; the message begins with `what`.
    """
    answer = function(*arguments)
    if answer < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return answer


LIBC = ctypes.CDLL(None, use_errno=True)
