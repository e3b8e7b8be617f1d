"""Why a lease or group was dropped, and why a put was refused."""

from enum import StrEnum


class DropReason(StrEnum):
    """Why a lease or its group was dropped instead of trained.

    After `EXPIRED`, `RELEASED` and `ORPHANED` the prompt is granted again; after the others it is
    not.
    """

    STALE = "stale"
    FAILED = "failed"
    FILTERED = "filtered"
    UNIFORM = "uniform"
    MALFORMED = "malformed"
    EXPIRED = "expired"
    RELEASED = "released"
    ORPHANED = "orphaned"

    @property
    def returns_prompt(self) -> bool:
        return self in (DropReason.EXPIRED, DropReason.RELEASED, DropReason.ORPHANED)


class RefusalReason(StrEnum):
    """Why a message was refused; a group in it is not part of the books.

    `IGNORED`: it was not read, because its sender had sent too many malformed ones.
    """

    DUPLICATE = "duplicate"
    UNKNOWN_LEASE = "unknown_lease"
    MALFORMED = "malformed"
    IGNORED = "ignored"
