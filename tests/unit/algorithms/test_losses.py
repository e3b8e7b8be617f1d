"""Promises of the policy losses and the terms beside them."""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from streamrl.algorithms.losses import (
    POLICY_LOSSES,
    BatchTotals,
    LossInput,
    aggregate,
    policy_loss,
    sft_loss,
    value_loss,
)
from streamrl.algorithms.sequences import Sequences
from streamrl.config.algorithm.losses import LOSS_SETTINGS
from streamrl.config.algorithm.settings import ValueSettings
from tests.settings import LossConfig
from tests.unit.algorithms.strategies import for_any

MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)
PICKS_TOKENS = ("clip_cov", "kl_cov")
NO_TIES = LossConfig(kl_cov_ratio=1.0)
"""Penalizes every token: which of two equal covariances is the larger is a matter of rounding."""
CUTTABLE = tuple(name for name in LOSS_SETTINGS if name not in PICKS_TOKENS)
for_each_loss = settings(for_any, max_examples=10)
"""Fifteen losses share most of their code."""


@st.composite
def loss_inputs(draw: st.DrawFn) -> LossInput:
    """float64; log-ratios up to +-25, zero weights and empty sequences included."""
    lengths = draw(st.lists(st.integers(0, 5), min_size=1, max_size=5))
    count, rows = sum(lengths), len(lengths)
    numbers = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    proximal = -3 * torch.rand(count, generator=numbers, dtype=torch.float64)
    ratio = torch.randn(count, generator=numbers, dtype=torch.float64)
    extreme = torch.rand(count, generator=numbers) < 0.1
    ratio = torch.where(extreme, 25 * ratio.sign(), 0.3 * ratio)
    weights = 2 * torch.rand(count, generator=numbers, dtype=torch.float64)
    return LossInput(
        logprobs=(proximal + ratio).requires_grad_(),
        proximal_logprobs=proximal,
        advantages=torch.randn(count, generator=numbers, dtype=torch.float64),
        importance_weights=weights * (torch.rand(count, generator=numbers) < 0.8),
        sequences=Sequences.from_lengths(lengths),
        rewards=torch.randn(rows, generator=numbers, dtype=torch.float64),
        sample_weights=1 + torch.rand(rows, generator=numbers, dtype=torch.float64),
        loss_mask=torch.rand(count, generator=numbers) < 0.8,
    )


def test_the_table_has_the_names_of_the_config() -> None:
    assert tuple(POLICY_LOSSES) == tuple(LOSS_SETTINGS)


@pytest.mark.parametrize("name", LOSS_SETTINGS)
@for_each_loss
@given(batch=loss_inputs())
def test_a_loss_reads_its_own_record_and_the_one_of_all_losses_alike(
    name: str, batch: LossInput
) -> None:
    record = LOSS_SETTINGS[name]
    assert issubclass(LossConfig, record)
    assert record().model_dump().items() <= LossConfig().model_dump().items()
    torch.manual_seed(0)
    own = POLICY_LOSSES[name](batch, record())
    torch.manual_seed(0)
    everything = POLICY_LOSSES[name](batch, LossConfig())
    assert torch.equal(own.loss, everything.loss)


def test_an_unknown_loss_is_named_with_what_was_meant() -> None:
    with pytest.raises(ValueError, match="'pppo' is unknown; did you mean 'ppo'"):
        policy_loss("pppo")


@pytest.mark.parametrize("name", LOSS_SETTINGS)
@for_each_loss
@given(batch=loss_inputs())
def test_gradients_are_finite_for_log_ratios_of_25(name: str, batch: LossInput) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        logprobs = batch.logprobs.detach().to(dtype).requires_grad_()
        narrow = replace(batch, logprobs=logprobs)
        output = POLICY_LOSSES[name](narrow, LossConfig())
        (gradient,) = torch.autograd.grad(output.loss, logprobs)
        assert bool(gradient.isfinite().all())
        assert gradient.dtype == dtype
        assert all(bool(metric.isfinite()) for metric in output.metrics.values())


@pytest.mark.parametrize("name", CUTTABLE)
@for_any
@given(
    mode=st.sampled_from(MODES),
    batch=loss_inputs(),
    cuts=st.lists(st.integers(0, 5), max_size=2),
)
def test_micro_batches_with_shared_totals_add_up_to_the_batch(
    name: str, mode: str, batch: LossInput, cuts: list[int]
) -> None:
    config = LossConfig(loss_agg_mode=mode)
    whole = POLICY_LOSSES[name](batch, config)
    parts = list(_cut(batch, cuts))
    totals = parts[0].batch_totals
    for part in parts[1:]:
        totals = totals + part.batch_totals
    outputs = [POLICY_LOSSES[name](replace(part, totals=totals), config) for part in parts]
    total = torch.stack([output.loss for output in outputs]).sum()
    torch.testing.assert_close(total, whole.loss)
    _assert_same_gradient(total, whole.loss, batch.logprobs)
    for metric, value in whole.metrics.items():
        summed = torch.stack([output.metrics[metric] for output in outputs]).sum()
        torch.testing.assert_close(summed, value)


@pytest.mark.parametrize("name", LOSS_SETTINGS)
@for_each_loss
@given(batch=loss_inputs())
def test_empty_sequences_change_nothing(name: str, batch: LossInput) -> None:
    lengths = [0, *batch.sequences.lengths.tolist(), 0]
    padded = replace(
        batch,
        sequences=Sequences.from_lengths(lengths),
        rewards=_between_zeros(batch.rewards),
        sample_weights=_between_zeros(batch.sample_weights),
    )
    torch.manual_seed(0)
    plain = POLICY_LOSSES[name](batch, NO_TIES)
    torch.manual_seed(0)
    other = POLICY_LOSSES[name](padded, NO_TIES)
    torch.testing.assert_close(plain.loss, other.loss)


@pytest.mark.parametrize("name", LOSS_SETTINGS)
@for_each_loss
@given(batch=loss_inputs())
def test_a_masked_token_is_as_good_as_absent(name: str, batch: LossInput) -> None:
    """Masked tokens may even be NaN; denominators do not count them."""
    assert batch.loss_mask is not None
    mask = batch.loss_mask
    poisoned = torch.where(mask, batch.logprobs.detach(), math.nan).requires_grad_()
    lengths = batch.sequences.sum(mask).long()
    absent = LossInput(
        logprobs=batch.logprobs.detach()[mask].requires_grad_(),
        proximal_logprobs=batch.proximal_logprobs[mask],
        advantages=batch.advantages[mask],
        importance_weights=batch.importance_weights[mask],
        sequences=Sequences.from_lengths(lengths),
        rewards=batch.rewards,
        sample_weights=batch.sample_weights,
    )
    torch.manual_seed(0)
    masked = POLICY_LOSSES[name](replace(batch, logprobs=poisoned), NO_TIES)
    torch.manual_seed(0)
    shorter = POLICY_LOSSES[name](absent, NO_TIES)
    torch.testing.assert_close(masked.loss, shorter.loss)
    (gradient,) = torch.autograd.grad(masked.loss, poisoned)
    assert bool(gradient.isfinite().all())
    assert not gradient[~mask].any()


@pytest.mark.parametrize("name", CUTTABLE)
@for_each_loss
@given(batch=loss_inputs())
def test_a_vetoed_sequence_contributes_exactly_nothing(name: str, batch: LossInput) -> None:
    """Weight 0 wins over NaN, and the sequence still counts in the denominator."""
    first = batch.sequences.expand(torch.arange(len(batch.sequences))) == 0
    weights = torch.where(first, 0.0, 1.0).double()
    logprobs = batch.logprobs.detach()
    vetoed = replace(batch, importance_weights=weights, loss_mask=None, sample_weights=None)
    values = []
    for stand_in in (logprobs, torch.where(first, math.nan, logprobs)):
        leaf = stand_in.clone().requires_grad_()
        output = POLICY_LOSSES[name](replace(vetoed, logprobs=leaf), LossConfig())
        (gradient,) = torch.autograd.grad(output.loss, leaf)
        assert not gradient[first].any()
        values = [*values, output.loss]
    assert all(torch.equal(value, values[0]) for value in values)


@pytest.mark.parametrize("name", LOSS_SETTINGS)
def test_on_policy_every_loss_descends_along_the_policy_gradient(name: str) -> None:
    """At ratio 1 the gradient is -A per token, up to a positive factor per loss."""
    torch.manual_seed(3)
    proximal = -torch.rand(6, dtype=torch.float64)
    advantages = torch.tensor([1.0, 1.0, 1.0, -2.0, -2.0, -2.0], dtype=torch.float64)
    logprobs = proximal.clone().requires_grad_()
    sequences, rewards = Sequences.from_lengths([3, 3]), torch.tensor([1.0, -1.0])
    batch = LossInput(logprobs, proximal, advantages, None, sequences, rewards)
    config = LossConfig(clip_cov_lb=100.0, clip_cov_ub=200.0, kl_cov_coef=0.0)
    output = POLICY_LOSSES[name](batch, config)
    (gradient,) = torch.autograd.grad(output.loss, logprobs)
    length = 3 if name == "luspo" else 1
    torch.testing.assert_close(gradient, -advantages * length / 6)


def test_dual_clip_bounds_the_loss_of_a_negative_advantage() -> None:
    logprobs = torch.tensor([3.0], dtype=torch.float64)
    batch = LossInput(
        logprobs,
        torch.zeros(1, dtype=torch.float64),
        torch.tensor([-1.0], dtype=torch.float64),
        None,
        Sequences.from_lengths([1]),
    )
    assert float(POLICY_LOSSES["ppo"](batch, LossConfig()).loss) == 3.0
    unbounded = POLICY_LOSSES["ppo"](batch, LossConfig(clip_ratio_c=None)).loss
    assert float(unbounded) == pytest.approx(math.exp(3))


def test_what_is_exactly_at_a_bound_is_within_it() -> None:
    halves = torch.full((1,), 0.5, dtype=torch.float64)
    batch = LossInput(
        logprobs=halves.new_tensor([0.75]).log(),
        proximal_logprobs=halves.log(),
        advantages=torch.ones(1, dtype=torch.float64),
        importance_weights=None,
        sequences=Sequences.from_lengths([1]),
    )
    inside = POLICY_LOSSES["dppo_tv"](batch, LossConfig(clip_ratio_high=0.25))
    assert inside.metrics["actor/pg_clipfrac"] == 0
    doubled = replace(batch, logprobs=halves.new_zeros(1), advantages=-batch.advantages)
    capped = POLICY_LOSSES["ppo"](doubled, LossConfig(clip_ratio_c=2.0))
    assert capped.metrics["actor/pg_clipfrac_lower"] == 0


def test_topr_takes_no_negative_trajectory_for_more_than_one() -> None:
    batch = LossInput(
        logprobs=torch.tensor([-1.0, -1.0]),
        proximal_logprobs=torch.tensor([-3.0, 0.0]),
        advantages=-torch.ones(2),
        importance_weights=None,
        sequences=Sequences.from_lengths([1, 1]),
        rewards=torch.tensor([0.0, 0.0]),
    )
    loss = POLICY_LOSSES["topr"](batch, LossConfig(loss_agg_mode="token-sum")).loss
    assert float(loss) == pytest.approx(-1 - math.exp(-1))


def test_aggregation_modes_are_what_their_names_say() -> None:
    per_token = torch.tensor([1.0, 2.0, 3.0, 10.0])
    sequences = Sequences.from_lengths([3, 0, 1])
    expected = {
        "token-mean": 4.0,
        "token-sum": 16.0,
        "seq-mean-token-sum": 8.0,
        "seq-mean-token-mean": 6.0,
        "seq-mean-token-sum-norm": 8 / 3,
    }
    for mode, value in expected.items():
        assert float(aggregate(per_token, sequences, mode)) == pytest.approx(value)
    fixed = LossConfig(loss_scale_factor=4, norm_by_sequences=False)
    norm = aggregate(per_token, sequences, "seq-mean-token-sum-norm", config=fixed)
    assert float(norm) == 4.0


def test_totals_count_only_what_the_mask_keeps() -> None:
    sequences = Sequences.from_lengths([3, 0, 2])
    assert BatchTotals.of(sequences) == BatchTotals(5, 2, 3)
    mask = torch.tensor([True, False, False, False, False])
    assert BatchTotals.of(sequences, mask) == BatchTotals(1, 1, 3)
    assert BatchTotals(5, 2, 3) + BatchTotals(2, 1, 7) == BatchTotals(7, 3, 7)


def test_the_value_loss_stops_rewarding_moves_beyond_the_clip() -> None:
    values = torch.tensor([2.0, 0.1], requires_grad=True)
    old, returns = torch.zeros(2), torch.tensor([3.0, 3.0])
    output = value_loss(values, old, returns, Sequences.from_lengths([2]), ValueSettings())
    (gradient,) = torch.autograd.grad(output.loss, values)
    assert gradient[0] == 0
    assert gradient[1] < 0
    assert float(output.metrics["critic/vf_clipfrac"]) == 0.5


def test_sft_counts_positive_trajectories_and_divides_by_all() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -5.0], requires_grad=True)
    batch = LossInput(
        logprobs,
        torch.zeros(3),
        torch.zeros(3),
        None,
        Sequences.from_lengths([2, 1]),
        rewards=torch.tensor([1.0, 0.0]),
    )
    assert sft_loss(batch, LossConfig()).item() == pytest.approx(1.0)


def test_missing_and_misshapen_inputs_are_named() -> None:
    zeros, sequences = torch.zeros(2), Sequences.from_lengths([2])
    with pytest.raises(ValueError, match="advantages"):
        LossInput(zeros, zeros, torch.zeros(3), None, sequences)
    batch = LossInput(zeros, zeros, zeros, None, sequences)
    with pytest.raises(ValueError, match="rewards"):
        POLICY_LOSSES["topr"](batch, LossConfig())
    with pytest.raises(ValueError, match="rewards"):
        sft_loss(batch, LossConfig())


def _cut(batch: LossInput, cuts: list[int]) -> Iterator[LossInput]:
    """Micro-batches of whole sequences."""
    rows = len(batch.sequences)
    edges = sorted({0, rows, *(min(cut, rows) for cut in cuts)})
    ends = [0, *batch.sequences.lengths.cumsum(0).tolist()]
    for first, last in pairwise(edges):
        tokens = slice(ends[first], ends[last])
        yield LossInput(
            logprobs=batch.logprobs[tokens],
            proximal_logprobs=batch.proximal_logprobs[tokens],
            advantages=batch.advantages[tokens],
            importance_weights=batch.importance_weights[tokens],
            sequences=batch.sequences[first:last],
            rewards=batch.rewards[first:last],
            loss_mask=batch.loss_mask[tokens],
            sample_weights=batch.sample_weights[first:last],
        )


def _between_zeros(values: Tensor | None) -> Tensor:
    assert values is not None
    zero = values.new_zeros(1)
    return torch.cat([zero, values, zero])


def _assert_same_gradient(ours: Tensor, whole: Tensor, leaf: Tensor) -> None:
    first, second = (
        torch.autograd.grad(loss, leaf, retain_graph=True)[0] for loss in (ours, whole)
    )
    torch.testing.assert_close(first, second)
