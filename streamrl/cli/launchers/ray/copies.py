"""What nodes write where the driver does not see it: logs, and all of a run whose learner is there.

Invariant: a copy has what its node has written by the last look, and a file that is rewritten is
replaced as a whole. History and records come before the checkpoints that need them, each manifest
after its files; the journal of the buffer, which is one only when nobody writes it, at the end. A
checkpoint that the node deletes goes here, too.
"""

import asyncio
import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from streamrl.checkpoints.find import list_checkpoints, version_of
from streamrl.checkpoints.manifest import MANIFEST_FILE
from streamrl.cli.launchers.ray.cluster import LostError, Place
from streamrl.cli.processes.mirror import complete_checkpoints

POLL_S = 1.0
CHUNK_BYTES = 8 * 2**20
_APPENDED = (".log", ".jsonl")
_COMPARED_BYTES = 1024
# While the run goes on; weights/ is of the node alone.
_LATER, _NEVER = ("buffer",), ("weights", "keys", "files")


class Copies:
    """Into the run's folder here."""

    def __init__(self, folder: Path, places: Sequence[Place]) -> None:
        self._folder, self._places = folder, places
        self._known: dict[Place, Mapping[str, tuple[int, int]]] = {}

    async def run(self) -> None:
        """Until cancelled. Waits POLL_S between two looks."""
        while True:
            await self.bring(_LATER + _NEVER)
            await asyncio.sleep(POLL_S)

    async def bring(self, but: Sequence[str] = _NEVER) -> None:
        """Copy what is new, but for what is below these folders. Waits for the nodes."""
        for place in self._places:
            if place.is_ready and place.found and not place.found["shares_folder"]:
                try:
                    await self._bring_from(place, but)
                except LostError:
                    # Whoever runs the process on it hears of it, too.
                    continue

    async def _bring_from(self, place: Place, but: Sequence[str]) -> None:
        is_learner = place.bundle.name == "learner"
        pattern = "**/*" if is_learner else f"logs/{place.bundle.name}.log"
        known = self._known.get(place, {})
        now: Mapping[str, tuple[int, int]] = await place.actor.files.remote(pattern)
        if is_learner:
            self._forget(now)
        for path, (size, time_ns) in sorted(now.items(), key=_turn):
            if path.partition("/")[0] in but or known.get(path) == (size, time_ns):
                continue
            had = known.get(path, (0, 0))[0]
            goes_on = 0 < had <= size and await self._goes_on(place, path, had)
            await self._copy(place, path, had if goes_on else 0, size)
            known = {**known, path: (size, time_ns)}
            self._known[place] = known

    async def _goes_on(self, place: Place, path: str, had: int) -> bool:
        """Whether the node's file goes on behind the bytes that are here; not one whose lines were
        cut, as a learner that goes back does, and that has grown again since."""
        if not path.endswith(_APPENDED):
            return False
        begin = max(0, had - _COMPARED_BYTES)
        with (self._folder / path).open("rb") as file:
            file.seek(begin)
            ours = file.read(had - begin)
        theirs: bytes = await place.actor.read.remote(path, begin, had - begin)
        return ours == theirs

    def _forget(self, there: Collection[str]) -> None:
        """Checkpoints that the node, which has a newer one, has no more."""
        complete = complete_checkpoints(there)
        last = max((version_of(Path(name)) for name in complete), default=-1)
        for path in list_checkpoints(self._folder):
            if path.name not in complete and version_of(path) < last:
                (path / MANIFEST_FILE).unlink(missing_ok=True)
                shutil.rmtree(path, ignore_errors=True)

    async def _copy(self, place: Place, path: str, start: int, size: int) -> None:
        """The bytes from `start` to `size`, of a file that may be gone by now."""
        target = self._folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{target.name}.part") if start == 0 else target
        with part.open("wb" if start == 0 else "r+b") as file:
            file.seek(start)
            while start < size:
                body: bytes = await place.actor.read.remote(
                    path, start, min(CHUNK_BYTES, size - start)
                )
                if not body:
                    break
                file.write(body)
                start += len(body)
        if part != target:
            os.replace(part, target)


def _turn(item: tuple[str, tuple[int, int]]) -> tuple[bool, bool, str]:
    path = item[0]
    return path.startswith("checkpoints/step-"), path.endswith("/manifest.json"), path
