"""Packing keeps the limit, loses nothing, and balances."""

from collections.abc import Sequence

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given

from learners.batch import packing
from learners.batch.packing import longest_first, owners, pack
from streamrl.errors import ConfigError

MAX_TOKENS = 100
lengths = st.lists(st.integers(1, MAX_TOKENS), min_size=4, max_size=80)
any_lengths = st.lists(st.integers(1, 3 * MAX_TOKENS), max_size=30)
short_lengths = st.lists(st.integers(1, MAX_TOKENS), max_size=30)


def packed_by_all(shares: Sequence[Sequence[int]], max_tokens: int) -> list[list[list[int]]]:
    """What each rank makes of its share, as indices into it, the lengths being in turns."""
    places = sorted((i, rank) for rank, share in enumerate(shares) for i in range(len(share)))
    lengths = np.array([shares[rank][i] for i, rank in places], np.int64)
    owner = np.array([rank for _, rank in places], np.int64)
    plans = [pack(lengths, owner, rank, max_tokens) for rank in range(len(shares))]
    return [[[places[i][0] for i in members] for members in bins] for bins in plans]


@given(st.lists(any_lengths, min_size=1, max_size=5).filter(any))
def test_every_trajectory_is_in_one_micro_batch_within_the_limit(shares):
    packed = packed_by_all(shares, MAX_TOKENS)
    assert len(packed) == len(shares)
    assert len({len(bins) for bins in packed}) == 1
    for share, bins in zip(shares, packed, strict=True):
        assert sorted(i for members in bins for i in members) == list(range(len(share)))
        over = [b for b in bins if sum(share[i] for i in b) > MAX_TOKENS]
        alone = [i for i, length in enumerate(share) if length > MAX_TOKENS]
        assert sorted(over) == [[i] for i in alone], "only a long one is over the limit, alone"


@given(lengths)
def test_one_rank_gets_no_empty_micro_batch_and_few_of_them(lengths):
    (bins,) = packed_by_all([lengths], MAX_TOKENS)
    assert all(bins)
    assert len(bins) <= 2 * -(-sum(lengths) // MAX_TOKENS)


@given(lengths)
def test_the_fullest_micro_batches_come_first(lengths):
    (bins,) = packed_by_all([lengths], MAX_TOKENS)
    loads = [sum(lengths[i] for i in members) for members in bins]
    assert loads == sorted(loads, reverse=True)


@given(st.lists(st.integers(1, 10), min_size=40, max_size=200), st.sampled_from([1, 2, 4, 32]))
def test_micro_batches_of_all_ranks_are_about_equal(lengths, num_ranks):
    ranks = owners(lengths, num_ranks)
    shares = [[n for n, r in zip(lengths, ranks, strict=True) if r == i] for i in range(num_ranks)]
    packed = packed_by_all(shares, MAX_TOKENS)
    loads = [sum(s[i] for i in b) for s, bins in zip(shares, packed, strict=True) for b in bins]
    assert max(loads) - min(loads) <= 20


def test_a_long_trajectory_costs_the_others_no_micro_batch():
    (bins,) = packed_by_all([[3, 11, 25, 4, 3]], 10)
    assert sorted(sorted(micro_batch) for micro_batch in bins) == [[0, 3, 4], [1], [2]]


def test_a_batch_without_trajectories_is_refused():
    with pytest.raises(ConfigError, match="without trajectories"):
        packed_by_all([[], []], 10)


@example([[60, 60, 40], [100, 1]])
@given(st.lists(short_lengths, min_size=1, max_size=5).filter(any))
def test_all_ranks_have_the_fewest_micro_batches_that_longest_first_fits_in(shares):
    (count,) = {len(bins) for bins in packed_by_all(shares, MAX_TOKENS)}
    ordered = [sorted(share, reverse=True) for share in shares]
    needed = max(-(-sum(share) // MAX_TOKENS) for share in shares)
    while not all(packing._fill(share, MAX_TOKENS, needed) for share in ordered):
        needed += 1
    assert count == needed


def test_four_times_as_many_trajectories_of_which_no_two_fit_take_few_more_trials(monkeypatch):
    fill, tried = packing._fill, []

    def counted(lengths: Sequence[int], max_tokens: int, num_bins: int) -> list[list[int]] | None:
        tried.append(num_bins)
        return fill(lengths, max_tokens, num_bins)

    monkeypatch.setattr(packing, "_fill", counted)
    num_tried = []
    for size in (500, 2000):
        tried.clear()
        (bins,) = packed_by_all([[51] * size], MAX_TOKENS)
        assert len(bins) == size
        num_tried.append(len(tried))
    assert num_tried[1] <= num_tried[0] + 4


@given(st.lists(st.integers(1, 9), max_size=40))
def test_equal_lengths_stay_in_order(lengths):
    expected = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    assert longest_first(np.array(lengths, np.int64)).tolist() == expected
