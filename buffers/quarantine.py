"""The quarantine: files with malformed messages, for a person to inspect.

Invariant: it holds the newest messages, at most `max_files` files and `max_bytes` bytes. From a
flood it keeps a sample, so that neither the disk nor the server's thread is kept busy; a message
that cannot be written (a full disk) is only logged.

`EventLimit` limits what is logged about events that may never stop.
"""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from streamrl.errors import WireError

log = logging.getLogger(__name__)

BURST, EVERY_S = 20, 5.0


class EventLimit:
    """Admits `burst` events at once, and one more every `every_s`; `num_omitted` counts those left
    out since the last admitted one."""

    def __init__(self, *, burst: int, every_s: float) -> None:
        self._burst = burst
        self._every_s = every_s
        self._tokens = float(burst)
        self._at_s = float("-inf")
        self._num_omitted = 0

    def admits(self, now_s: float) -> bool:
        gained = (now_s - self._at_s) / self._every_s
        self._tokens, self._at_s = min(self._burst, self._tokens + gained), now_s
        if self._tokens < 1:
            self._num_omitted += 1
            return False
        self._tokens -= 1
        return True

    def take_omitted(self) -> str:
        """How many were omitted since the last call, as the end of a log line; "" if none."""
        num_omitted, self._num_omitted = self._num_omitted, 0
        return f"; {num_omitted} more were not logged" if num_omitted else ""


class Quarantine:
    def __init__(
        self,
        folder: Path,
        *,
        max_files: int = 100,
        max_bytes: int = 256 * 2**20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._max_files = max_files
        self._max_bytes = max_bytes
        self._clock = clock
        self._limit = EventLimit(burst=BURST, every_s=EVERY_S)

    def keep(self, sender: str, frames: Sequence[bytes | memoryview], error: WireError) -> None:
        """Write the message's frames end to end, up to `max_bytes`, or only count it.

        `sender` is part of the file's name.
        """
        if not self._limit.admits(self._clock()):
            return
        name = "".join(c if c.isalnum() or c in "-_" else "_" for c in sender)[:80]
        path = self._folder / f"{time.time_ns()}-{name}.msgpack"
        omitted = self._limit.take_omitted()
        try:
            self._write(path, frames)
        except OSError as problem:
            log.warning(
                "malformed message of %s: %s (not kept: %s)%s", name, error, problem, omitted
            )
            return
        log.warning("malformed message of %s kept in %s: %s%s", name, path, error, omitted)

    def _write(self, path: Path, frames: Sequence[bytes | memoryview]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            for frame in frames:
                file.write(frame[: self._max_bytes - file.tell()])
        kept = [(old, old.stat().st_size) for old in sorted(self._folder.glob("*.msgpack"))]
        while len(kept) > self._max_files or sum(size for _, size in kept) > self._max_bytes:
            oldest, _ = kept.pop(0)
            oldest.unlink(missing_ok=True)
