"""What one more generator or learner rank gains: known queues, and the window that measures."""

import math

import pytest
from hypothesis import given, strategies as st
from msgspec import structs

from actors.episodes.group import GroupProgress
from actors.leased_group import LeasedGroup
from actors.status_report import Occupancy
from learners import learner
from learners.profiling import ScalingWindow
from streamrl.config.generator import GeneratorSettings
from streamrl.diagnosis.scaling import (
    Load,
    busy_frac,
    scaling_hint,
    scaling_metrics,
    steps_per_s,
    wanted_generators,
)
from streamrl.types import Books, BufferStats, GeneratorStatus, Lease, OverduePolicy
from tests.training import make_config


def load(**fields: float) -> Load:
    known = {"step_s": 2.0, "wait_s": 1.5, "train_s": 0.4, "num_generators": 1, "num_ranks": 1}
    return Load(**{**known, "max_groups": 8, "busy_groups": 8, "capacity": 64, **fields})


def test_generators_that_are_always_busy_are_the_limit():
    """Twice as many halve the step, until the learner's half second is all that is left."""
    slow = load()
    assert [steps_per_s(slow, generators=n) for n in (0, 1, 3, 7)] == [0.5, 1.0, 2.0, 2.0]
    assert steps_per_s(slow, ranks=1) == pytest.approx(0.5)
    assert wanted_generators(slow) == 2, "no further than twice the measured size"
    assert wanted_generators(load(num_generators=3, max_groups=24, busy_groups=24)) == 6


def test_a_learner_that_never_waits_is_the_limit():
    busy = load(step_s=1.0, wait_s=0.0, train_s=0.8, num_generators=4, busy_groups=2)
    assert steps_per_s(busy, generators=1) == pytest.approx(1.0)
    assert steps_per_s(busy, ranks=1) == pytest.approx(1 / 0.6)
    assert wanted_generators(busy) == 1, "a quarter of the room of four is in use"


def test_without_staleness_both_take_turns():
    turns = load(step_s=3.0, wait_s=2.0, train_s=1.0, busy_groups=8 * 2 / 3)
    assert steps_per_s(turns, generators=1) == pytest.approx(1 / 2)
    assert steps_per_s(turns, ranks=1) == pytest.approx(1 / 2.5)


def test_room_that_admission_does_not_fill_is_no_room():
    full = load(step_s=1.0, wait_s=0.9, max_groups=64, busy_groups=16, capacity=16)
    assert steps_per_s(full, generators=1) == pytest.approx(1.0)
    line = {**scaling_metrics(full), "generator/count": 1, "generator/max_num_groups": 64}
    line = {**line, "buffer/capacity": 16, "learner/wait_s": 0.9, "learner/step_s": 1.0}
    hint = scaling_hint(line)
    assert hint is not None
    assert hint.limit == "admission"
    assert "raise buffer.max_staleness" in hint.sentence


def test_groups_that_wait_for_a_reward_are_neithers_work():
    slow_reward = load(step_s=1.0, wait_s=0.8, train_s=0.1, max_groups=8, busy_groups=0.3)
    line = {**scaling_metrics(slow_reward), "generator/count": 1, "buffer/capacity": 12}
    hint = scaling_hint({**line, "generator/max_num_groups": 8})
    assert hint is not None
    assert hint.limit == "admission"
    assert "make rewards and environments faster" in hint.sentence


@pytest.mark.parametrize(
    ("at", "limit", "sentence"),
    [
        (load(), "generators", "another generator would raise 0.5 steps/s to 1 (+100 %)"),
        (load(wait_s=0.0, train_s=2.0, busy_groups=1), "learner", "more generators gain nothing"),
        (load(wait_s=1.0, train_s=1.0, busy_groups=4), "both", "take turns"),
        (load(wait_s=0.02, train_s=0.0, busy_groups=1), "none", "keep up"),
    ],
)
def test_the_hint_says_what_limits_the_run(at, limit, sentence):
    hint = scaling_hint({**scaling_metrics(at), "generator/count": at.num_generators})
    assert hint is not None
    assert hint.limit == limit
    assert sentence in hint.sentence


@pytest.mark.parametrize(
    ("at", "free_cores", "is_said"),
    [
        (load(), 0.0, True),
        (load(wait_s=0.0, train_s=2.0, busy_groups=1), 0.0, True),
        (load(), 1.0, False),
        (load(), None, False),
        (load(wait_s=0.02, train_s=0.0, busy_groups=1), 0.0, False),
    ],
)
def test_a_hint_says_where_no_core_is_free_for_what_it_suggests(at, free_cores, is_said):
    cores = {} if free_cores is None else {"scaling/free_cores": free_cores}
    hint = scaling_hint({**scaling_metrics(at), "generator/count": at.num_generators, **cores})
    assert hint is not None
    said = "; no core of this machine is free for it, so it takes another machine"
    assert hint.sentence.endswith(said) is is_said


@pytest.mark.parametrize(
    ("generator", "free"),
    [
        ({"count": 2}, 1),
        ({"count": "1..8"}, 0),
        ({"count": 1}, 2),
        ({"count": 1, "num_threads": 3}, 0),
    ],
)
def test_cores_are_free_that_no_process_of_the_launch_computes_on(generator, free, monkeypatch):
    monkeypatch.setattr(learner, "num_cores", lambda: 4)
    monkeypatch.setattr(learner, "usable_devices", tuple)
    assert learner._free_cores(make_config(generator=generator), 1) == free
    threads = {"num_threads": 2}
    assert learner._free_cores(make_config(generator=generator, learner=threads), 2) == 0
    monkeypatch.setattr(learner, "usable_devices", lambda: (0,))
    assert math.isnan(learner._free_cores(make_config(generator=generator), 1))


def test_what_was_not_measured_gives_no_hint():
    metrics = scaling_metrics(None)
    assert all(math.isnan(value) for value in metrics.values())
    assert scaling_hint({**metrics, "generator/count": 2}) is None
    assert scaling_hint({}) is None
    assert metrics.keys() == scaling_metrics(load()).keys()


@given(
    st.builds(
        Load,
        step_s=st.floats(1e-3, 1e3),
        wait_s=st.floats(0, 1e3),
        train_s=st.floats(0, 1e3),
        num_generators=st.integers(1, 64),
        num_ranks=st.integers(1, 64),
        max_groups=st.floats(1, 1e4),
        busy_groups=st.floats(0, 1e4),
        capacity=st.integers(1, 10_000),
    )
)
def test_more_never_slows_a_run_and_the_same_size_is_as_fast(at: Load):
    at = structs.replace(at, wait_s=min(at.wait_s, at.step_s))
    assert steps_per_s(at) == pytest.approx(1 / at.step_s, rel=1e-6)
    for more in (1, 2, 8):
        assert steps_per_s(at, generators=more) >= steps_per_s(at) * (1 - 1e-9)
        assert steps_per_s(at, ranks=more) >= steps_per_s(at) * (1 - 1e-9)
    assert 1 <= wanted_generators(at) <= 2 * at.num_generators


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def group(index: int, num_episodes: int = 4, *, has_begun: bool = True) -> LeasedGroup:
    lease = Lease(lease_id=f"l{index}", prompt_index=index, min_policy_version=0)
    leased = LeasedGroup(lease, None, GroupProgress(num_episodes))  # type: ignore[arg-type]
    if has_begun:
        leased.turn.set()
    return leased


def test_the_room_in_use_is_added_up_over_time():
    clock = Clock()
    settings = GeneratorSettings(max_num_seqs=16, group_size=4)
    occupancy = Occupancy(settings, 4, clock)
    clock.now_s += 2.0
    occupancy.update([group(0), group(1)])
    clock.now_s += 4.0
    assert occupancy.at_present() == (4, 2.0, 6.0)
    occupancy.update([group(i) for i in range(5)])
    clock.now_s += 1.0
    assert occupancy.at_present() == (4, 3.0, 7.0)
    occupancy.update([group(i, has_begun=False) for i in range(4)])
    clock.now_s += 1.0
    assert occupancy.at_present() == (4, 3.0, 8.0), "they wait for weights"


def test_the_limit_on_episodes_in_flight_is_the_room():
    settings = GeneratorSettings(max_num_seqs=64, group_size=4, episode={"max_in_flight": 10})
    occupancy = Occupancy(settings, 4, Clock())
    assert occupancy.at_present().max_num_groups == 2


def status(name: str, busy_s: float, uptime_s: float, **fields: object) -> GeneratorStatus:
    known = {"generator_id": name, "session": name, "policy_version": 0, "max_num_groups": 8}
    return GeneratorStatus(**{**known, "busy_s": busy_s, "uptime_s": uptime_s, **fields})


def stats(*generators: GeneratorStatus) -> BufferStats:
    return BufferStats(
        incarnation="",
        policy_version=0,
        groups_per_step=4,
        max_staleness=3,
        staleness_bound=3,
        overdue=OverduePolicy.WAIT,
        books=Books(),
        generators=generators,
        heartbeat_ages_s=tuple(0.0 for _ in generators),
    )


def test_a_share_of_time_is_that_between_two_reports_of_one_process():
    assert busy_frac(status("g", 30.0, 60.0), status("g", 28.0, 40.0)) == pytest.approx(0.1)
    assert busy_frac(status("g", 30.0, 60.0)) == 0.5
    assert busy_frac(status("g", 3.0, 6.0), status("g", 28.0, 40.0)) == 0.5, "another clock"
    assert busy_frac(status("g", 0.0, 0.0)) == 0.0


def test_a_window_has_no_step_of_a_start_and_none_of_another_size():
    window = ScalingWindow(num_ranks=1)
    waits = {"learner/wait_s": 1.5, "learner/train_s": 0.4}
    first = window.metrics(stats(status("a", 0.0, 60.0)), 60.0, {"learner/wait_s": 59.0})
    assert math.isnan(first["scaling/steps_per_s"])
    for step in range(1, 6):
        at = stats(status("a", 2.0 * step, 60.0 + 2.0 * step))
        found = window.metrics(at, 2.0, waits)
    assert found["scaling/steps_per_s"] == pytest.approx(0.5)
    assert found["scaling/steps_per_s_generator_added"] == pytest.approx(1.0)
    assert found["generator/idle_frac"] == pytest.approx(0.0)
    joined = window.metrics(stats(status("a", 12.0, 72.0), status("b", 0.0, 1.0)), 2.0, waits)
    assert math.isnan(joined["scaling/steps_per_s"])


def test_generators_of_an_older_release_are_not_measured():
    window = ScalingWindow(num_ranks=1)
    for step in range(8):
        found = window.metrics(stats(status("a", 0.0, float(step), max_num_groups=0)), 1.0, {})
    assert math.isnan(found["scaling/num_generators_wanted"])
    assert math.isnan(window.metrics(stats(), 1.0, {})["scaling/steps_per_s"])
