"""Packing keeps the limit, loses nothing, and balances."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from learners.packing import flops, pack, pack_shares, tokens
from streamrl.errors import ConfigError

MAX_TOKENS = 100
lengths = st.lists(st.integers(1, MAX_TOKENS), min_size=4, max_size=80)


@given(lengths, st.integers(1, 4), st.sampled_from([tokens, flops(64)]))
def test_every_trajectory_is_in_one_micro_batch_within_the_limit(lengths, num_ranks, cost):
    packed = pack(lengths, MAX_TOKENS, num_ranks=num_ranks, cost=cost)
    assert len(packed) == num_ranks
    assert len({len(bins) for bins in packed}) == 1
    bins = [micro_batch for rank in packed for micro_batch in rank]
    assert sorted(i for micro_batch in bins for i in micro_batch) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in micro_batch) <= MAX_TOKENS for micro_batch in bins)


@given(lengths)
def test_one_rank_gets_no_empty_micro_batch_and_few_of_them(lengths):
    (bins,) = pack(lengths, MAX_TOKENS)
    assert all(bins)
    assert len(bins) <= 2 * -(-sum(lengths) // MAX_TOKENS)


@given(st.lists(st.integers(1, 20), min_size=40, max_size=200), st.integers(2, 4))
def test_ranks_get_about_the_same_number_of_tokens(lengths, num_ranks):
    packed = pack(lengths, MAX_TOKENS, num_ranks=num_ranks)
    loads = [sum(lengths[i] for bins in rank for i in bins) for rank in packed]
    assert max(loads) - min(loads) <= 20


def test_cost_in_flops_parts_long_trajectories_from_each_other():
    lengths = [64, 64, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8]
    (bins,) = pack(lengths, 200, cost=flops(1))
    assert sorted(sum(lengths[i] > 8 for i in b) for b in bins) == [1, 1]


@given(st.lists(st.integers(1, 3 * MAX_TOKENS), min_size=4, max_size=80), st.integers(1, 4))
def test_a_trajectory_longer_than_the_limit_has_a_micro_batch_of_its_own(lengths, num_ranks):
    packed = pack(lengths, MAX_TOKENS, num_ranks=num_ranks)
    assert len({len(bins) for bins in packed}) == 1
    bins = [micro_batch for rank in packed for micro_batch in rank]
    assert sorted(i for micro_batch in bins for i in micro_batch) == list(range(len(lengths)))
    over = [b for b in bins if sum(lengths[i] for i in b) > MAX_TOKENS]
    assert all(len(micro_batch) == 1 for micro_batch in over)
    assert sorted(i for (i,) in over) == [i for i, n in enumerate(lengths) if n > MAX_TOKENS]


def test_a_long_trajectory_costs_the_others_no_micro_batch():
    (bins,) = pack([3, 11, 25, 4, 3], 10)
    assert sorted(sorted(micro_batch) for micro_batch in bins) == [[0, 3, 4], [1], [2]]


shares = st.lists(st.lists(st.integers(1, MAX_TOKENS), max_size=30), min_size=1, max_size=5)


@given(shares.filter(any), st.sampled_from([tokens, flops(64)]))
def test_ranks_with_trajectories_of_their_own_get_equally_many_micro_batches(shares, cost):
    packed = pack_shares(shares, MAX_TOKENS, cost=cost)
    assert len({len(bins) for bins in packed}) == 1
    for lengths, bins in zip(shares, packed, strict=True):
        assert sorted(i for members in bins for i in members) == list(range(len(lengths)))
        assert all(sum(lengths[i] for i in members) <= MAX_TOKENS for members in bins)


@given(lengths)
def test_one_share_is_packed_as_one_rank_is(lengths):
    assert pack_shares([lengths], MAX_TOKENS) == pack(lengths, MAX_TOKENS)


def test_fewer_trajectories_than_ranks_are_refused():
    with pytest.raises(ConfigError, match="1 trajectories cannot be shared by 2 ranks"):
        pack([3], 10, num_ranks=2)
