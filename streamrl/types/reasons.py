"""Reasons: why a lease or group was dropped, why a put was refused, and why groups failed, as
generators report in heartbeats.

Invariant: a report is short, however long the message of an exception is.
"""

from enum import StrEnum
from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

from streamrl.types.ranges import Count, Name, PromptIndex


class DropReason(StrEnum):
    """Why a lease or its group was dropped instead of trained.

    `ABANDONED`: it has tokens of versions that the learner left behind when it went back to an
    earlier one. After this, `EXPIRED`, `RELEASED` and `ORPHANED` the prompt is granted again; after
    the others it is not.
    """

    STALE = "stale"
    FAILED = "failed"
    FILTERED = "filtered"
    UNIFORM = "uniform"
    MALFORMED = "malformed"
    EXPIRED = "expired"
    RELEASED = "released"
    ORPHANED = "orphaned"
    ABANDONED = "abandoned"

    @property
    def returns_prompt(self) -> bool:
        return self in _RETURNS_PROMPT


_RETURNS_PROMPT = (
    DropReason.EXPIRED,
    DropReason.RELEASED,
    DropReason.ORPHANED,
    DropReason.ABANDONED,
)


class RefusalReason(StrEnum):
    """Why a message was refused; a group in it is not counted in the books.

    `IGNORED`: it was not read, because its sender had sent too many malformed ones.
    """

    DUPLICATE = "duplicate"
    UNKNOWN_LEASE = "unknown_lease"
    MALFORMED = "malformed"
    IGNORED = "ignored"


MAX_FAILURE_CHARACTERS = 300
MAX_FAILED_ROWS = 8
ShortText: TypeAlias = Annotated[str, Meta(max_length=MAX_FAILURE_CHARACTERS)]


class GroupFailure(Struct, frozen=True, kw_only=True):
    """The failure of one group; `sentence` is the error's, shortened."""

    prompt_index: PromptIndex
    sentence: ShortText


class FailedRow(Struct, frozen=True, kw_only=True):
    """A row of the data whose groups failed; `row` is its place, such as "line 3 of a.jsonl"."""

    row: ShortText
    num_failures: Count


class FailedReward(Struct, frozen=True, kw_only=True):
    """A reward, by its name in metrics, that has not scored groups."""

    reward: Name
    num_failures: Count


def shortened(text: str) -> str:
    """The text on one line, with at most MAX_FAILURE_CHARACTERS, as it can be sent: the name of a
    file may hold half a surrogate pair."""
    line = " ".join(text.split()).encode(errors="replace").decode()
    is_short = len(line) <= MAX_FAILURE_CHARACTERS
    return line if is_short else line[: MAX_FAILURE_CHARACTERS - 3] + "..."
