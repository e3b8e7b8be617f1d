"""The criterion of a soak: it finds leaks, and nothing else, in series that are made here.

Readings of ten minutes, one every two seconds, the first third of them the warm-up.
"""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.typing import NDArray

from tests.research.growth import Bound, Verdict, trend
from tests.research.soak_record import BOUNDS

SECONDS, WARM_UP_S = 600.0, 200.0
TIMES = np.arange(0.0, SECONDS, 2.0)
MINUTES = TIMES / 60.0
RSS, COUNT, STEP_S = BOUNDS["rss_mb"], BOUNDS["descriptors"], BOUNDS["step_s"]

Series = Callable[[np.random.Generator], NDArray[np.float64]]


def white(scale: float) -> Series:
    return lambda random: random.normal(0.0, scale, len(TIMES))


def stairs(every_s: float, height: float) -> NDArray[np.float64]:
    return np.floor(TIMES / every_s) * height


def saw(every_s: float, height: float) -> NDArray[np.float64]:
    return (TIMES % every_s) / every_s * height


STEADY: dict[str, tuple[Bound, Series]] = {
    "constant": (RSS, lambda _: np.full(len(TIMES), 400.0)),
    "noise": (RSS, white(5.0)),
    "a warm-up that fills a cache": (RSS, lambda _: 400 + 200 * (1 - np.exp(-TIMES / 60))),
    "a slow warm-up": (RSS, lambda _: 400 + 60 * (1 - np.exp(-TIMES / 150))),
    "one step of 64 MB": (RSS, lambda r: 400 + 64.0 * (TIMES > 350) + white(1.0)(r)),
    "two steps": (RSS, lambda r: 400 + 64.0 * (TIMES > 250) + 64.0 * (TIMES > 420) + white(1.0)(r)),
    "a plateau after growth": (RSS, lambda _: 400 + np.minimum(TIMES, 380) / 10),
    "garbage that is collected": (RSS, lambda _: 400 + saw(45.0, 30.0)),
    "spikes": (RSS, lambda r: 400 + 300.0 * (r.random(len(TIMES)) < 0.1)),
    "memory that falls": (RSS, lambda r: 400 - 2 * MINUTES + white(1.0)(r)),
    "less than the bound": (RSS, lambda _: 400 + 0.05 * MINUTES),
    "files opened and closed": (COUNT, lambda r: 20.0 + r.integers(0, 4, len(TIMES))),
    "one descriptor more": (COUNT, lambda _: 20.0 + (TIMES > 300)),
    "a machine that others use": (STEP_S, lambda r: 0.2 + 0.5 * r.random(len(TIMES))),
}
GROWING: dict[str, tuple[Bound, Series]] = {
    "1 MB a minute": (RSS, lambda _: 400 + MINUTES),
    "1 MB a minute under noise": (RSS, lambda r: 400 + MINUTES + white(0.7)(r)),
    "after a warm-up": (RSS, lambda _: 400 + 80 * (1 - np.exp(-TIMES / 60)) + MINUTES),
    "in steps": (RSS, lambda r: 400 + stairs(40.0, 4.0) + white(0.5)(r)),
    "under garbage that is collected": (RSS, lambda _: 400 + saw(20.0, 10.0) + 3 * MINUTES),
    "faster and faster": (RSS, lambda _: 400 + MINUTES**2),
    "a descriptor every 90 s": (COUNT, lambda _: 20 + stairs(90.0, 1.0)),
    "under files opened and closed": (
        COUNT,
        lambda r: 20 + stairs(60.0, 1.0) + r.integers(0, 2, len(TIMES)),
    ),
    "steps that take longer and longer": (STEP_S, lambda _: 0.2 + 0.1 * MINUTES),
}


@pytest.mark.parametrize("name", STEADY)
@pytest.mark.parametrize("seed", range(5))
def test_what_does_not_leak_is_steady(name, seed):
    bound, series = STEADY[name]
    found = trend(TIMES, series(np.random.default_rng(seed)), bound, WARM_UP_S)
    assert found.verdict is Verdict.STEADY, found


@pytest.mark.parametrize("name", GROWING)
@pytest.mark.parametrize("seed", range(5))
def test_what_leaks_grows(name, seed):
    bound, series = GROWING[name]
    found = trend(TIMES, series(np.random.default_rng(seed)), bound, WARM_UP_S)
    assert found.verdict is Verdict.GROWS, found


def test_the_slope_is_per_minute_and_has_its_spread():
    noise = np.random.default_rng(0).normal(0.0, 0.5, len(TIMES))
    found = trend(TIMES, 400 + 2 * MINUTES + noise, RSS, WARM_UP_S)
    assert found.per_minute == pytest.approx(2.0, abs=0.05)
    assert found.low < 2.0 < found.high < found.low + 1.0
    assert found.first == pytest.approx(400 + 2 * (200 + 50) / 60, abs=0.3)
    assert found.last == pytest.approx(400 + 2 * (600 - 50) / 60, abs=0.3)


@given(seed=st.integers(0, 10_000), scale=st.floats(0.1, 50.0))
def test_noise_of_any_size_is_steady(seed, scale):
    noise = np.random.default_rng(seed).normal(400.0, scale, len(TIMES))
    assert trend(TIMES, noise, RSS, WARM_UP_S).verdict is Verdict.STEADY


@given(rate=st.floats(1.0, 1000.0), base=st.floats(1.0, 1e5), num_readings=st.integers(60, 2000))
def test_a_leak_of_any_size_is_found_however_often_it_is_read(rate, base, num_readings):
    times = np.linspace(0.0, SECONDS, num_readings)
    found = trend(times, base + rate * times / 60, RSS, WARM_UP_S)
    assert found.verdict is Verdict.GROWS, found


@pytest.mark.parametrize("num_readings", [0, 1, 11])
def test_too_few_readings_are_not_judged(num_readings):
    times = [float(i) for i in range(num_readings)]
    assert trend(times, times, RSS, 0.0).verdict is Verdict.NOT_JUDGED
