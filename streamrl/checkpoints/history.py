"""The history of a run: which learners made the current policy, each up to which version.

    checkpoints/history.json       the surviving history, by the learner that writes it at present
    checkpoints/step-N/state.json  the history that led to version N

Every learner process has its own id. One that starts from a checkpoint continues that checkpoint's
history; what other learners saved, or its predecessor after that version, does not belong to it.
Invariant: `history.json` is replaced as a whole by a learner that has just attached to the buffer;
from then on a checkpoint belongs to the run if this history contains it, whatever else is in the
folder.
"""

import json
import uuid
from pathlib import Path

import msgspec
from msgspec import Struct

from streamrl.durable_files import write_file
from streamrl.errors import ConfigError, FencedError
from streamrl.types import Books
from streamrl.types.index_ranges import IndexRanges, ranges_of

HISTORY_FILE = "history.json"


class HistorySegment(Struct, frozen=True):
    """The versions that a learner has made, up to this one."""

    learner_id: str
    policy_version: int


class History(Struct, frozen=True, kw_only=True):
    """`segments` are the learners before `learner_id`, in order.

    `base` is the checkpoint that it started from, "" for the model of the configuration, and
    `resume` the setting `run.resume` that led there. `metrics.jsonl` and `trained.jsonl` begin with
    `first_step`; the prompts in `finished_before` were trained or dropped before it.
    """

    learner_id: str
    segments: tuple[HistorySegment, ...] = ()
    base: str = ""
    resume: str = ""
    first_step: int = 1
    finished_before: IndexRanges = ()

    def contains(self, learner_id: str, policy_version: int) -> bool:
        """Whether the history contains the checkpoint of this version by this learner."""
        return learner_id == self.learner_id or any(
            learner_id == segment.learner_id and policy_version <= segment.policy_version
            for segment in self.segments
        )


def new_history() -> History:
    """The history of a learner that starts from the model of the configuration."""
    return History(learner_id=uuid.uuid4().hex[:12])


def continued(history: History, policy_version: int, base: Path, resume: str) -> History:
    """The history of a learner that starts from the checkpoint `base` with this version and
    history."""
    segment = HistorySegment(history.learner_id, policy_version)
    return msgspec.structs.replace(
        history,
        learner_id=uuid.uuid4().hex[:12],
        segments=(*history.segments, segment),
        base=str(base.absolute()),
        resume=resume,
    )


def finished(books: Books) -> IndexRanges:
    """The prompts that were trained or permanently dropped, by these books."""
    return ranges_of({*range(books.next_prompt_index)} - {*books.open_prompt_indices})


def read_history(checkpoints: Path) -> History | None:
    """The surviving history of the run with this folder of checkpoints; None before its first.

    Raises:
        ConfigError: the file cannot be read, so it is unknown which checkpoints belong to the
        history.
    """
    path = checkpoints / HISTORY_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=History)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"run.resume: {path} cannot be read ({error}): name the checkpoint to go on from, or "
            "remove the file if no checkpoint beside it was abandoned"
        ) from error


def survives(checkpoints: Path, history: History) -> bool:
    """Whether no other learner is known to have made its history the surviving one. A file that
    cannot be read at present is not a reason to end a learner."""
    try:
        surviving = read_history(checkpoints)
    except ConfigError:
        return True
    return surviving is None or surviving.learner_id == history.learner_id


def require_surviving(checkpoints: Path, history: History) -> None:
    """Raise FencedError if another learner has made its history the surviving one."""
    if not survives(checkpoints, history):
        raise FencedError(
            f"another learner goes on with {checkpoints.parent}; this one writes nothing more"
        )


def write_history(checkpoints: Path, history: History) -> None:
    """Replace the surviving history; it is on disk when this returns."""
    checkpoints.mkdir(parents=True, exist_ok=True)
    text = json.dumps(msgspec.to_builtins(history), indent=1) + "\n"
    write_file(checkpoints / HISTORY_FILE, text)
