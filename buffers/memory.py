"""`memory://`: the buffer inside one process, for tests and for loops in a single process.

Same promises as every backend (`tests/contract`); nothing survives the process. Groups are kept as
they are, without encoding. Every client of one `MemoryBuffer` shares its state; a learner's term
belongs to the client that attached, so `client()` makes further ones.
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
    SchedulingState,
    TrajectoryGroup,
)

Answer = TypeVar("Answer")


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

    async def lease(self, lease_id: str, generator_id: str, wait_s: float) -> Lease | None:
        def attempt() -> Lease | None:
            return self._state.lease(lease_id, generator_id, self._clock())

        return await self._when(attempt, wait_s)

    async def put(self, lease_id: str, group: TrajectoryGroup) -> None:
        self._state.put(lease_id, GroupHeader.of(group), group, self._clock())
        await self._announce()

    async def release(self, lease_id: str, reason: DropReason) -> None:
        self._state.release(lease_id, reason)
        await self._announce()

    async def heartbeat(self, status: GeneratorStatus) -> HeartbeatReply:
        reply = self._state.heartbeat(status, self._clock())
        await self._announce()
        return reply

    async def attach(self, policy_version: int, books: Books | None) -> BufferStats:
        self._learner_term = self._state.attach(policy_version, books)
        await self._announce()
        return self._state.stats(self._clock())

    async def take(
        self, num_groups: int, policy_version: int, wait_s: float
    ) -> tuple[GroupHeader, ...]:
        def attempt() -> tuple[GroupHeader, ...] | None:
            return self._state.take(num_groups, policy_version, self._learner_term) or None

        return await self._when(attempt, wait_s) or ()

    async def fetch(self, prompt_indices: Sequence[int]) -> tuple[TrajectoryGroup, ...]:
        return self._state.fetch(prompt_indices)

    async def advance(self, policy_version: int) -> Books:
        books = self._state.advance(policy_version, self._learner_term)
        await self._announce()
        return books

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
        await self._announce()

    async def stats(self) -> BufferStats:
        self._state.expire(self._clock())
        return self._state.stats(self._clock())

    async def close(self) -> None:
        """Nothing to let go of."""

    async def _announce(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _when(self, attempt: Callable[[], Answer | None], wait_s: float) -> Answer | None:
        """Waits until `attempt` answers; unblocked by any change, an expiry, or `wait_s`."""
        deadline = self._clock() + wait_s
        async with self._changed:
            while True:
                self._state.expire(self._clock())
                answer = attempt()
                if answer is not None or self._clock() >= deadline:
                    return answer
                expiry_s = self._state.ledger.next_expiry_s() or deadline
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(deadline, expiry_s) - self._clock()):
                        await self._changed.wait()
