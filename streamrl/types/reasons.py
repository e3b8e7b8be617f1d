"""Why a lease or group was dropped, and why a put was refused."""

from enum import StrEnum


class DropReason(StrEnum):
    """Why a lease or its group was dropped instead of trained.

    `ABANDONED`: it has tokens of versions that the learner, which went back to an earlier one, has
    left behind. After this, `EXPIRED`, `RELEASED` and `ORPHANED` the prompt is granted again; after
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
    """Why a message was refused; a group in it is not part of the books.

    `IGNORED`: it was not read, because its sender had sent too many malformed ones.
    """

    DUPLICATE = "duplicate"
    UNKNOWN_LEASE = "unknown_lease"
    MALFORMED = "malformed"
    IGNORED = "ignored"
