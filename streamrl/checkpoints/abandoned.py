"""Sets aside what a run has abandoned: checkpoints, and the lines of the steps that led to them.

    abandoned/0001-after-step-00000010/   step-00000020/ ...  metrics.jsonl  trained.jsonl
                                          validation/         responses of its later versions
                                          abandoned.json      when, why, and which steps

It is never deleted automatically; a person may delete it, or continue from a checkpoint in it with
`run.resume`. Invariant: it is complete before lines in the run's folder are cut and files deleted,
so a learner killed in between leaves everything in one place or the other.
"""

import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from streamrl.checkpoints.find import PREFIX, checkpoints_of, foreign, version_of
from streamrl.checkpoints.history import History, write_history
from streamrl.durable_files import write_file

RECORD_FILE = "abandoned.json"


class Abandoned(Struct, frozen=True, kw_only=True):
    """What was set aside at one time; the surviving history continues after `policy_version`.

    `versions` are those of the checkpoints; `time_s` is Unix time.
    """

    folder: str
    policy_version: int
    versions: tuple[int, ...]
    reason: str
    time_s: float


def begin(
    run: Path, history: History, policy_version: int, reason: str, files: Sequence[Path]
) -> Abandoned | None:
    """Make a history at this version the surviving one, and set aside what does not belong to it.

    Copies those `files` of the run's folder that exist along with the checkpoints, without changing
    them. May be repeated after an error or a kill.

    Returns:
        What was set aside, None if there was nothing.

    Raises:
        OSError: the disk is full, for example; either the earlier history still survives, or only
            leftovers have yet to be set aside.
    """
    checkpoints = checkpoints_of(run)
    # Unfinished or replaced folders that killed learners have left.
    for remnant in checkpoints.glob(f".{PREFIX}*"):
        shutil.rmtree(remnant, ignore_errors=True)
    leftovers = tuple(foreign(run, history, policy_version))
    if not leftovers:
        write_history(checkpoints, history)
        return None
    folder = _make_folder(run, policy_version)
    record = Abandoned(
        folder=str(folder.relative_to(run)),
        policy_version=policy_version,
        versions=tuple(version_of(path) for path in leftovers),
        reason=reason,
        time_s=time.time(),
    )
    try:
        for file in filter(Path.exists, files):
            copy = folder / file.relative_to(run)
            copy.parent.mkdir(exist_ok=True)
            shutil.copy2(file, copy)
        encoded = msgspec.json.format(msgspec.json.encode(record), indent=1)
        write_file(folder / RECORD_FILE, encoded + b"\n")
        write_history(checkpoints, history)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    for path in leftovers:
        # The checkpoints may be on another disk, behind a link.
        shutil.move(path, folder / path.name)
    return record


def read_abandoned(run: Path) -> tuple[Abandoned, ...]:
    """All that a run has set aside, oldest first, except what a kill left without a record."""
    records = sorted((run / "abandoned").glob(f"*/{RECORD_FILE}"))
    return tuple(msgspec.json.decode(path.read_bytes(), type=Abandoned) for path in records)


def _make_folder(run: Path, policy_version: int) -> Path:
    parent = run / "abandoned"
    parent.mkdir(parents=True, exist_ok=True)
    numbered = parent.glob("[0-9][0-9][0-9][0-9]-after-*")
    number = 1 + max((int(path.name[:4]) for path in numbered), default=0)
    folder = parent / f"{number:04d}-after-{PREFIX}{policy_version:08d}"
    folder.mkdir()
    return folder
