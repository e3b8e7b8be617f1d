"""Two orders over the ledger's entries: the ready queue, and the leases by expiry.

Invariant: every BUFFERED entry is in the ready queue, every LEASED one in the expiries. Entries of
other states may remain in the heaps and are skipped when they come up, so removal costs nothing.
"""

import heapq
from collections import deque
from collections.abc import Iterable
from typing import TypeAlias

from buffers.ledger.entries import Entries
from buffers.ledger.entry import Entry, State, header_of

Position: TypeAlias = tuple[int, int]


def in_order(entries: Iterable[Entry]) -> list[Entry]:
    """In the order of the ready queue, which is also the order of lending."""
    return sorted(
        entries, key=lambda e: (-1 if e.header is None else e.header.oldest_version, e.prompt_index)
    )


class ReadyQueue:
    """The BUFFERED groups by their oldest policy version, then by prompt.

    Groups mostly arrive in order, and a deque's ends cost the same at any length; a heap of all
    groups costs three times more at 100,000 than at 100. So only what arrives late is in a heap.
    """

    def __init__(self, entries: Entries) -> None:
        self._entries = entries
        self._in_order: deque[Position] = deque()
        self._late: list[Position] = []

    def add(self, entry: Entry) -> None:
        position = (header_of(entry).oldest_version, entry.prompt_index)
        if not self._in_order or position >= self._in_order[-1]:
            self._in_order.append(position)
        else:
            heapq.heappush(self._late, position)

    def first(self) -> Entry | None:
        """The oldest group; it stays in the queue until its state changes."""
        while self._in_order or self._late:
            is_late = bool(self._late) and not (
                self._in_order and self._in_order[0] <= self._late[0]
            )
            oldest, prompt_index = self._late[0] if is_late else self._in_order[0]
            entry = self._entries.get(prompt_index)
            if (
                entry
                and entry.state is State.BUFFERED
                and header_of(entry).oldest_version == oldest
            ):
                return entry
            if is_late:
                heapq.heappop(self._late)
            else:
                self._in_order.popleft()
        return None


class Expiries:
    """The leases by expiry time; a renewed one is contained twice."""

    def __init__(self, entries: Entries) -> None:
        self._entries = entries
        self._heap: list[tuple[float, str]] = []

    def add(self, entry: Entry) -> None:
        heapq.heappush(self._heap, (entry.expires_at_s, entry.lease_id))

    def pop_due(self, now_s: float) -> list[Entry]:
        """The leases that have expired."""
        due: dict[str, Entry] = {}
        while self._heap and self._heap[0][0] <= now_s:
            _, lease_id = heapq.heappop(self._heap)
            entry = self._entries.find(lease_id)
            if entry and entry.state is State.LEASED and entry.expires_at_s <= now_s:
                due[lease_id] = entry
        return list(due.values())

    def next_s(self) -> float | None:
        """When `pop_due` may next have something."""
        return self._heap[0][0] if self._heap else None
