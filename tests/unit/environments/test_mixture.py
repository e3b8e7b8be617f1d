"""Which environment plays a prompt."""

from collections import Counter

import pytest
from hypothesis import given, strategies as st

from actors.prompts.order import NUM_BATCHES, Mixture

weights = st.lists(st.floats(0.05, 10), min_size=1, max_size=5)


@given(weights, st.integers(1, 20), st.integers(0, 2**31), st.data())
def test_each_entry_reads_its_own_prompts_one_after_the_other(weights, batch_size, seed, data):
    mixture = Mixture.of_environments(weights, [None] * len(weights), batch_size, seed)
    first = data.draw(st.integers(0, 5000)) * batch_size
    read: dict[int, int] = {}
    for prompt_index in range(first, first + 3 * batch_size):
        entry, own_index = mixture.place(prompt_index)
        assert own_index == read.get(entry, own_index)
        read[entry] = own_index + 1


@given(weights, st.integers(1, 20), st.integers(0, 2**31))
def test_shares_are_the_weights(weights, batch_size, seed):
    mixture = Mixture.of_environments(weights, [None] * len(weights), batch_size, seed)
    num_prompts = NUM_BATCHES * batch_size
    played = mixture.due(NUM_BATCHES)
    assert sum(played) == num_prompts
    for weight, num_played in zip(weights, played, strict=True):
        assert num_played == pytest.approx(weight / sum(weights) * num_prompts, abs=1)


@given(weights, st.integers(1, 20), st.integers(0, 2**31), st.data())
def test_no_batch_has_more_of_an_entry_than_its_limit(weights, batch_size, seed, data):
    limits = [data.draw(st.none() | st.integers(1, batch_size)) for _ in weights]
    limits = [*limits[:-1], None]
    mixture = Mixture.of_environments(weights, limits, batch_size, seed)
    for batch in range(20):
        indices = range(batch * batch_size, (batch + 1) * batch_size)
        counts = Counter(mixture.place(prompt_index)[0] for prompt_index in indices)
        for entry, limit in enumerate(limits):
            assert limit is None or counts[entry] <= limit


def test_the_same_seed_gives_the_same_mixture_and_another_one_another():
    def played(seed: int) -> list[int]:
        mixture = Mixture.of_environments([2, 1], [None, None], 6, seed)
        return [mixture.place(prompt_index)[0] for prompt_index in range(60)]

    assert played(1) == played(1) != played(2)
    assert Counter(played(1)[:6]) == {0: 4, 1: 2}
