"""Runs of prompts are the set of these prompts."""

import hypothesis.strategies as st
from hypothesis import given

from streamrl.types.index_ranges import IndexRangeSet, members, ranges_of

SEQUENCES = st.integers(0, 12)


@given(st.lists(SEQUENCES), st.lists(st.tuples(st.booleans(), SEQUENCES), max_size=60))
def test_a_set_of_runs_holds_what_a_set_holds(first: list[int], changes: list[tuple[bool, int]]):
    runs, expected = IndexRangeSet(first), set(first)
    for is_new, prompt_index in changes:
        if is_new:
            runs.add(prompt_index)
            expected.add(prompt_index)
        else:
            runs.discard(prompt_index)
            expected.discard(prompt_index)
        assert list(members(runs.frozen())) == sorted(expected)
        assert runs.frozen() == ranges_of(expected)


@given(st.sets(SEQUENCES))
def test_runs_are_as_few_as_can_be(prompt_indices: set[int]):
    runs = ranges_of(prompt_indices)
    assert len(runs) == sum(
        prompt_index - 1 not in prompt_indices for prompt_index in prompt_indices
    )
    assert all(start < stop for start, stop in runs)
