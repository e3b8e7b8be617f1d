"""The off-policy baseline of least variance: what it minimizes, and where it is the mean."""

import torch
from hypothesis import assume, given, strategies as st

from streamrl.algorithms.advantages import ADVANTAGES, AdvantageInput
from streamrl.algorithms.sequences import Sequences
from tests.settings import AdvantageConfig
from tests.unit.algorithms.strategies import for_any

SIZE = 4


def make_batch(seed: int, spread: float) -> AdvantageInput:
    """Two groups of uneven lengths, their log-ratios as large as `spread`."""
    numbers = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 6, (2 * SIZE,), generator=numbers)
    count = int(lengths.sum())
    logprobs = -3 * torch.rand(count, generator=numbers, dtype=torch.float64) - 0.01
    gaps = spread * torch.randn(count, generator=numbers, dtype=torch.float64)
    return AdvantageInput(
        token_rewards=torch.randn(count, generator=numbers, dtype=torch.float64),
        groups=torch.arange(2).repeat_interleave(SIZE),
        sequences=Sequences.from_lengths(lengths),
        logprobs=logprobs,
        behavior_logprobs=logprobs - gaps,
    )


def advantages_of(batch: AdvantageInput) -> torch.Tensor:
    """[S]"""
    tokens = ADVANTAGES["opob"](batch, AdvantageConfig())
    return batch.sequences.mean(tokens)


def variance_of(batch: AdvantageInput, advantages: torch.Tensor) -> torch.Tensor:
    """[G] what the baseline minimizes: sum of (w g A)^2 over each group."""
    assert batch.logprobs is not None
    assert batch.behavior_logprobs is not None
    ratios = batch.sequences.sum(batch.logprobs - batch.behavior_logprobs).exp()
    norms = batch.sequences.sum((1 - batch.logprobs.exp()).square())
    return (ratios.square() * norms * advantages.square()).view(2, SIZE).sum(1)


@for_any
@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.1, 1.0]))
def test_no_other_baseline_has_less_variance(seed: int, spread: float) -> None:
    batch = make_batch(seed, spread)
    advantages = advantages_of(batch)
    least = variance_of(batch, advantages)
    shift = batch.returns - advantages
    for group in shift.view(2, SIZE):
        torch.testing.assert_close(group, group[0].expand(SIZE))
    for change in (-0.5, -1e-3, 1e-3, 0.5):
        assert bool((variance_of(batch, advantages + change) > least).all())


@for_any
@given(st.integers(0, 10_000))
def test_on_policy_with_one_gradient_norm_for_all_it_is_the_mean(seed: int) -> None:
    lengths = [3] * SIZE
    numbers = torch.Generator().manual_seed(seed)
    logprobs = torch.full((3 * SIZE,), -0.7, dtype=torch.float64)
    rewards = torch.randn(3 * SIZE, generator=numbers, dtype=torch.float64)
    groups, sequences = torch.zeros(SIZE).long(), Sequences.from_lengths(lengths)
    batch = AdvantageInput(
        rewards, groups, sequences, logprobs=logprobs, behavior_logprobs=logprobs
    )
    ours = ADVANTAGES["opob"](batch, AdvantageConfig())
    torch.testing.assert_close(ours, ADVANTAGES["dr_grpo"](batch, AdvantageConfig()))


@for_any
@given(st.integers(0, 10_000))
def test_ratios_beyond_any_number_leave_a_finite_baseline(seed: int) -> None:
    batch = make_batch(seed, spread=1e4)
    advantages = advantages_of(batch)
    assert bool(advantages.isfinite().all())
    assert batch.logprobs is not None
    assert batch.behavior_logprobs is not None
    sums = batch.sequences.sum(batch.logprobs - batch.behavior_logprobs)
    first, second = sums.view(2, SIZE).topk(2).values.unbind(1)
    assume(bool((first - second > 100).all()))
    # The baseline is the reward of the one whose weight is all of the weight.
    assert bool((advantages.view(2, SIZE).abs().min(1).values < 1e-9).all())


def test_a_policy_that_is_certain_of_each_token_has_the_mean() -> None:
    zeros = torch.zeros(4, dtype=torch.float64)
    rewards = torch.tensor([0.0, 1.0, 2.0, 5.0], dtype=torch.float64)
    batch = AdvantageInput(
        rewards,
        torch.zeros(4).long(),
        Sequences.from_lengths([1] * 4),
        logprobs=zeros,
        behavior_logprobs=zeros,
    )
    torch.testing.assert_close(advantages_of(batch), rewards - rewards.mean())


@for_any
@given(st.integers(0, 10_000), st.sampled_from([0.1, 1.0, 10.0]))
def test_the_norm_of_a_tokens_gradient_is_known_within_a_factor_of_two(
    seed: int, spread: float
) -> None:
    """(1 - p)^2, against the squared norm of the gradient with respect to all logits."""
    numbers = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(9, generator=numbers, dtype=torch.float64)
    logits.requires_grad_()
    logprob = logits.log_softmax(0)[3]
    (gradient,) = torch.autograd.grad(logprob, logits)
    estimate = float(logprob.expm1().square())
    assert estimate * (1 - 1e-9) <= float(gradient.square().sum()) <= 2 * estimate * (1 + 1e-9)
