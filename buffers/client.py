"""The calls of a buffer's client as requests; a backend carries them to the buffer's state.

Invariant: a request may be repeated. A learner's term belongs to the client that attached.
"""

import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeVar

from buffers import messages as m
from streamrl.types import (
    Books,
    BufferStats,
    DropReason,
    GeneratorStatus,
    HeartbeatReply,
    Lease,
    SchedulingState,
    SiblingHeader,
    TakenBatch,
    TrajectoryGroup,
)

Reply = TypeVar("Reply")


class RequestClient(ABC):
    """`streamrl.interfaces.TrajectoryBuffer` but for `put` and `close`, which a backend adds."""

    def __init__(self, final_version: int | None = None, run_name: str = "") -> None:
        """`final_version` is the last one of a learner's run; None leaves it to the server. A
        buffer of another run than `run_name` refuses the client; "" is of any."""
        self._final_version = final_version
        self._run_name = run_name
        self._learner_term = 0

    @abstractmethod
    async def _call(
        self, request: m.StateRequest, expected: type[Reply], wait_s: float = 0.0, *payloads: bytes
    ) -> tuple[Reply, Sequence[Any]]:
        """The reply and its payloads. Waits up to `wait_s` for one that is not empty."""

    @abstractmethod
    async def _groups(
        self, prompt_indices: Sequence[int], payloads: Sequence[Any]
    ) -> tuple[TrajectoryGroup, ...]:
        """The groups of these prompts, from the payloads of a reply."""

    async def lease(
        self, lease_ids: Sequence[str], generator_id: str, wait_s: float, learner_id: str = ""
    ) -> tuple[Lease, ...]:
        request = m.LeaseRequest(
            tuple(lease_ids), generator_id, wait_s, learner_id, run_name=self._run_name
        )
        return (await self._call(request, m.LeaseReply, wait_s))[0].leases

    async def release(self, lease_id: str, reason: DropReason, lengths: Sequence[int] = ()) -> None:
        await self._call(m.ReleaseRequest(lease_id, reason, tuple(lengths)), m.Done)

    async def put_sibling(self, sibling: SiblingHeader, payload: bytes) -> None:
        await self._call(m.PutSiblingRequest(sibling), m.Done, 0.0, payload)

    async def fetch_siblings(self, lease_id: str) -> tuple[bytes | memoryview, ...]:
        return tuple((await self._call(m.FetchSiblingsRequest(lease_id), m.Done))[1])

    async def heartbeat(self, status: GeneratorStatus) -> HeartbeatReply:
        request = m.HeartbeatRequest(status, run_name=self._run_name)
        return (await self._call(request, m.HeartbeatAnswer))[0].reply

    async def attach(
        self, policy_version: int, books: Books | None, learner_id: str = ""
    ) -> BufferStats:
        call_id, final_version = uuid.uuid4().hex, self._final_version
        request = m.AttachRequest(
            policy_version, books, call_id, final_version, learner_id, run_name=self._run_name
        )
        reply, _ = await self._call(request, m.AttachReply)
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
        request = m.TakeRequest(num_groups, policy_version, term, wait_s, with_payloads, num_held)
        reply, payloads = await self._call(request, m.TakeReply, wait_s)
        new = reply.headers[num_held or 0 :] if with_payloads else ()
        groups = await self._groups([header.prompt_index for header in new], payloads)
        return TakenBatch(headers=reply.headers, groups=groups, wait_due_s=reply.wait_due_s)

    async def fetch(self, prompt_indices: Sequence[int]) -> tuple[TrajectoryGroup, ...]:
        _, payloads = await self._call(m.FetchRequest(tuple(prompt_indices)), m.Done)
        return await self._groups(prompt_indices, payloads)

    async def advance(self, policy_version: int, steered_bound: int = 0) -> BufferStats:
        request = m.AdvanceRequest(policy_version, self._learner_term, steered_bound)
        return (await self._call(request, m.StatsReply))[0].stats

    async def acknowledge(self, policy_version: int) -> None:
        await self._call(m.AcknowledgeRequest(policy_version, self._learner_term), m.Done)

    async def finish(self) -> None:
        await self._call(m.FinishRequest(self._learner_term), m.Done)

    async def drain(self) -> None:
        await self._call(m.DrainRequest(run_name=self._run_name), m.Done)

    async def set_scheduling_state(
        self, generator_id: str, scheduling_state: SchedulingState
    ) -> None:
        request = m.SchedulingStateRequest(generator_id, scheduling_state, run_name=self._run_name)
        await self._call(request, m.Done)

    async def stats(self) -> BufferStats:
        return (await self._call(m.StatsRequest(run_name=self._run_name), m.StatsReply))[0].stats
