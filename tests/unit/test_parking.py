"""Requests that wait at a buffer: in order, on time, and at no cost while nothing is granted."""

from buffers import messages as m
from buffers.parking import Parked, Parking

FAR_S = 1e9


def _lease(number: int, deadline_s: float = FAR_S) -> Parked:
    request = m.LeaseRequest(f"session{number}/0", f"gen-{number}", 5.0)
    return Parked(b"sender", number.to_bytes(8, "little"), request, deadline_s)


def _take(deadline_s: float = FAR_S) -> Parked:
    return Parked(b"learner", b"take", m.TakeRequest(1, 0, 1, 5.0), deadline_s)


class _Buffer:
    """Grants `room` leases, never to those it `refuses`, and has no batch for a take."""

    def __init__(self, room: int, refuses: tuple[Parked, ...] = ()) -> None:
        self.room = room
        self.refuses = refuses
        self.asked: list[Parked] = []
        self.granted: list[Parked] = []

    def admits(self) -> bool:
        return self.room > 0

    def attempt(self, parked: Parked) -> bool:
        self.asked.append(parked)
        is_granted = isinstance(parked.request, m.LeaseRequest) and parked not in self.refuses
        if is_granted:
            self.room -= 1
            self.granted.append(parked)
        return is_granted


def test_who_asked_first_is_answered_first_and_only_as_many_as_there_is_room_for() -> None:
    parking, leases = Parking(), [_lease(number) for number in range(5)]
    for parked in leases:
        parking.add(parked)
    first, second = _Buffer(2), _Buffer(9)
    parking.retry(first.attempt, first.admits)
    parking.retry(second.attempt, second.admits)
    assert first.granted == leases[:2]
    assert second.granted == leases[2:]


def test_a_thousand_leases_cost_no_attempt_while_admission_is_closed() -> None:
    parking, take, buffer = Parking(), _take(), _Buffer(0)
    for number in range(1000):
        parking.add(_lease(number))
    parking.add(take)
    parking.retry(buffer.attempt, buffer.admits)
    assert buffer.asked == [take]


def test_one_that_is_refused_keeps_its_place_and_does_not_hold_up_the_others() -> None:
    parking, cordoned, other = Parking(), _lease(0), _lease(1)
    parking.add(cordoned)
    parking.add(other)
    parking.add(last := _lease(2))
    buffer = _Buffer(1, refuses=(cordoned,))
    parking.retry(buffer.attempt, buffer.admits)
    assert buffer.granted == [other]
    buffer = _Buffer(2)
    parking.retry(buffer.attempt, buffer.admits)
    assert buffer.granted == [cordoned, last]


def test_who_waited_long_enough_is_overdue_once_and_never_granted() -> None:
    parking, early, late = Parking(), _lease(0, 10.0), _lease(1, 20.0)
    parking.add(late)
    parking.add(early)
    assert parking.next_deadline_s() == 10.0
    assert list(parking.overdue(9.9)) == []
    assert list(parking.overdue(10.0)) == [early]
    assert parking.next_deadline_s() == 20.0
    buffer = _Buffer(5)
    parking.retry(buffer.attempt, buffer.admits)
    assert buffer.granted == [late]
    assert parking.next_deadline_s() is None
    assert list(parking.overdue(FAR_S)) == []


def test_nobody_who_has_left_is_kept_however_long_admission_stays_closed() -> None:
    parking, buffer = Parking(), _Buffer(0)
    parking.add(_lease(0))
    for now_s in range(1000):
        parking.add(_lease(now_s + 1, now_s + 5.0))
        parking.retry(buffer.attempt, buffer.admits)
        list(parking.overdue(float(now_s)))
    assert len(parking) == 1 + 5


def test_the_leases_of_a_session_that_left_are_forgotten() -> None:
    parking, left, stays = Parking(), _lease(0), _lease(1)
    parking.add(left)
    parking.add(stays)
    parking.forget_leases("session0")
    buffer = _Buffer(5)
    parking.retry(buffer.attempt, buffer.admits)
    assert buffer.granted == [stays]
