"""One launch of a run at a time.

Invariant: while a launch lives, no other one changes the run's folder, on this machine or on others
that share the file system. The lock is beside the folder, which `--new` moves, and ends with the
process, however that ends. Called by `streamrl launch`.
"""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from streamrl.errors import ConfigError

_LOCKS = ".launches"


@contextmanager
def sole_launch(folder: Path) -> Iterator[None]:
    """Holds the run of this folder.

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
        _lock(descriptor, folder)
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} of {socket.gethostname()}".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, folder: Path) -> None:
    # Some file systems have no locks.
    with suppress(OSError):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            other = os.pread(descriptor, 300, 0).decode(errors="replace")
            raise ConfigError(
                f"run.name: {other} is a launch of {folder} already: stop it, or choose another "
                "run.name"
            ) from None
