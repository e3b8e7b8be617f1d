"""M2PO's mask: the loop of the paper, one token at a time, has the same result."""

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from streamrl.algorithms.rollout_is import SEQUENCE_ESS, RolloutISStatistics, rollout_is_weights
from streamrl.algorithms.rollout_is.weights import bound_second_moment
from streamrl.algorithms.sequences import Sequences
from streamrl.config.algorithm.rollout_is import ROLLOUT_IS_PRESETS
from tests.settings import RolloutISConfig
from tests.unit.algorithms.strategies import for_any

LIMITS = st.sampled_from([0.001, 0.04, 0.5, 10.0])


def tokens(seed: int, count: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    """log-ratios, advantages and which are counted."""
    numbers = torch.Generator().manual_seed(seed)
    log_ratio = torch.randn(count, generator=numbers, dtype=torch.float64)
    advantages = torch.randint(-1, 2, (count,), generator=numbers).double()
    return log_ratio, advantages, torch.rand(count, generator=numbers) < 0.9


def by_the_paper(log_ratio: Tensor, advantages: Tensor, counted: Tensor, limit: float) -> Tensor:
    """Algorithm 1: while the mean of the remaining harmful ones is too large, mask the largest."""
    keep = torch.ones_like(counted)
    while True:
        harmful = [
            i
            for i, (d, a) in enumerate(zip(log_ratio.tolist(), advantages.tolist(), strict=True))
            if counted[i] and keep[i] and ((a > 0 and d > 0) or (a < 0 and d < 0))
        ]
        squares = [float(log_ratio[i]) ** 2 for i in harmful]
        if not squares or sum(squares) / len(squares) <= limit:
            return keep
        keep[harmful[squares.index(max(squares))]] = False


@for_any
@given(st.integers(0, 10_000), LIMITS)
def test_the_mask_is_that_of_the_paper(seed: int, limit: float) -> None:
    keep, metrics = bound_second_moment(*tokens(seed), limit)
    assert torch.equal(keep, by_the_paper(*tokens(seed), limit))
    assert metrics["mismatch/second_moment_masked_fraction"] == pytest.approx(
        float((~keep).double().mean())
    )


@for_any
@given(st.integers(0, 10_000), LIMITS)
def test_the_mask_does_not_depend_on_the_order(seed: int, limit: float) -> None:
    order = torch.randperm(40, generator=torch.Generator().manual_seed(seed))
    columns = tokens(seed)
    turned, _ = bound_second_moment(*(column[order] for column in columns), limit)
    assert torch.equal(turned, bound_second_moment(*columns, limit)[0][order])


def test_equally_large_ones_are_masked_together() -> None:
    log_ratio = torch.tensor([2.0, 0.1, 2.0, 0.1], dtype=torch.float64)
    keep, metrics = bound_second_moment(log_ratio, torch.ones(4), torch.ones(4).bool(), limit=1.5)
    assert keep.tolist() == [False, True, False, True]
    assert metrics["mismatch/second_moment"] == pytest.approx(2.005)


def test_a_mean_that_is_the_limit_is_within_it() -> None:
    keep, _ = bound_second_moment(-torch.ones(2), -torch.ones(2), torch.ones(2).bool(), limit=1.0)
    assert keep.all()


def test_a_batch_on_policy_keeps_all() -> None:
    logprobs, advantages = -torch.rand(6), torch.tensor([1.0, -1, 0, 1, -1, 2])
    config, sequences = ROLLOUT_IS_PRESETS["m2po"], Sequences.from_lengths([4, 2])
    result = rollout_is_weights(logprobs, logprobs, sequences, config, advantages=advantages)
    assert result.weights is not None
    assert result.weights.tolist() == [1.0] * 6
    assert bool(result.keep.all())
    assert result.metrics["mismatch/second_moment"] == 0
    assert result.metrics["mismatch/second_moment_masked_fraction"] == 0


def test_a_batch_without_tokens_has_no_mask() -> None:
    nothing = torch.zeros(0)
    config = ROLLOUT_IS_PRESETS["m2po"]
    sequences = Sequences.from_lengths([])
    result = rollout_is_weights(nothing, nothing, sequences, config, advantages=nothing)
    assert len(result.keep) == 0


def test_what_other_rules_take_out_is_not_in_the_mean() -> None:
    """A vetoed, a rejected and a non-finite sequence, which would each be masked as harmful."""
    train = torch.tensor([0.1, 0.1, 0.1, -20.0, 0.1, 9.0, torch.inf, 0.1])
    sequences = Sequences.from_lengths([2, 2, 2, 2])
    advantages = torch.tensor([1.0, 1, -1, -1, 1, 1, 1, 1])
    config = RolloutISConfig(threshold=1e6, second_moment=0.04, rejection=({"seq_max_k2": 30.0},))
    result = rollout_is_weights(train, torch.zeros(8), sequences, config, advantages=advantages)
    assert result.accepted.tolist() == [True, True, *[False] * 6]
    assert result.metrics["mismatch/second_moment"] == pytest.approx(0.01)


def test_a_veto_that_is_switched_off_leaves_its_sequences_to_the_mean() -> None:
    config = RolloutISConfig(apply=False, veto_threshold=1e-4, second_moment=0.04)
    train, sequences = torch.tensor([-11.0, 0, 0, 0]), Sequences.from_lengths([2, 2])
    result = rollout_is_weights(train, torch.zeros(4), sequences, config, advantages=-torch.ones(4))
    assert result.accepted.tolist() == [False, True, True, True]


def test_without_advantages_it_is_refused() -> None:
    train, sequences = torch.zeros(2), Sequences.from_lengths([2])
    with pytest.raises(ValueError, match="second_moment: needs the advantages"):
        rollout_is_weights(train, train, sequences, ROLLOUT_IS_PRESETS["m2po"])


@pytest.mark.parametrize("name", ["token_is", "vcpo", "geometric_clip", "metrics_only"])
def test_the_effective_sample_size_of_sequences_is_that_of_their_unbounded_ratios(
    name: str,
) -> None:
    lengths, config = [3, 1, 0, 4, 2], ROLLOUT_IS_PRESETS[name]
    numbers = torch.Generator().manual_seed(0)
    train = torch.randn(10, generator=numbers, dtype=torch.float64)
    ratios = [float(part.sum().exp()) for part in train.split(lengths) if len(part)]
    expected = sum(ratios) ** 2 / sum(r * r for r in ratios) / len(ratios)

    def measured(rows: slice, tokens: slice) -> RolloutISStatistics:
        sequences = Sequences.from_lengths(lengths[rows])
        zeros = torch.zeros_like(train[tokens])
        statistics = rollout_is_weights(train[tokens], zeros, sequences, config).statistics
        assert statistics is not None
        return statistics

    whole = measured(slice(0, 5), slice(0, 10))
    merged = measured(slice(0, 3), slice(0, 4)).merge(measured(slice(3, 5), slice(4, 10)))
    for statistics in (whole, merged):
        assert statistics.metrics(config)[SEQUENCE_ESS] == pytest.approx(expected)
