"""Who is told when that a run is over: whoever joins an ended one, and whoever follows one."""

import threading
from pathlib import Path

from buffers.ledger.state import RESUMES_WITHIN_S, BufferState
from buffers.redis.run_end import RunEnd
from buffers.zmq.client import ZmqBuffer
from buffers.zmq.server import (
    ASKED_WITHIN_S,
    MAX_OBSERVERS,
    SHUTDOWN_GRACE_S,
    Observers,
    ZmqBufferServer,
)
from tests.unit.test_ledger import make_ledger

DEADLINE_S = 30.0


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_client_that_joins_an_ended_run_gives_a_learner_time_to_go_on_with_it():
    clock = Clock()
    end = RunEnd(clock)
    assert not end.is_over(True, 1)
    clock.now_s = RESUMES_WITHIN_S - 1
    assert not end.is_over(True, 1)
    clock.now_s = RESUMES_WITHIN_S
    assert end.is_over(True, 1)
    assert not end.is_over(False, 1)


def test_a_client_that_saw_the_run_go_on_ends_with_it():
    end = RunEnd(Clock())
    assert [end.is_over(finished, 1) for finished in (True, False, True)] == [False, False, True]


def test_a_client_knows_by_the_term_that_a_learner_came_and_ended_unseen():
    end = RunEnd(Clock())
    assert [end.is_over(True, term) for term in (1, 1, 2, 2)] == [False, False, True, True]


def test_observers_are_waited_for_until_they_know_or_are_silent():
    observers = Observers()
    assert not observers.are_waiting(0.0)
    observers.note(b"a", 0.0, is_over=False)
    observers.note(b"b", 1.0, is_over=False)
    observers.note(b"b", 2.0, is_over=True)
    assert observers.are_waiting(ASKED_WITHIN_S - 0.1)
    assert not observers.are_waiting(ASKED_WITHIN_S)
    for i in range(2 * MAX_OBSERVERS):
        observers.note(b"%d" % i, 9.0, is_over=False)
    for i in range(MAX_OBSERVERS, 2 * MAX_OBSERVERS):
        observers.note(b"%d" % i, 9.0, is_over=True)
    assert not observers.are_waiting(9.0)


async def test_a_server_stays_for_who_does_not_know_that_the_run_is_over(tmp_path: Path):
    clock = Clock()
    state = BufferState[bytes](make_ledger(), lease_ttl_s=9.0)
    server = ZmqBufferServer(state, "zmq://127.0.0.1:0", quarantine=tmp_path, clock=clock)
    serving = threading.Thread(
        target=server.serve, args=(threading.Event(),), kwargs={"until_complete": True}
    )
    serving.start()
    learner, validator = (ZmqBuffer(server.url, deadline_s=DEADLINE_S) for _ in range(2))
    await learner.attach(0, None)
    assert not (await learner.stats()).is_over
    assert not (await validator.stats()).is_over
    await learner.finish()
    clock.now_s = 2 * SHUTDOWN_GRACE_S
    serving.join(0.5)
    assert serving.is_alive()
    assert (await validator.stats()).is_over
    clock.now_s += SHUTDOWN_GRACE_S
    serving.join(DEADLINE_S)
    assert not serving.is_alive()
    for client in (learner, validator):
        await client.close()
