"""Siblings are laid into the same micro-batches, within the limit, where that leaves less to do."""

import hypothesis.strategies as st
import numpy as np
import torch
from hypothesis import given

from learners.batch.micro_batch import MOST, leaders_of
from learners.batch.packing import Beginnings, beside_each_other, pack
from tests.training import make_network, sibling_batch

CPU = torch.device("cpu")
prompts = st.integers(1, 60)
responses = st.lists(st.integers(1, 60), min_size=1, max_size=8)


def laid_out(groups, max_tokens):
    """The lengths and prompts of groups of [prompt, responses], balanced bins, and the others."""
    lengths = np.array([prompt + n for prompt, responses in groups for n in responses])
    ids = [np.full(prompt, i) for i, (prompt, responses) in enumerate(groups) for _ in responses]
    bins = pack(lengths, np.zeros(len(ids), np.int64), 0, max_tokens)
    beginnings = Beginnings(leaders_of(i.tobytes() for i in ids), np.array([*map(len, ids)]))
    return lengths, beginnings, bins, beside_each_other(bins, lengths, beginnings, max_tokens)


def computed(members, lengths, beginnings):
    """Tokens to compute: of a prompt that is shared, once; all of them where that is no gain."""
    first = {int(beginnings.leaders[i]): i for i in reversed(members)}
    left = sum(
        lengths[i] - (beginnings.lengths[i] if first[int(beginnings.leaders[i])] != i else 0)
        for i in members
    )
    tokens = lengths[members].sum()
    return int(tokens if left > MOST * tokens else left)


@given(st.lists(st.tuples(prompts, responses), min_size=1, max_size=12), st.integers(60, 400))
def test_no_trajectory_is_lost_no_limit_exceeded_and_no_micro_batch_empty(groups, max_tokens):
    lengths, beginnings, bins, chosen = laid_out(groups, max_tokens)
    assert len(chosen) == len(bins)
    assert sorted(i for members in chosen for i in members) == list(range(len(lengths)))
    assert all(chosen)
    for members in chosen:
        assert len(members) == 1 or computed(members, lengths, beginnings) <= max_tokens


@given(st.lists(st.tuples(prompts, responses), min_size=1, max_size=12), st.integers(60, 400))
def test_the_fullest_has_no_more_to_compute_and_comes_first(groups, max_tokens):
    lengths, beginnings, bins, chosen = laid_out(groups, max_tokens)
    after = [computed(members, lengths, beginnings) for members in chosen]
    assert max(after) <= max(computed(members, lengths, beginnings) for members in bins)
    if chosen != bins:
        assert after == sorted(after, reverse=True)


def test_groups_stay_whole_where_they_fit():
    _, beginnings, bins, chosen = laid_out([(20, [10] * 4)] * 6, max_tokens=250)
    assert len(bins) == 3
    assert all(len(set(beginnings.leaders[members].tolist())) > 2 for members in bins)
    assert all(len(set(beginnings.leaders[members].tolist())) == 2 for members in chosen)


def test_long_prompts_count_once_against_the_limit():
    """All tokens of a micro-batch would be up to 340."""
    lengths, beginnings, bins, chosen = laid_out([(80, [5] * 4)] * 5, max_tokens=200)
    assert len(bins) == 10
    assert max(lengths[members].sum() for members in chosen) <= 340
    assert sum(computed(members, lengths, beginnings) for members in bins) > 1000
    assert sum(computed(members, lengths, beginnings) for members in chosen) <= 10 * 90


def test_a_long_trajectory_stays_alone_and_the_others_find_their_siblings():
    lengths, beginnings, bins, chosen = laid_out([(5, [500]), *[(20, [10] * 4)] * 6], 250)
    assert bins[0] == chosen[0] == [0]
    assert all(len(set(beginnings.leaders[members].tolist())) == 2 for members in chosen[1:])
    assert [computed(members, lengths, beginnings) for members in chosen[1:]] == [120] * 3


def test_where_nothing_is_shared_the_balanced_micro_batches_stay():
    _, _, bins, chosen = laid_out([(5, [20])] * 40, max_tokens=100)
    assert chosen == bins


def test_prompts_that_are_equal_are_shared_between_groups():
    ids = [np.array([1, 2, 3]), np.array([1, 2, 3]), np.array([1, 2]), np.array([1, 2, 3])]
    assert Beginnings(
        leaders_of(i.tobytes() for i in ids), np.array([*map(len, ids)])
    ).leaders.tolist() == [
        0,
        0,
        2,
        0,
    ]


def test_a_network_that_does_not_share_gets_balanced_micro_batches():
    batch = sibling_batch([(20, [10] * 4)] * 6)
    together = batch.pack(250, CPU)
    apart = batch.pack(250, CPU, shares_prompts=False)
    plain = pack(np.array(batch.lengths), np.zeros(24, np.int64), 0, 250)
    assert [m.members.tolist() for m in apart] == plain
    assert all(m.shared_prompts is None for m in apart)
    # Two prompts of 20, and eight responses of which the last token predicts none.
    assert [m.shared_prompts.packing.num_tokens for m in together] == [2 * 20 + 8 * 9] * 3


def test_gradients_do_not_depend_on_where_siblings_are():
    batch, network = sibling_batch([(20, [10, 3, 7, 9])] * 6), make_network()

    def gradients(shares_prompts):
        network.zero_grad()
        for micro_batch in batch.pack(250, CPU, shares_prompts=shares_prompts):
            logprobs = network(micro_batch).logprobs
            (logprobs * torch.linspace(-1, 1, 174)[micro_batch.responses]).sum().backward()
        return [p.grad.clone() for p in network.parameters() if p.grad is not None]

    for together, apart in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(together, apart, rtol=1e-3, atol=1e-5)


def test_what_is_left_of_a_micro_batch_shares_its_prompts_too():
    batch, network = sibling_batch([(20, [10, 3, 7, 9])] * 2), make_network()
    (micro_batch,) = batch.pack(250, CPU)
    rest = micro_batch.select(torch.isin(micro_batch.members, torch.tensor([1, 2, 3, 6])))
    assert rest.shared_prompts.packing.num_tokens == 20 + 2 + 6 + 8 + 20 + 6
    alone = batch.micro_batch(rest.members.tolist(), CPU, shares_prompts=False)
    torch.testing.assert_close(network(rest).logprobs, network(alone).logprobs)
    assert micro_batch.select(torch.zeros(8, dtype=torch.bool)).shared_prompts is None
