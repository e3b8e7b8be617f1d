"""Files of a run's folder that grow on a host and are wanted on the launching machine: logs and
records.

Invariant: a part says its own offset, so what is sent twice changes nothing; a file that was
rewritten, or has become shorter, is sent from its beginning.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from streamrl.cli.launchers.ssh.frames import CHUNK_BYTES, Part

POLL_S = 0.5
_APPENDED = (".log", ".jsonl")


class Sent(NamedTuple):
    """What the launcher has of a file."""

    size: int
    mtime_ns: int
    inode: int


class GrowingFiles:
    """The agent's side, of the run in `folder`."""

    def __init__(
        self,
        folder: Path,
        patterns: Sequence[str],
        sizes: Mapping[str, int],
        send: Callable[[Part, bytes], Awaitable[None]],
    ) -> None:
        self._folder = folder
        self._patterns = patterns
        self._sent = {path: Sent(size, 0, 0) for path, size in sizes.items()}
        self._send = send
        self._sending = asyncio.Lock()

    async def run(self) -> None:
        """Until cancelled. Waits POLL_S between two looks, and for the connection."""
        while True:
            await self.send_new()
            await asyncio.sleep(POLL_S)

    async def send_new(self) -> None:
        """Send what is new; waits until the connection has taken it."""
        async with self._sending:
            for pattern in self._patterns:
                for path in sorted(self._folder.glob(pattern)):
                    await self._send_file(path)

    async def _send_file(self, path: Path) -> None:
        name = str(path.relative_to(self._folder))
        try:
            status = os.stat(path)
            now = Sent(status.st_size, status.st_mtime_ns, status.st_ino)
            last = self._sent.get(name, Sent(0, 0, now.inode))
            if now == last:
                return
            is_same = last.inode in (0, now.inode) and path.suffix in _APPENDED
            start = last.size if is_same and last.size <= now.size else 0
            with path.open("rb") as file:
                file.seek(start)
                while body := file.read(CHUNK_BYTES):
                    await self._send(Part(path=name, offset=start), body)
                    start += len(body)
        except OSError:
            # It was renamed or removed while it was read.
            return
        await self._send(Part(path=name, offset=start, is_last=True), b"")
        self._sent = {**self._sent, name: now._replace(size=start)}
