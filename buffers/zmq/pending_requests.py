"""Pending requests: leases while admission is closed, takes while there are too few groups.

Invariant: they are answered in order of arrival, and a thousand of them cost no more than one until
a lease can be granted. There are at most MAX_LEASES and MAX_TAKES, MAX_BYTES in total, and
MAX_OF_SENDER per connection. Nothing here waits; `next_deadline_s` is when the server must look
next.
"""

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterator

from msgspec import Struct

from buffers import messages as m

MAX_LEASES = 2**14
MAX_TAKES = 64
MAX_OF_SENDER = 256
MAX_BYTES = 32 * 2**20


class PendingRequest(Struct, frozen=True):
    """A request of `num_bytes` that cannot be answered before `deadline_s`, unless the state
    changes."""

    sender: bytes
    request_id: bytes
    request: m.LeaseRequest | m.TakeRequest
    deadline_s: float
    num_bytes: int = 0


class PendingRequests:
    """Pending requests by number, in order of arrival; the heap of deadlines may contain answered
    ones."""

    def __init__(self) -> None:
        self._leases: dict[int, PendingRequest] = {}
        self._takes: dict[int, PendingRequest] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._numbers = itertools.count()
        self._per_sender: Counter[bytes] = Counter()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._leases) + len(self._takes)

    def add(self, pending: PendingRequest) -> bool:
        """Add a request if there is room; if not, false, and its answer is that there is nothing
        yet."""
        waiting, limit = self._leases, MAX_LEASES
        if isinstance(pending.request, m.TakeRequest):
            waiting, limit = self._takes, MAX_TAKES
        if (
            len(waiting) >= limit
            or self._per_sender[pending.sender] >= MAX_OF_SENDER
            or self._num_bytes + pending.num_bytes > MAX_BYTES
        ):
            return False
        number = next(self._numbers)
        waiting[number] = pending
        self._per_sender[pending.sender] += 1
        self._num_bytes += pending.num_bytes
        if len(self._deadlines) > 2 * len(self) + MAX_OF_SENDER:
            waits = self._leases.keys() | self._takes.keys()
            self._deadlines = sorted(item for item in self._deadlines if item[1] in waits)
        heapq.heappush(self._deadlines, (pending.deadline_s, number))
        return True

    def next_deadline_s(self) -> float | None:
        while self._deadlines:
            deadline_s, number = self._deadlines[0]
            if number in self._leases or number in self._takes:
                return deadline_s
            heapq.heappop(self._deadlines)
        return None

    def retry(self, attempt: Callable[[PendingRequest], bool], admits: Callable[[], bool]) -> None:
        """Attempt all takes, and leases while `admits` is true.

        `attempt` returns whether it answered the request; the others remain, in order.
        """
        always: Callable[[], bool] = lambda: True  # noqa: E731
        for waiting, is_open in ((self._takes, always), (self._leases, admits)):
            answered = []
            for number, pending in waiting.items():
                if not is_open():
                    break
                if attempt(pending):
                    answered.append(number)
            for number in answered:
                self._release(waiting.pop(number))

    def overdue(self, now_s: float) -> Iterator[PendingRequest]:
        """Remove and return the requests whose deadline has passed."""
        while (deadline_s := self.next_deadline_s()) is not None and deadline_s <= now_s:
            _, number = heapq.heappop(self._deadlines)
            waiting = self._leases if number in self._leases else self._takes
            pending = waiting.pop(number)
            self._release(pending)
            yield pending

    def forget_leases(self, generator_id: str, session: str) -> None:
        """Remove the lease requests of a session that ends: a lease granted to it would have to
        expire."""
        ended = [
            number
            for number, pending in self._leases.items()
            if isinstance(pending.request, m.LeaseRequest)
            # A thousand may leave at once, so look only at the session's own requests.
            and pending.request.generator_id == generator_id
            and any(name.partition("/")[0] == session for name in pending.request.lease_ids)
        ]
        for number in ended:
            self._release(self._leases.pop(number))

    def _release(self, pending: PendingRequest) -> None:
        """Stop counting a removed request."""
        self._num_bytes -= pending.num_bytes
        self._per_sender[pending.sender] -= 1
        if not self._per_sender[pending.sender]:
            del self._per_sender[pending.sender]
