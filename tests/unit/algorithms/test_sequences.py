"""Segment reductions over flat tokens: what they give, and what they refuse."""

import pytest
import torch
from hypothesis import given, strategies as st

from streamrl.algorithms.sequences import Sequences
from tests.unit.algorithms.strategies import for_any

LENGTHS = st.lists(st.integers(0, 9), max_size=8)


@for_any
@given(LENGTHS, st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_reductions_agree_with_a_loop_over_sequences(
    lengths: list[int], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    values = torch.randn(sum(lengths)).to(dtype)
    sequences = Sequences.from_lengths(lengths)
    parts = [part.double() for part in values.split(lengths)]
    expected = {
        "sum": [float(part.sum()) for part in parts],
        "mean": [float(part.mean()) if len(part) else 0.0 for part in parts],
        "max": [float(part.max()) if len(part) else 0.0 for part in parts],
    }
    for name, numbers in expected.items():
        reduced = getattr(sequences, name)(values)
        assert reduced.dtype == torch.promote_types(dtype, torch.float32)
        expected_values = torch.tensor(numbers, dtype=torch.float64)
        torch.testing.assert_close(reduced.double(), expected_values, rtol=1e-6, atol=1e-6)
    assert len(sequences) == len(lengths)
    assert sequences.longest == max(lengths, default=0)
    assert sequences.num_nonempty == sum(length > 0 for length in lengths)


@for_any
@given(LENGTHS)
def test_expand_repeats_each_value_once_per_token(lengths: list[int]) -> None:
    sequences = Sequences.from_lengths(torch.tensor(lengths, dtype=torch.int32))
    expanded = sequences.expand(torch.arange(len(lengths)))
    assert expanded.tolist() == [row for row, n in enumerate(lengths) for _ in range(n)]


@for_any
@given(LENGTHS, st.integers(1, 12))
def test_chunks_cut_at_sequence_boundaries_and_cover_everything(
    lengths: list[int], max_tokens: int
) -> None:
    sequences = Sequences.from_lengths(lengths)
    cuts = list(sequences.chunks(max_tokens))
    seen_rows = [row for rows, _ in cuts for row in range(len(lengths))[rows]]
    seen_tokens = [token for _, tokens in cuts for token in range(sum(lengths))[tokens]]
    assert seen_rows == list(range(len(lengths)))
    assert seen_tokens == list(range(sum(lengths)))
    for rows, tokens in cuts:
        part = sequences[rows]
        assert part.num_tokens == tokens.stop - tokens.start
        assert part.num_tokens <= max_tokens or part.num_nonempty == 1


def test_gradients_flow_through_reductions_and_expansion() -> None:
    sequences = Sequences.from_lengths([2, 0, 3])
    values = torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(sequences.sum, values)
    assert torch.autograd.gradcheck(sequences.mean, values)
    assert torch.autograd.gradcheck(lambda v: sequences.expand(sequences.sum(v)), values)


def test_a_long_sequence_in_float32_keeps_its_precision() -> None:
    values = torch.full((1 << 20,), 0.1)
    total = Sequences.from_lengths([len(values)]).sum(values)
    assert abs(float(total) / float(values.double().sum()) - 1) < 1e-6


def test_values_of_another_length_are_refused() -> None:
    sequences = Sequences.from_lengths([2, 1])
    with pytest.raises(ValueError, match=r"must be \(3,\)"):
        sequences.sum(torch.zeros(4))
    with pytest.raises(ValueError, match="3 rows for 2"):
        sequences.expand(torch.zeros(3))
