"""Histograms of lengths are exact where they say so, and within a sixteenth elsewhere."""

import math
from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import given

from streamrl import wire
from streamrl.types import (
    DropReason,
    GroupHeader,
    LengthHistogram,
    PackedGroup,
    ResponseLengths,
    distance_p_value,
    length_distance,
    pack,
    rounded_length,
)
from tests.records import groups

lengths_of_responses = st.lists(st.integers(0, 200_000), max_size=40)


def rounded(lengths: list[int]) -> LengthHistogram:
    return LengthHistogram.of(lengths).rounded()


@given(st.integers(0, 2**31))
def test_a_length_is_rounded_within_a_sixteenth(length: int):
    other = rounded_length(length)
    assert other == length if length < 16 else abs(other - length) <= length / 16
    assert rounded_length(other) == other


@given(st.integers(0, 2**20), st.integers(0, 2**20))
def test_rounding_keeps_the_order(one: int, other: int):
    assert one > other or rounded_length(one) <= rounded_length(other)


def test_an_octave_has_eight_buckets():
    assert len({rounded_length(length) for length in range(1024, 2048)}) == 8
    assert len({rounded_length(length) for length in range(2**16)}) == 16 + 8 * 12


@given(lengths_of_responses.filter(bool), st.floats(0.01, 1.0))
def test_sums_are_exact_and_quantiles_within_a_bucket(lengths: list[int], fraction: float):
    histogram = rounded(lengths)
    assert histogram.num_responses == len(lengths)
    assert histogram.num_tokens == sum(lengths)
    assert histogram.mean == sum(lengths) / len(lengths)
    exact = sorted(lengths)[max(0, math.ceil(fraction * len(lengths)) - 1)]
    assert histogram.quantile(fraction) == rounded_length(exact)
    assert LengthHistogram.of(lengths).quantile(fraction) == exact


@given(lengths_of_responses, lengths_of_responses)
def test_the_difference_of_two_readings_is_what_came_between(before: list[int], after: list[int]):
    assert rounded(before) + rounded(after) == rounded(before + after)
    assert rounded(before + after) - rounded(before) == rounded(after)


@given(lengths_of_responses, lengths_of_responses)
def test_a_window_is_what_came_between_for_each_outcome(before: list[int], after: list[int]):
    stale = {DropReason.STALE: rounded(before)}
    then = ResponseLengths(rounded(before), rounded(before[1:]), stale)
    now = ResponseLengths(
        rounded(before + after),
        rounded(before[1:] + after[1:]),
        {DropReason.STALE: rounded(before + after), DropReason.FILTERED: rounded(after)},
    )
    window = now.since(then)
    assert (window.sampled, window.trained) == (rounded(after), rounded(after[1:]))
    assert window.dropped_because(DropReason.FILTERED) == rounded(after)
    assert window.all_dropped == rounded(after + after)
    assert window.dropped_because(DropReason.MALFORMED) == LengthHistogram()
    assert now.contains(then)
    assert then.contains(now) == (not after)


def test_an_empty_histogram_has_no_length():
    empty = LengthHistogram()
    assert (empty.mean, empty.longest, empty.quantile(0.99)) == (0.0, 0, 0)
    assert length_distance(empty, LengthHistogram.of([1])) == 0.0
    assert distance_p_value(0.0, 0, 5) == 1.0


short = st.lists(st.integers(0, 15), min_size=1, max_size=30)


@given(short, short)
def test_the_distance_is_the_largest_gap_of_the_two_distributions(one: list[int], other: list[int]):
    def share(lengths: list[int], at_most: int) -> float:
        return sum(length <= at_most for length in lengths) / len(lengths)

    expected = max(abs(share(one, n) - share(other, n)) for n in range(16))
    assert length_distance(rounded(one), rounded(other)) == pytest.approx(expected, abs=1e-12)


@given(lengths_of_responses.filter(bool), lengths_of_responses.filter(bool))
def test_rounding_never_adds_distance(one: list[int], other: list[int]):
    exact = length_distance(LengthHistogram.of(one), LengthHistogram.of(other))
    assert length_distance(rounded(one), rounded(other)) <= exact + 1e-12


@pytest.mark.parametrize(
    ("x", "p_value"),
    [
        # Critical values of the Kolmogorov distribution in every table of it.
        (1.2238, 0.10),
        (1.3581, 0.05),
        (1.6276, 0.01),
        (1.9495, 0.001),
        # Smirnov 1948: 1 - L(z).
        (0.50, 0.963945),
        (0.80, 0.544142),
        (1.00, 0.270000),
    ],
)
def test_the_p_value_is_that_of_the_tables(x: float, p_value: float):
    num_one, num_other = 300, 150
    distance = x * math.sqrt((num_one + num_other) / (num_one * num_other))
    assert distance_p_value(distance, num_one, num_other) == pytest.approx(p_value, rel=1e-3)


@given(st.floats(0.0, 1.0), st.integers(1, 10_000), st.integers(1, 10_000))
def test_a_p_value_is_a_probability_that_falls_with_the_distance(
    distance: float, num_one: int, num_other: int
):
    p_value = distance_p_value(distance, num_one, num_other)
    assert 0.0 <= p_value <= 1.0
    assert distance_p_value(distance / 2, num_one, num_other) >= p_value - 1e-9


@given(groups)
def test_a_header_has_the_response_tokens_of_each_sibling(group):
    expected = tuple(int(t.response_mask.sum()) for t in group.trajectories)
    assert GroupHeader.of(group).response_lengths == expected
    packed = wire.decode(wire.encode(pack(group)), PackedGroup)
    assert packed.header(0) == GroupHeader.of(group)
    assert {type(length) for length in packed.header(0).response_lengths} == {int}


def test_stats_with_long_tails_stay_small_on_the_wire():
    tail = LengthHistogram.of(Counter({n: 1 for n in range(32_768)})).rounded()
    everything = ResponseLengths(tail, tail, {DropReason.STALE: tail})
    assert len(wire.encode(everything)) < 2000
    assert wire.decode(wire.encode(everything), ResponseLengths) == everything
