"""One open prompt of the ledger, and the states it passes through."""

from enum import StrEnum

from msgspec import Struct

from streamrl.types import GroupHeader, Lease


class State(StrEnum):
    LEASED = "leased"
    BUFFERED = "buffered"
    TAKEN = "taken"
    TRAINED = "trained"


class Entry(Struct):
    """One open prompt; `min_policy_version` is the oldest version that may sample its tokens.

    `version` is the one it is lent for, or was trained at.
    """

    prompt_index: int
    lease_id: str
    min_policy_version: int
    expires_at_s: float
    state: State = State.LEASED
    header: GroupHeader | None = None
    version: int = -1


def lease_of(entry: Entry) -> Lease:
    return Lease(
        lease_id=entry.lease_id,
        prompt_index=entry.prompt_index,
        min_policy_version=entry.min_policy_version,
        expires_at_s=entry.expires_at_s,
    )


def header_of(entry: Entry) -> GroupHeader:
    assert entry.header is not None, "only a LEASED entry has no header"
    return entry.header


def response_lengths(entry: Entry) -> tuple[int, ...]:
    """In tokens, those of its group; () if it has none yet."""
    return () if entry.header is None else entry.header.response_lengths
