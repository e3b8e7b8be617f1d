"""One launch of a run at a time.

Invariant: while a launch lives, no other one changes the run's folder, on this machine or on others
that share the file system. The lock is beside the folder, which `--new` moves, and ends with the
process, however that ends. Called by every launcher of a machine, of hosts and of Slurm, by
chaos and by soak.
"""

import fcntl
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from streamrl.errors import ConfigError

_LOCKS = ".launches"
_POLL_S = 1.0


@contextmanager
def sole_launch(folder: Path, wait_s: float = 0.0) -> Iterator[None]:
    """Holds the run of this folder. Waits `wait_s` at most for another launch to end: a file server
    keeps the lock of a machine that is gone for a while.

    Raises:
        ConfigError: another launch of it is under way, or the lock cannot be written.
    """
    file = folder.parent / _LOCKS / folder.name
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ConfigError(f"run.folder: cannot write {file}: {error.strerror}") from error
    try:
        _lock(descriptor, folder, wait_s)
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} of {socket.gethostname()}".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, folder: Path, wait_s: float) -> None:
    if _is_locked(descriptor):
        return
    if wait_s:
        print(
            f"{_held(descriptor, folder)}, or its node is gone; waiting for its lock, {wait_s:g} s "
            "at most",
            file=sys.stderr,
        )
    until_s = time.monotonic() + wait_s
    while time.monotonic() < until_s:
        time.sleep(_POLL_S)
        if _is_locked(descriptor):
            return
    raise ConfigError(f"{_held(descriptor, folder)}: stop it, or choose another run.name")


def _held(descriptor: int, folder: Path) -> str:
    other = os.pread(descriptor, 300, 0).decode(errors="replace")
    return f"run.name: {other} is a launch of {folder} already"


def _is_locked(descriptor: int) -> bool:
    # Some file systems have no locks.
    with suppress(OSError):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
