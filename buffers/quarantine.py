"""The quarantine: files with the malformed messages, for a person to inspect.

Invariant: it holds the newest messages, at most `max_files` files and `max_bytes` bytes; a message
that cannot be written (a full disk) is only logged.
"""

import logging
import time
from pathlib import Path

from streamrl.errors import WireError

log = logging.getLogger(__name__)


class Quarantine:
    def __init__(self, folder: Path, *, max_files: int = 100, max_bytes: int = 256 * 2**20) -> None:
        self._folder = folder
        self._max_files = max_files
        self._max_bytes = max_bytes

    def keep(self, sender: str, message: bytes | memoryview, error: WireError) -> None:
        """Write the message; `sender` is part of the file's name. It is cut at `max_bytes`."""
        name = "".join(c if c.isalnum() or c in "-_" else "_" for c in sender)[:80]
        path = self._folder / f"{time.time_ns()}-{name}.msgpack"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            path.write_bytes(message[: self._max_bytes])
            self._bound()
        except OSError as problem:
            log.warning("malformed message of %s: %s (not kept: %s)", sender, error, problem)
            return
        log.warning("malformed message of %s kept in %s: %s", sender, path, error)

    def _bound(self) -> None:
        num_bytes = 0
        newest_first = sorted(self._folder.glob("*.msgpack"), reverse=True)
        for num_files, path in enumerate(newest_first, start=1):
            num_bytes += path.stat().st_size
            if num_files > self._max_files or num_bytes > self._max_bytes:
                path.unlink()
