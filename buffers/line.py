"""The waiting groups, oldest first: what arrives in order waits in a queue, the rest in a heap.

Invariant: both are sorted, so the oldest is at the front of one of them. Groups mostly come in
order, and a queue's ends cost the same at any length; a heap of everything costs three times more
at 100,000 than at 100. Owned by `buffers.ledger`.
"""

import heapq
from collections import deque
from typing import TypeAlias

Place: TypeAlias = tuple[int, int]


class Line:
    """Places are (oldest version, sequence)."""

    def __init__(self) -> None:
        self._in_order: deque[Place] = deque()
        self._late: list[Place] = []

    def push(self, place: Place) -> None:
        if not self._in_order or place >= self._in_order[-1]:
            self._in_order.append(place)
        else:
            heapq.heappush(self._late, place)

    def first(self) -> Place | None:
        if self._late and (not self._in_order or self._late[0] < self._in_order[0]):
            return self._late[0]
        return self._in_order[0] if self._in_order else None

    def pop(self) -> Place:
        """Takes out `first()`; there has to be one."""
        if self._late and (not self._in_order or self._late[0] < self._in_order[0]):
            return heapq.heappop(self._late)
        return self._in_order.popleft()
