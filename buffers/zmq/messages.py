"""The messages between a buffer client and a buffer server.

    request = [request id, request record, payload of a put]      DEALER -> ROUTER
    reply   = [request id, reply record, payloads of a take or fetch]

Records are encoded as `streamrl.wire` envelopes; a payload is the envelope of a `PackedGroup`, so
a server stores and returns bytes that it need not encode again. Every request may be sent again
after a lost reply: the ledger answers a repeated one alike.
"""

from typing import TypeAlias

from msgspec import Struct

from streamrl import errors
from streamrl.errors import StreamRLError
from streamrl.types import (
    Books,
    BufferStats,
    DropReason,
    GeneratorStatus,
    GroupHeader,
    HeartbeatReply,
    Lease,
    SchedulingState,
)


class LeaseRequest(Struct, frozen=True, tag="lease"):
    lease_ids: tuple[str, ...]
    generator_id: str
    wait_s: float


class PutRequest(Struct, frozen=True, tag="put"):
    lease_id: str


class ReleaseRequest(Struct, frozen=True, tag="release"):
    lease_id: str
    reason: DropReason


class HeartbeatRequest(Struct, frozen=True, tag="heartbeat"):
    status: GeneratorStatus


class AttachRequest(Struct, frozen=True, tag="attach"):
    """`call_id` is the same when it is sent again: a second term would fence the first."""

    policy_version: int
    books: Books | None
    call_id: str


class TakeRequest(Struct, frozen=True, tag="take"):
    num_groups: int
    policy_version: int
    learner_term: int
    wait_s: float
    with_payloads: bool


class FetchRequest(Struct, frozen=True, tag="fetch"):
    prompt_indices: tuple[int, ...]


class AdvanceRequest(Struct, frozen=True, tag="advance"):
    policy_version: int
    learner_term: int


class AcknowledgeRequest(Struct, frozen=True, tag="acknowledge"):
    policy_version: int
    learner_term: int


class FinishRequest(Struct, frozen=True, tag="finish"):
    learner_term: int


class DrainRequest(Struct, frozen=True, tag="drain"):
    pass


class SchedulingStateRequest(Struct, frozen=True, tag="scheduling_state"):
    generator_id: str
    scheduling_state: SchedulingState


class StatsRequest(Struct, frozen=True, tag="stats"):
    pass


Request: TypeAlias = (
    LeaseRequest
    | PutRequest
    | ReleaseRequest
    | HeartbeatRequest
    | AttachRequest
    | TakeRequest
    | FetchRequest
    | AdvanceRequest
    | AcknowledgeRequest
    | FinishRequest
    | DrainRequest
    | SchedulingStateRequest
    | StatsRequest
)


class Done(Struct, frozen=True, tag="done"):
    """The reply to a request that returns nothing, and with payload frames to a fetch."""


class LeaseReply(Struct, frozen=True, tag="lease"):
    leases: tuple[Lease, ...] = ()


class HeartbeatAnswer(Struct, frozen=True, tag="heartbeat"):
    reply: HeartbeatReply


class AttachReply(Struct, frozen=True, tag="attach"):
    learner_term: int
    stats: BufferStats


class TakeReply(Struct, frozen=True, tag="take"):
    """Payload frames follow if the request wants them."""

    headers: tuple[GroupHeader, ...] = ()


class StatsReply(Struct, frozen=True, tag="stats"):
    stats: BufferStats


class ErrorReply(Struct, frozen=True, tag="error"):
    """A refusal; `kind` is the name of a class in `streamrl.errors`."""

    kind: str
    message: str

    @classmethod
    def of(cls, error: StreamRLError) -> "ErrorReply":
        return cls(type(error).__name__, str(error))

    def exception(self) -> StreamRLError:
        kind = getattr(errors, self.kind, None)
        if isinstance(kind, type) and issubclass(kind, StreamRLError):
            return kind(self.message)
        return StreamRLError(f"{self.kind}: {self.message}")


Reply: TypeAlias = (
    Done | LeaseReply | HeartbeatAnswer | AttachReply | TakeReply | StatsReply | ErrorReply
)
