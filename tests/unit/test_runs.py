"""Runs of sequences are the set of these sequences."""

import hypothesis.strategies as st
from hypothesis import given

from streamrl.types.runs import RunSet, members, runs_of

SEQUENCES = st.integers(0, 12)


@given(st.lists(SEQUENCES), st.lists(st.tuples(st.booleans(), SEQUENCES), max_size=60))
def test_a_set_of_runs_holds_what_a_set_holds(first: list[int], changes: list[tuple[bool, int]]):
    runs, expected = RunSet(first), set(first)
    for is_new, sequence in changes:
        if is_new:
            runs.add(sequence)
            expected.add(sequence)
        else:
            runs.discard(sequence)
            expected.discard(sequence)
        assert list(members(runs.frozen())) == sorted(expected)
        assert runs.frozen() == runs_of(expected)


@given(st.sets(SEQUENCES))
def test_runs_are_as_few_as_can_be(sequences: set[int]):
    runs = runs_of(sequences)
    assert len(runs) == sum(sequence - 1 not in sequences for sequence in sequences)
    assert all(start < stop for start, stop in runs)
