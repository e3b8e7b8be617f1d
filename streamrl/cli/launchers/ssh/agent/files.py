"""The agent's side of what is copied to a host.

Invariant: a file has its name only when all of it is there; secrets are never readable by others,
nor is the folder that is made for them.
"""

import os
from pathlib import Path

from streamrl.cli.launchers.ssh.frames import Compare, Differing, Part, Stat

PRIVATE = 0o600


def compare(wanted: Compare) -> Differing:
    """Which files the host has not like this, and which of the required ones it has not at all."""
    return Differing(
        paths=tuple(stat.path for stat in wanted.files if not _is_there(stat)),
        missing=tuple(path for path in wanted.required if not Path(path).exists()),
    )


def _is_there(stat: Stat) -> bool:
    try:
        found = os.stat(stat.path)
    except OSError:
        return False
    return (found.st_size, int(found.st_mtime)) == (stat.size, stat.mtime_s)


def write(part: Part, body: bytes) -> None:
    """Append the part; the last one gives the file its name.

    Raises:
        OSError: it cannot be written.
    """
    path = Path(part.path)
    folder_mode = 0o700 if part.mode == PRIVATE else 0o755
    path.parent.mkdir(parents=True, exist_ok=True, mode=folder_mode)
    unfinished = path.with_name(f".{path.name}.unfinished")
    if part.offset == 0:
        unfinished.unlink(missing_ok=True)
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_APPEND, part.mode)
    with open(descriptor, "ab") as file:
        file.write(body)
        if part.is_last:
            os.fchmod(file.fileno(), part.mode)
            file.flush()
            os.fsync(file.fileno())
    if part.is_last:
        os.utime(unfinished, (part.mtime_s, part.mtime_s))
        unfinished.replace(path)
