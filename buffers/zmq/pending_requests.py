"""Pending requests: leases while admission is closed, takes while there are too few groups.

Invariant: they are answered in the order of arrival, and a thousand of them cost no more than one
until a lease can be granted. Nothing here waits; `next_deadline_s` is when the server must look.
"""

import heapq
import itertools
from collections.abc import Callable, Iterator

from msgspec import Struct

from buffers import messages as m


class PendingRequest(Struct, frozen=True):
    """A request that cannot be answered yet; its deadline is `deadline_s`."""

    sender: bytes
    request_id: bytes
    request: m.LeaseRequest | m.TakeRequest
    deadline_s: float


class PendingRequests:
    """By number, in the order of arrival; the heap of deadlines may contain answered ones."""

    def __init__(self) -> None:
        self._leases: dict[int, PendingRequest] = {}
        self._takes: dict[int, PendingRequest] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._leases) + len(self._takes)

    def add(self, pending: PendingRequest) -> None:
        number = next(self._numbers)
        waiting = self._leases if isinstance(pending.request, m.LeaseRequest) else self._takes
        waiting[number] = pending
        heapq.heappush(self._deadlines, (pending.deadline_s, number))

    def next_deadline_s(self) -> float | None:
        while self._deadlines:
            deadline_s, number = self._deadlines[0]
            if number in self._leases or number in self._takes:
                return deadline_s
            heapq.heappop(self._deadlines)
        return None

    def retry(self, attempt: Callable[[PendingRequest], bool], admits: Callable[[], bool]) -> None:
        """Attempt all takes, and leases while `admits` is true.

        `attempt` returns whether it answered; the others remain, in their order.
        """
        _retry(self._takes, attempt, lambda: True)
        _retry(self._leases, attempt, admits)

    def overdue(self, now_s: float) -> Iterator[PendingRequest]:
        """The requests whose deadline has passed, which are removed."""
        while (deadline_s := self.next_deadline_s()) is not None and deadline_s <= now_s:
            _, number = heapq.heappop(self._deadlines)
            waiting = self._leases if number in self._leases else self._takes
            yield waiting.pop(number)

    def forget_leases(self, session: str) -> None:
        """Remove those of a session that ends: a lease granted to it would have to expire."""
        self._leases = {
            number: pending
            for number, pending in self._leases.items()
            if not (
                isinstance(pending.request, m.LeaseRequest)
                and any(name.startswith(session) for name in pending.request.lease_ids)
            )
        }


def _retry(
    waiting: dict[int, PendingRequest],
    attempt: Callable[[PendingRequest], bool],
    is_open: Callable[[], bool],
) -> None:
    answered = []
    for number, pending in waiting.items():
        if not is_open():
            break
        if attempt(pending):
            answered.append(number)
    for number in answered:
        del waiting[number]
