"""The restart budget of a process, on a clock of the test's own."""

import signal

import pytest

from streamrl.cli.processes.restarts import (
    FIRST_DELAY_S,
    HEALTHY_S,
    LONGEST_DELAY_S,
    RestartBudget,
    sentence_of,
)
from streamrl.config.run import RunSettings
from streamrl.errors import (
    ErrorRecord,
    RolloutError,
    StreamRLError,
    TransportError,
)

KILLED = -signal.SIGKILL


class Process:
    """One that runs and fails as the test says; `delays` are the waits before its restarts."""

    def __init__(self, step: int = 0, **settings: object) -> None:
        self.now_s = 1000.0
        self.step = step
        self.delays: list[float] = []
        run = RunSettings.model_validate(settings)
        self.budget = RestartBudget(run, step, clock=lambda: self.now_s)

    def fail(
        self, exit_code: int = 1, *, after_s: float = 5.0, origin: str = "", steps: int = 0
    ) -> None:
        """It runs for some seconds, in which the run makes new steps, and ends."""
        self.budget.on_start()
        self.now_s += after_s
        self.step += steps
        record = ErrorRecord(exit_code, f"broken at {origin}", origin) if origin else None
        delay_s = self.budget.delay_s(exit_code, record, self.step)
        self.delays.append(delay_s)
        self.now_s += delay_s


def test_a_process_is_started_again_a_number_of_times_within_a_window():
    process = Process(max_restarts=3, restart_window_s=100.0)
    for _ in range(3):
        process.fail(KILLED, steps=1)
    with pytest.raises(StreamRLError, match=r"was killed by SIGKILL.*3 times .*within .*100 s\)$"):
        process.fail(KILLED, steps=1)


def test_failures_that_are_rare_never_end_a_run_that_makes_steps():
    process = Process(max_restarts=3, restart_window_s=100.0)
    for number in range(1000):
        process.fail((1, 5, KILLED)[number % 3], after_s=40.0, origin="x.py:1", steps=1)
    assert set(process.delays[10:]) == {LONGEST_DELAY_S}


def test_restarts_without_a_new_step_stay_counted_however_long_a_start_takes():
    process = Process(max_restarts=3, restart_window_s=100.0)
    for _ in range(3):
        process.fail(KILLED, after_s=1000.0)
    with pytest.raises(StreamRLError, match=r"3 times .* without a new step of the run$"):
        process.fail(KILLED, after_s=1000.0)


def test_a_new_step_and_time_give_the_whole_budget_back():
    process = Process(max_restarts=3, restart_window_s=100.0)
    for _ in range(3):
        process.fail(KILLED)
    process.fail(KILLED, after_s=200.0, steps=1)
    for _ in range(2):
        process.fail(KILLED)
    with pytest.raises(StreamRLError, match="3 times"):
        process.fail(KILLED)


def test_the_back_off_doubles_up_to_a_bound_and_begins_again_after_healthy_time():
    process = Process(max_restarts=100)
    for _ in range(10):
        process.fail(KILLED)
    assert process.delays[:4] == [FIRST_DELAY_S * 2**k for k in range(4)]
    assert process.delays[-1] == LONGEST_DELAY_S
    process.fail(KILLED, after_s=HEALTHY_S)
    process.fail(KILLED)
    assert process.delays[-2:] == [FIRST_DELAY_S, FIRST_DELAY_S]


def test_what_fails_for_every_group_from_the_start_is_not_tried_again():
    with pytest.raises(RolloutError, match=r"^broken at rewards\.py:3$"):
        Process(step=40).fail(4, origin="rewards.py:3")


def test_what_fails_for_every_group_in_the_middle_of_a_run_is_tried_again_under_the_budget():
    process = Process(max_restarts=2)
    process.fail(4, origin="rewards.py:3", steps=1)
    process.fail(4, origin="rewards.py:3")
    with pytest.raises(RolloutError, match="2 times"):
        process.fail(4, origin="rewards.py:3")


def test_steps_that_are_trained_again_are_no_progress():
    process = Process(step=10, max_restarts=3)
    process.fail(origin="x.py:1", steps=-5)
    with pytest.raises(StreamRLError, match=r"^broken at x\.py:1$"):
        process.fail(origin="x.py:1", steps=5)


def test_a_peer_that_does_not_answer_is_given_the_whole_budget():
    process = Process(max_restarts=2)
    process.fail(5, origin="x.py:1")
    process.fail(5, origin="x.py:1")
    with pytest.raises(TransportError, match="2 times"):
        process.fail(5, origin="x.py:1")


def test_no_restart_can_be_asked_for():
    with pytest.raises(StreamRLError, match="SIGSEGV; started again 0 times"):
        Process(max_restarts=0).fail(-signal.SIGSEGV)


@pytest.mark.parametrize(
    ("exit_code", "sentence"),
    [
        (7, "ended with exit code 7"),
        (-signal.SIGKILL, "was killed by SIGKILL, as when memory runs out"),
        (-signal.SIGSEGV, "was killed by SIGSEGV"),
        (-40, "was killed by signal 40"),
    ],
)
def test_without_a_record_the_exit_code_says_why(exit_code, sentence):
    assert sentence_of(exit_code, None) == sentence
