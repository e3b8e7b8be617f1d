"""The calls of a buffer: their messages, what each request does to a `BufferState`, and the
client's side.

    request = [request id, request record, payload of a put]      DEALER -> ROUTER
    reply   = [request id, reply record, payloads of a take or fetch]

`buffers.memory` applies the records in process; `zmq://` encodes them as `streamrl.wire` envelopes.
A payload is an encoded `PackedGroup`, which the server stores and returns without decoding it.
Every request may be sent again after a lost reply: the ledger answers a repeated one the same way.
A learner's term belongs to the client that attached.
"""

import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias, TypeVar

from msgspec import Meta, Struct

from buffers.ledger.ledger import require_learner_term
from buffers.ledger.state import GROUP, BufferState
from streamrl import errors
from streamrl.errors import ConfigError, StreamRLError
from streamrl.types import (
    MAX_GROUPS,
    MAX_NAMES,
    Books,
    BufferStats,
    Count,
    DropReason,
    GeneratorStatus,
    GroupHeader,
    HeartbeatReply,
    Lease,
    Name,
    NumGroups,
    PolicyVersion,
    PromptIndex,
    SchedulingState,
    SiblingHeader,
    TakenBatch,
    Text,
    TrajectoryGroup,
    WaitSeconds,
)

MAX_KEY_BYTES = 1024
State: TypeAlias = BufferState[Any]
Expected = TypeVar("Expected")
Answer: TypeAlias = tuple[Any, ...]
"""A reply record and the payloads that follow it."""


class Done(Struct, frozen=True, tag="done"):
    """The reply to a request that returns nothing, and to a fetch, with payload frames."""


class LeaseReply(Struct, frozen=True, tag="lease"):
    leases: tuple[Lease, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not self.leases


class HeartbeatAnswer(Struct, frozen=True, tag="heartbeat"):
    reply: HeartbeatReply


class AttachReply(Struct, frozen=True, tag="attach"):
    learner_term: int
    stats: BufferStats


class TakeReply(Struct, frozen=True, tag="take"):
    """Followed by payload frames if the request asks for them."""

    headers: tuple[GroupHeader, ...] = ()
    wait_due_s: float = 0.0

    @property
    def is_empty(self) -> bool:
        return not self.headers


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


class OfRun(Struct, frozen=True, kw_only=True):
    """A request that names its run; "" fits any run."""

    run_name: Text = ""

    def require_run(self, state: State) -> None:
        """Refuse a request of another run, whose groups do not belong here."""
        if self.run_name and state.run_name not in ("", self.run_name):
            raise ConfigError(
                f"buffer.url: the buffer there is of the run {state.run_name}, and this run is "
                f"{self.run_name}: give each run an address of its own (port 0 in a launch)"
            )


class LeaseRequest(OfRun, frozen=True, tag="lease"):
    lease_ids: Annotated[tuple[Name, ...], Meta(max_length=MAX_NAMES)]
    generator_id: Name
    wait_s: WaitSeconds
    learner_id: Text = ""

    def apply(self, state: State, now_s: float) -> Answer:
        leases = state.lease(self.lease_ids, self.generator_id, now_s, self.learner_id)
        return (LeaseReply(leases),)


class PutRequest(Struct, frozen=True, tag="put"):
    """Followed by the payload; the backend decides in which form the state keeps it."""

    lease_id: Name


class PutSiblingRequest(Struct, frozen=True, tag="put_sibling"):
    """Followed by the payload: bytes that only generators read."""

    sibling: SiblingHeader

    def apply(self, state: State, now_s: float, payload: bytes | memoryview = b"") -> Answer:
        state.put_sibling(self.sibling, payload, now_s)
        return (Done(),)


class FetchSiblingsRequest(Struct, frozen=True, tag="fetch_siblings"):
    lease_id: Name

    def apply(self, state: State, now_s: float) -> Answer:
        return (Done(), *state.fetch_siblings(self.lease_id))


class StoredGroup(Struct, frozen=True, tag="stored_group"):
    """The payload of a put when the group itself is in a store that the learner reads: its header,
    and its key in that store, where it was written before."""

    header: GroupHeader
    key: Annotated[bytes, Meta(min_length=1, max_length=MAX_KEY_BYTES)]


class LostRequest(Struct, frozen=True, tag="lost"):
    """A learner has found that the groups of these prompts are gone from that store. The term is 0
    if one of its other ranks found it, which has not attached."""

    prompt_indices: Annotated[tuple[PromptIndex, ...], Meta(max_length=MAX_GROUPS)]
    learner_term: Count

    def apply(self, state: State, now_s: float) -> Answer:
        if self.learner_term:
            require_learner_term(self.learner_term, state.ledger.learner_term)
        state.lose((prompt_index, GROUP) for prompt_index in self.prompt_indices)
        return (Done(),)


class ReleaseRequest(Struct, frozen=True, tag="release"):
    """`lengths` are those of the sampled responses that are dropped with the lease."""

    lease_id: Name
    reason: DropReason
    lengths: Annotated[tuple[Count, ...], Meta(max_length=MAX_GROUPS)] = ()

    def apply(self, state: State, now_s: float) -> Answer:
        state.ledger.release(self.lease_id, self.reason, self.lengths)
        return (Done(),)


class HeartbeatRequest(OfRun, frozen=True, tag="heartbeat"):
    status: GeneratorStatus

    def apply(self, state: State, now_s: float) -> Answer:
        return (HeartbeatAnswer(state.heartbeat(self.status, now_s)),)


class AttachRequest(OfRun, frozen=True, tag="attach"):
    """`call_id` stays the same when the request is sent again: a second term would fence the
    first."""

    policy_version: PolicyVersion
    books: Books | None
    call_id: Name
    final_version: Count | None = None
    learner_id: Text = ""

    def apply(self, state: State, now_s: float) -> Answer:
        learner_term = state.attach(
            self.policy_version, self.books, self.call_id, self.final_version, self.learner_id
        )
        state.registry.on_attach(now_s)
        return (AttachReply(learner_term, state.stats(now_s)),)


class TakeRequest(Struct, frozen=True, tag="take"):
    num_groups: NumGroups
    policy_version: PolicyVersion
    learner_term: Count
    wait_s: WaitSeconds
    with_payloads: bool
    num_held: Count | None = None

    def apply(self, state: State, now_s: float) -> Answer:
        term, num_held = self.learner_term, self.num_held
        taken = state.take(self.num_groups, self.policy_version, term, now_s, num_held)
        new = taken.headers[num_held or 0 :] if self.with_payloads else ()
        payloads = state.fetch([header.prompt_index for header in new])
        return (TakeReply(taken.headers, taken.wait_due_s), *payloads)


class FetchRequest(Struct, frozen=True, tag="fetch"):
    prompt_indices: Annotated[tuple[PromptIndex, ...], Meta(max_length=MAX_GROUPS)]

    def apply(self, state: State, now_s: float) -> Answer:
        return (Done(), *state.fetch(self.prompt_indices))


class AdvanceRequest(Struct, frozen=True, tag="advance"):
    policy_version: PolicyVersion
    learner_term: Count
    steered_bound: Count = 0

    def apply(self, state: State, now_s: float) -> Answer:
        state.ledger.advance(self.policy_version, self.learner_term, self.steered_bound)
        return (StatsReply(state.stats(now_s)),)


class AcknowledgeRequest(Struct, frozen=True, tag="acknowledge"):
    policy_version: PolicyVersion
    learner_term: Count

    def apply(self, state: State, now_s: float) -> Answer:
        state.ledger.acknowledge(self.policy_version, self.learner_term)
        return (Done(),)


class FinishRequest(Struct, frozen=True, tag="finish"):
    learner_term: Count

    def apply(self, state: State, now_s: float) -> Answer:
        state.finish(self.learner_term)
        return (Done(),)


class DrainRequest(OfRun, frozen=True, tag="drain"):
    """Grant only the leases that complete the last batch, until a learner attaches again."""

    def apply(self, state: State, now_s: float) -> Answer:
        state.ledger.draining = True
        return (Done(),)


class SchedulingStateRequest(OfRun, frozen=True, tag="scheduling_state"):
    generator_id: Name
    scheduling_state: SchedulingState

    def apply(self, state: State, now_s: float) -> Answer:
        state.registry.set_scheduling_state(self.generator_id, self.scheduling_state)
        return (Done(),)


class StatsRequest(OfRun, frozen=True, tag="stats"):
    def apply(self, state: State, now_s: float) -> Answer:
        return (StatsReply(state.stats(now_s)),)


StateRequest: TypeAlias = (
    LeaseRequest
    | PutSiblingRequest
    | FetchSiblingsRequest
    | ReleaseRequest
    | HeartbeatRequest
    | AttachRequest
    | TakeRequest
    | FetchRequest
    | LostRequest
    | AdvanceRequest
    | AcknowledgeRequest
    | FinishRequest
    | DrainRequest
    | SchedulingStateRequest
    | StatsRequest
)
"""Requests that need only the state, and a sibling's put, which also needs its payload."""

Request: TypeAlias = StateRequest | PutRequest

Reply: TypeAlias = (
    Done | LeaseReply | HeartbeatAnswer | AttachReply | TakeReply | StatsReply | ErrorReply
)


class RequestClient(ABC):
    """`streamrl.interfaces.TrajectoryBuffer` except `put` and `close`, which a backend adds."""

    def __init__(self, final_version: int | None = None, run_name: str = "") -> None:
        """`final_version` is the last version of a learner's run; None leaves it to the server. A
        buffer of a run other than `run_name` refuses the client; "" fits any run."""
        self._final_version = final_version
        self._run_name = run_name
        self._learner_term = 0

    @abstractmethod
    async def _call(
        self, request: StateRequest, expected: type[Expected], wait_s: float = 0.0, *payloads: bytes
    ) -> tuple[Expected, Sequence[Any]]:
        """Send a request; the reply and its payloads. Waits up to `wait_s` for one that is not
        empty."""

    @abstractmethod
    async def _groups(
        self, prompt_indices: Sequence[int], payloads: Sequence[Any]
    ) -> tuple[TrajectoryGroup, ...]:
        """The groups of these prompts, decoded from a reply's payloads."""

    async def lease(
        self, lease_ids: Sequence[str], generator_id: str, wait_s: float, learner_id: str = ""
    ) -> tuple[Lease, ...]:
        request = LeaseRequest(
            tuple(lease_ids), generator_id, wait_s, learner_id, run_name=self._run_name
        )
        return (await self._call(request, LeaseReply, wait_s))[0].leases

    async def release(self, lease_id: str, reason: DropReason, lengths: Sequence[int] = ()) -> None:
        await self._call(ReleaseRequest(lease_id, reason, tuple(lengths)), Done)

    async def put_sibling(self, sibling: SiblingHeader, payload: bytes) -> None:
        await self._call(PutSiblingRequest(sibling), Done, 0.0, payload)

    async def fetch_siblings(self, lease_id: str) -> tuple[bytes | memoryview, ...]:
        return tuple((await self._call(FetchSiblingsRequest(lease_id), Done))[1])

    async def heartbeat(self, status: GeneratorStatus) -> HeartbeatReply:
        request = HeartbeatRequest(status, run_name=self._run_name)
        return (await self._call(request, HeartbeatAnswer))[0].reply

    async def attach(
        self, policy_version: int, books: Books | None, learner_id: str = ""
    ) -> BufferStats:
        call_id, final_version = uuid.uuid4().hex, self._final_version
        request = AttachRequest(
            policy_version, books, call_id, final_version, learner_id, run_name=self._run_name
        )
        reply, _ = await self._call(request, AttachReply)
        self._learner_term = reply.learner_term
        return reply.stats

    async def take(
        self,
        num_groups: int,
        policy_version: int,
        wait_s: float,
        *,
        with_payloads: bool = False,
        num_held: int | None = None,
    ) -> TakenBatch:
        term = self._learner_term
        request = TakeRequest(num_groups, policy_version, term, wait_s, with_payloads, num_held)
        reply, payloads = await self._call(request, TakeReply, wait_s)
        new = reply.headers[num_held or 0 :] if with_payloads else ()
        groups = await self._groups([header.prompt_index for header in new], payloads)
        return TakenBatch(headers=reply.headers, groups=groups, wait_due_s=reply.wait_due_s)

    async def fetch(self, prompt_indices: Sequence[int]) -> tuple[TrajectoryGroup, ...]:
        _, payloads = await self._call(FetchRequest(tuple(prompt_indices)), Done)
        return await self._groups(prompt_indices, payloads)

    async def advance(self, policy_version: int, steered_bound: int = 0) -> BufferStats:
        request = AdvanceRequest(policy_version, self._learner_term, steered_bound)
        return (await self._call(request, StatsReply))[0].stats

    async def acknowledge(self, policy_version: int) -> None:
        await self._call(AcknowledgeRequest(policy_version, self._learner_term), Done)

    async def finish(self) -> None:
        await self._call(FinishRequest(self._learner_term), Done)

    async def drain(self) -> None:
        await self._call(DrainRequest(run_name=self._run_name), Done)

    async def set_scheduling_state(
        self, generator_id: str, scheduling_state: SchedulingState
    ) -> None:
        request = SchedulingStateRequest(generator_id, scheduling_state, run_name=self._run_name)
        await self._call(request, Done)

    async def stats(self) -> BufferStats:
        return (await self._call(StatsRequest(run_name=self._run_name), StatsReply))[0].stats
