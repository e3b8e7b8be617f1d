"""Files that a crash or a full disk leaves as they were, or as they are to be.

For the small files of a run, its checkpoints and its journal. Imports nothing of StreamRL.
"""

import os
import uuid
from pathlib import Path


def write_file(path: Path, text: str) -> None:
    """Write the file whole and durably: a crash or a full disk leaves what was there before.

    Raises:
        OSError: it is not written.
    """
    # Several daemons of a run may write the same file, in containers with one id of process.
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}.unfinished")
    try:
        with unfinished.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
