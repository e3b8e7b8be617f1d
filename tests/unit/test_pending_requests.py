"""Requests that wait at a buffer: in order, on time, and at no cost while nothing is granted."""

from collections.abc import Iterable, Iterator

import pytest
from msgspec.structs import replace

from buffers import messages as m
from buffers.zmq import pending_requests as module
from buffers.zmq.pending_requests import PendingRequest, PendingRequests

FAR_S = 1e9


def _lease(number: int, deadline_s: float = FAR_S) -> PendingRequest:
    lease_ids = (f"session{number}/0", f"session{number}/1")
    request = m.LeaseRequest(lease_ids, f"gen-{number}", 5.0)
    sender = b"sender%d" % number
    return PendingRequest(sender, number.to_bytes(8, "little"), request, deadline_s)


def _take() -> PendingRequest:
    return PendingRequest(b"learner", b"take", m.TakeRequest(1, 0, 1, 5.0, False), FAR_S)


class _Buffer:
    """Grants `room` leases, never to those it `refuses`, and has no batch for a take."""

    def __init__(self, room: int, refuses: tuple[PendingRequest, ...] = ()) -> None:
        self.room = room
        self.refuses = refuses
        self.asked: list[PendingRequest] = []
        self.granted: list[PendingRequest] = []

    def admits(self) -> bool:
        return self.room > 0

    def attempt(self, pending: PendingRequest) -> bool:
        self.asked.append(pending)
        is_granted = isinstance(pending.request, m.LeaseRequest) and pending not in self.refuses
        if is_granted:
            self.room -= 1
            self.granted.append(pending)
        return is_granted


def test_who_asked_first_is_answered_first_and_only_as_many_as_there_is_room_for() -> None:
    pending_requests, leases = PendingRequests(), [_lease(number) for number in range(5)]
    for pending in leases:
        pending_requests.add(pending)
    first, second = _Buffer(2), _Buffer(9)
    pending_requests.retry(first.attempt, first.admits)
    pending_requests.retry(second.attempt, second.admits)
    assert first.granted == leases[:2]
    assert second.granted == leases[2:]


def test_a_thousand_leases_cost_no_attempt_while_admission_is_closed() -> None:
    pending_requests, take, buffer = PendingRequests(), _take(), _Buffer(0)
    for number in range(1000):
        pending_requests.add(_lease(number))
    pending_requests.add(take)
    pending_requests.retry(buffer.attempt, buffer.admits)
    assert buffer.asked == [take]


def test_one_that_is_refused_keeps_its_place_and_does_not_hold_up_the_others() -> None:
    pending_requests, cordoned, other = PendingRequests(), _lease(0), _lease(1)
    pending_requests.add(cordoned)
    pending_requests.add(other)
    pending_requests.add(last := _lease(2))
    buffer = _Buffer(1, refuses=(cordoned,))
    pending_requests.retry(buffer.attempt, buffer.admits)
    assert buffer.granted == [other]
    buffer = _Buffer(2)
    pending_requests.retry(buffer.attempt, buffer.admits)
    assert buffer.granted == [cordoned, last]


def test_who_waited_long_enough_is_overdue_once_and_never_granted() -> None:
    pending_requests, early, late = PendingRequests(), _lease(0, 10.0), _lease(1, 20.0)
    pending_requests.add(late)
    pending_requests.add(early)
    assert pending_requests.next_deadline_s() == 10.0
    assert list(pending_requests.overdue(9.9)) == []
    assert list(pending_requests.overdue(10.0)) == [early]
    assert pending_requests.next_deadline_s() == 20.0
    buffer = _Buffer(5)
    pending_requests.retry(buffer.attempt, buffer.admits)
    assert buffer.granted == [late]
    assert pending_requests.next_deadline_s() is None
    assert list(pending_requests.overdue(FAR_S)) == []


def test_nobody_who_has_left_is_kept_however_long_admission_stays_closed() -> None:
    pending_requests, buffer = PendingRequests(), _Buffer(0)
    pending_requests.add(_lease(0))
    for now_s in range(1000):
        pending_requests.add(_lease(now_s + 1, now_s + 5.0))
        pending_requests.retry(buffer.attempt, buffer.admits)
        list(pending_requests.overdue(float(now_s)))
    assert len(pending_requests) == 1 + 5
    assert len(pending_requests._per_sender) == 1 + 5


def test_more_than_there_is_room_for_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LEASES", 2)
    monkeypatch.setattr(module, "MAX_TAKES", 1)
    pending_requests = PendingRequests()
    assert [pending_requests.add(_lease(number)) for number in range(3)] == [True, True, False]
    assert [pending_requests.add(_take()) for _ in range(2)] == [True, False]


def test_many_that_were_answered_behind_one_that_waits_are_forgotten_at_little_cost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: list[int] = []

    def counted(items: Iterable[tuple[float, int]]) -> list[tuple[float, int]]:
        in_order = sorted(items)
        sizes.append(len(in_order))
        return in_order

    monkeypatch.setattr(module, "sorted", counted, raising=False)
    pending_requests, cordoned = PendingRequests(), _lease(0, 0.0)
    pending_requests.add(cordoned)
    for number in range(1, 3000):
        pending_requests.add(_lease(number))
    for number in range(3000, 10_000):
        buffer = _Buffer(1, refuses=(cordoned,))
        pending_requests.retry(buffer.attempt, buffer.admits)
        pending_requests.add(_lease(number))
    assert len(pending_requests) == 3000
    assert len(pending_requests._deadlines) < 3 * 3000
    assert sum(sizes) < 2 * 10_000, "not for each request anew"


def test_the_leases_of_a_session_that_left_are_forgotten() -> None:
    pending_requests, left, stays = PendingRequests(), _lease(0), _lease(1)
    pending_requests.add(left)
    pending_requests.add(stays)
    pending_requests.forget_leases("gen-0", "session0")
    buffer = _Buffer(5)
    pending_requests.retry(buffer.attempt, buffer.admits)
    assert buffer.granted == [stays]


def test_of_many_that_wait_only_the_leases_of_the_generator_that_leaves_are_looked_at() -> None:
    looked_at: list[str] = []

    class Names(tuple[str, ...]):
        __slots__ = ()

        def __iter__(self) -> Iterator[str]:
            looked_at.append(self[0])
            return super().__iter__()

    pending_requests = PendingRequests()
    for number in range(1000):
        waits = _lease(number)
        assert isinstance(waits.request, m.LeaseRequest)
        request = replace(waits.request, lease_ids=Names(waits.request.lease_ids))
        pending_requests.add(replace(waits, request=request))
    for number in range(500):
        pending_requests.forget_leases(f"gen-{number}", f"session{number}")
    assert len(pending_requests) == len(looked_at) == 500
