"""The buffer inside one process, for tests and for loops of one's own; no `buffer.url` names it.

Invariant: it keeps the promises of every backend (`tests/contract`); nothing outlasts the process.
Groups are kept without encoding. All clients of one `MemoryBuffer` share its state; a learner's
term belongs to the client that attached, so `client()` makes another one.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from buffers import messages as m
from buffers.ledger.state import BufferState
from streamrl.types import GroupHeader, TrajectoryGroup


class MemoryBuffer(m.RequestClient):
    """One client of a shared state; implements `streamrl.interfaces.TrajectoryBuffer`."""

    def __init__(
        self,
        state: BufferState[TrajectoryGroup],
        changed: asyncio.Condition | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._state = state
        self._changed = changed or asyncio.Condition()
        self._clock = clock

    def client(self) -> "MemoryBuffer":
        """Another client of the same buffer."""
        return MemoryBuffer(self._state, self._changed, self._clock)

    async def put(self, lease_id: str, group: TrajectoryGroup) -> None:
        self._state.put(lease_id, GroupHeader.of(group), group, self._clock())
        await self._notify()

    async def close(self) -> None:
        """Nothing to close: it holds no socket and no task."""

    async def _groups(
        self, prompt_indices: Sequence[int], payloads: Sequence[TrajectoryGroup]
    ) -> tuple[TrajectoryGroup, ...]:
        return tuple(payloads)

    async def _call(
        self,
        request: m.StateRequest,
        expected: type[m.Expected],
        wait_s: float = 0.0,
        *payloads: bytes,
    ) -> tuple[m.Expected, Sequence[Any]]:
        if isinstance(request, m.LeaseRequest | m.TakeRequest):
            reply, *fetched = await self._wait_for(request, self._clock() + wait_s)
        else:
            reply, *fetched = self._apply(request, *payloads)
            await self._notify()
        assert isinstance(reply, expected)
        return reply, fetched

    async def _wait_for(self, request: m.LeaseRequest | m.TakeRequest, deadline: float) -> m.Answer:
        """Waits for a reply that is not empty, looking again at any change or expiry, until the
        deadline."""
        async with self._changed:
            while True:
                revision = self._state.ledger.entries.revision
                answer = self._apply(request)
                if self._state.ledger.entries.revision != revision:
                    # A take that drops groups makes room for leases.
                    self._changed.notify_all()
                if not answer[0].is_empty or self._clock() >= deadline:
                    return answer
                expiry_s = self._state.ledger.next_expiry_s() or deadline
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(deadline, expiry_s) - self._clock()):
                        await self._changed.wait()

    def _apply(self, request: m.StateRequest, *payloads: bytes) -> m.Answer:
        now_s = self._clock()
        self._state.expire(now_s)
        return request.apply(self._state, now_s, *payloads)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
