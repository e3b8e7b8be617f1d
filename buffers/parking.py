"""Requests that wait: leases while admission is closed, takes while a batch is not there.

Invariant: who asked first is answered first, and a thousand that wait cost no more than one until
something can be granted. Only `buffers.zmq_server` calls it.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterator

from msgspec import Struct

from buffers import messages as m


class Parked(Struct, eq=False):
    """A request that waits for the state to change, at most until `deadline_s`."""

    sender: bytes
    request_id: bytes
    request: m.LeaseRequest | m.TakeRequest
    deadline_s: float
    is_over: bool = False


class Parking:
    """Those that are over may be left in the queues, and are thrown away when they come up."""

    def __init__(self) -> None:
        self._leases: deque[Parked] = deque()
        self._takes: deque[Parked] = deque()
        self._deadlines: list[tuple[float, int, Parked]] = []
        self._numbers = itertools.count()

    def add(self, parked: Parked) -> None:
        queue = self._leases if isinstance(parked.request, m.LeaseRequest) else self._takes
        queue.append(parked)
        heapq.heappush(self._deadlines, (parked.deadline_s, next(self._numbers), parked))

    def next_deadline_s(self) -> float | None:
        while self._deadlines and self._deadlines[0][2].is_over:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def retry(self, attempt: Callable[[Parked], bool], admits: Callable[[], bool]) -> None:
        """Attempt what may be granted now: all takes, and leases for as long as one is admitted.

        `attempt` says whether it answered; the others keep their places.
        """
        _retry(self._takes, attempt, lambda: True)
        _retry(self._leases, attempt, admits)

    def overdue(self, now_s: float) -> Iterator[Parked]:
        """Those whose time is over; they wait no longer."""
        while (deadline_s := self.next_deadline_s()) is not None and deadline_s <= now_s:
            parked = heapq.heappop(self._deadlines)[2]
            parked.is_over = True
            yield parked

    def forget_leases(self, session: str) -> None:
        """Nobody will hear the answers, and a lease granted to nobody would have to expire."""
        for parked in self._leases:
            request = parked.request
            if isinstance(request, m.LeaseRequest) and request.lease_id.startswith(session):
                parked.is_over = True


def _retry(
    queue: deque[Parked], attempt: Callable[[Parked], bool], is_open: Callable[[], bool]
) -> None:
    kept = []
    while queue and is_open():
        parked = queue.popleft()
        if not parked.is_over:
            parked.is_over = attempt(parked)
            if not parked.is_over:
                kept.append(parked)
    queue.extendleft(reversed(kept))
