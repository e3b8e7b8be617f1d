"""The bound on staleness follows the effective sample size, in both directions and not on noise."""

import math
import random
from collections.abc import Callable

import pytest

from learners.steering import NUM_STEPS, Steering
from streamrl.config.buffer import SteeredStaleness

LIMITS = SteeredStaleness(min=1, max=8, ess=0.97)


def start(bound: int, limits: SteeredStaleness = LIMITS) -> Steering:
    steering = Steering.start(limits, bound)
    assert steering is not None
    return steering


def run(
    steering: Steering, num_steps: int, ess: Callable[[int], float], wait_frac: float = 0.0
) -> tuple[Steering, list[str]]:
    """After steps whose effective sample size is a function of the bound; the changes."""
    changes = []
    for _ in range(num_steps):
        steering, change = steering.after(ess(steering.bound), wait_frac)
        changes += [change] if change else []
    return steering, changes


def test_a_fixed_bound_is_not_steered():
    assert Steering.start(4, 4) is None


def test_a_low_effective_sample_size_lowers_the_bound_by_what_it_lacks():
    steering, changes = run(start(8), 9 + NUM_STEPS, lambda _: 0.91)
    assert steering.bound == 2, "nine updates lose 0.09, and 0.03 are allowed"
    assert changes == [
        "from 8 to 2: the effective sample size of the last 8 steps was 0.910, below 0.97"
    ]
    assert run(start(8), 9 + NUM_STEPS, lambda _: 0.2)[0].bound == LIMITS.min


@pytest.mark.parametrize("wait_frac", [0.3, 0.9])
def test_a_learner_that_waits_gets_a_bound_that_is_higher_by_one(wait_frac: float):
    """However long it waits: what a step loses of its sample size may still grow."""
    steering, changes = run(start(1), 2 + NUM_STEPS, lambda _: 0.999, wait_frac)
    assert steering.bound == 2
    (change,) = changes
    assert change.endswith(
        f"was 0.999, and the learner waited for groups {wait_frac:.0%} of the time"
    )
    assert run(steering, 3 + NUM_STEPS, lambda _: 0.999, wait_frac)[0].bound == 3


def test_while_the_learning_rate_rises_the_bound_gets_one_too_high_at_most():
    """Then groups lose less than they will: in the end 0.01 at a bound of 1 and 0.0225 at 2."""
    limits, bounds = SteeredStaleness(min=1, max=8, ess=0.98), []
    steering = start(1, limits)
    for step in range(1, 61):
        rate = min(1.0, step / 20)
        lost = 0.0025 * (rate * (steering.bound + 1)) ** 2
        steering, _ = steering.after(1 - lost, wait_frac=0.5)
        bounds.append(steering.bound)
    assert max(bounds) == 2
    assert bounds[-1] == 1


def test_the_bound_rises_as_far_as_the_sample_size_allows():
    assert run(start(1), 200, lambda _: 0.999, wait_frac=0.9)[0].bound == LIMITS.max
    # Another update would lose 0.02 * (3 / 2)^2 if all of them point in one direction.
    assert run(start(1), 200, lambda _: 0.98, wait_frac=0.9)[1] == []


def test_a_learner_that_does_not_wait_keeps_its_bound():
    assert run(start(1), 200, lambda _: 1.0, wait_frac=0.01)[1] == []
    assert run(start(8), 200, lambda _: 0.971, wait_frac=0.01)[1] == []


def test_the_steps_whose_groups_were_leased_under_another_bound_count_for_nothing():
    steering, _ = run(start(3), 4, lambda _: 0.1)
    steering, changes = run(steering, NUM_STEPS, lambda _: 0.99)
    assert (steering.bound, changes) == (3, [])
    steering, _ = run(start(3), 4 + NUM_STEPS, lambda _: 0.96)
    assert (steering.bound, steering.num_ignored, steering.window) == (2, 4, ())


def test_a_step_without_an_effective_sample_size_counts_for_nothing():
    steering, changes = run(start(3), 100, lambda _: math.nan, wait_frac=0.5)
    assert (steering.bound, steering.window, changes) == (3, (), [])


@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("lost", [0.001, 0.004, 0.01])
def test_it_rests_on_noise(power: int, lost: float):
    """Whether 1 - ESS grows linearly or quadratically in the updates, a bound is found from either
    side, and noise of a seventh of it moves that seldom."""
    for first in (1, 8):
        rng, steering, changes = random.Random(0), start(first), 0
        for _ in range(2000):
            share = lost * (steering.bound + 1) ** power * (1 + rng.gauss(0, 0.15))
            steering, change = steering.after(1 - share, wait_frac=0.5)
            changes += bool(change)
        assert changes <= 10
        mean = lost * (steering.bound + 1) ** power
        assert mean < 0.033 or steering.bound == LIMITS.min
        higher = mean * ((steering.bound + 2) / (steering.bound + 1)) ** 2
        assert higher > 0.027 or steering.bound == LIMITS.max


def test_it_comes_back_where_generators_are_slower_for_a_while():
    steering, _ = run(start(1), 100, lambda bound: 1 - 0.002 * (bound + 1), wait_frac=0.01)
    assert steering.bound == 1
    steering, _ = run(steering, 100, lambda bound: 1 - 0.002 * (bound + 1), wait_frac=0.4)
    assert steering.bound == 8
    steering, _ = run(steering, 100, lambda bound: 1 - 0.01 * (bound + 1), wait_frac=0.4)
    assert steering.bound <= 2
