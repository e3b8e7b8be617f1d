"""`memory://`: the buffer inside one process, for tests and for loops in a single process.

Invariant: it keeps the promises of every backend (`tests/contract`); nothing outlasts the process.
Groups are kept as they are, without encoding. All clients of one `MemoryBuffer` share its state; a
learner's term belongs to the client that attached, so `client()` makes further ones.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from buffers.ledger.state import BufferState
from streamrl.types import (
    Books,
    BufferStats,
    DropReason,
    GeneratorStatus,
    GroupHeader,
    HeartbeatReply,
    Lease,
    Loan,
    SchedulingState,
    TrajectoryGroup,
)

Result = TypeVar("Result")


class MemoryBuffer:
    """One client's view of a shared state; implements `streamrl.interfaces.TrajectoryBuffer`."""

    def __init__(
        self,
        state: BufferState[TrajectoryGroup],
        changed: asyncio.Condition | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state = state
        self._changed = changed or asyncio.Condition()
        self._clock = clock
        self._learner_term = 0

    def client(self) -> "MemoryBuffer":
        """Another client of the same buffer."""
        return MemoryBuffer(self._state, self._changed, self._clock)

    async def lease(
        self, lease_ids: Sequence[str], generator_id: str, wait_s: float
    ) -> tuple[Lease, ...]:
        def attempt() -> tuple[Lease, ...]:
            return self._state.lease(lease_ids, generator_id, self._clock())

        return await self._wait_for(attempt, wait_s)

    async def put(self, lease_id: str, group: TrajectoryGroup) -> None:
        self._state.put(lease_id, GroupHeader.of(group), group, self._clock())
        await self._notify()

    async def release(self, lease_id: str, reason: DropReason) -> None:
        self._state.release(lease_id, reason)
        await self._notify()

    async def heartbeat(self, status: GeneratorStatus) -> HeartbeatReply:
        reply = self._state.heartbeat(status, self._clock())
        await self._notify()
        return reply

    async def attach(self, policy_version: int, books: Books | None) -> BufferStats:
        self._learner_term = self._state.attach(policy_version, books)
        await self._notify()
        return self._state.stats(self._clock())

    async def take(
        self,
        num_groups: int,
        policy_version: int,
        wait_s: float,
        *,
        with_payloads: bool = False,
    ) -> Loan:
        def attempt() -> tuple[GroupHeader, ...]:
            return self._state.take(num_groups, policy_version, self._learner_term)

        headers = await self._wait_for(attempt, wait_s)
        wanted = [header.prompt_index for header in headers] if with_payloads else []
        return Loan(headers=headers, groups=self._state.fetch(wanted))

    async def fetch(self, prompt_indices: Sequence[int]) -> tuple[TrajectoryGroup, ...]:
        return self._state.fetch(prompt_indices)

    async def advance(self, policy_version: int) -> BufferStats:
        self._state.advance(policy_version, self._learner_term)
        await self._notify()
        return await self.stats()

    async def acknowledge(self, policy_version: int) -> None:
        self._state.acknowledge(policy_version, self._learner_term)

    async def finish(self) -> None:
        self._state.finish(self._learner_term)

    async def drain(self) -> None:
        self._state.drain()

    async def set_scheduling_state(
        self, generator_id: str, scheduling_state: SchedulingState
    ) -> None:
        self._state.set_scheduling_state(generator_id, scheduling_state)
        await self._notify()

    async def stats(self) -> BufferStats:
        self._state.expire(self._clock())
        return self._state.stats(self._clock())

    async def close(self) -> None:
        """It holds no socket and no task."""

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _wait_for(self, attempt: Callable[[], Result], wait_s: float) -> Result:
        """Waits for an answer that is not empty; any change, an expiry, or `wait_s` unblocks."""
        deadline = self._clock() + wait_s
        async with self._changed:
            while True:
                self._state.expire(self._clock())
                answer = attempt()
                if answer or self._clock() >= deadline:
                    return answer
                expiry_s = self._state.ledger.next_expiry_s() or deadline
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(deadline, expiry_s) - self._clock()):
                        await self._changed.wait()
