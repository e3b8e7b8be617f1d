"""Packing keeps the limit, loses nothing, and balances."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from learners.packing import pack
from learners.parallel.plan import owners
from streamrl.errors import ConfigError

MAX_TOKENS = 100
lengths = st.lists(st.integers(1, MAX_TOKENS), min_size=4, max_size=80)
any_lengths = st.lists(st.integers(1, 3 * MAX_TOKENS), max_size=30)


@given(st.lists(any_lengths, min_size=1, max_size=5).filter(any))
def test_every_trajectory_is_in_one_micro_batch_within_the_limit(shares):
    packed = pack(shares, MAX_TOKENS)
    assert len(packed) == len(shares)
    assert len({len(bins) for bins in packed}) == 1
    for share, bins in zip(shares, packed, strict=True):
        assert sorted(i for members in bins for i in members) == list(range(len(share)))
        over = [b for b in bins if sum(share[i] for i in b) > MAX_TOKENS]
        alone = [i for i, length in enumerate(share) if length > MAX_TOKENS]
        assert sorted(over) == [[i] for i in alone], "only a long one is over the limit, alone"


@given(lengths)
def test_one_rank_gets_no_empty_micro_batch_and_few_of_them(lengths):
    (bins,) = pack([lengths], MAX_TOKENS)
    assert all(bins)
    assert len(bins) <= 2 * -(-sum(lengths) // MAX_TOKENS)


@given(lengths)
def test_the_fullest_micro_batches_come_first(lengths):
    (bins,) = pack([lengths], MAX_TOKENS)
    loads = [sum(lengths[i] for i in members) for members in bins]
    assert loads == sorted(loads, reverse=True)


@given(st.lists(st.integers(1, 10), min_size=40, max_size=200), st.integers(1, 4))
def test_micro_batches_of_all_ranks_are_about_equal(lengths, num_ranks):
    ranks = owners(lengths, num_ranks)
    shares = [[n for n, r in zip(lengths, ranks, strict=True) if r == i] for i in range(num_ranks)]
    packed = pack(shares, MAX_TOKENS)
    loads = [sum(s[i] for i in b) for s, bins in zip(shares, packed, strict=True) for b in bins]
    assert max(loads) - min(loads) <= 20


def test_a_long_trajectory_costs_the_others_no_micro_batch():
    (bins,) = pack([[3, 11, 25, 4, 3]], 10)
    assert sorted(sorted(micro_batch) for micro_batch in bins) == [[0, 3, 4], [1], [2]]


def test_a_batch_without_trajectories_is_refused():
    with pytest.raises(ConfigError, match="without trajectories"):
        pack([[], []], 10)
