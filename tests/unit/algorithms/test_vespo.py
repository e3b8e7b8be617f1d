"""VESPO's soft weight: the pseudocode of the paper, and the ends of its range."""

from dataclasses import replace

import torch
from hypothesis import given, strategies as st
from torch import Tensor

from streamrl.algorithms.losses import POLICY_LOSSES, LossInput
from streamrl.algorithms.sequences import Sequences
from streamrl.config.algorithm.losses import VespoSettings
from tests.settings import LossConfig
from tests.unit.algorithms.strategies import for_any

LENGTHS = [4, 0, 2, 5]


def make_batch(seed: int, spread: float) -> LossInput:
    numbers = torch.Generator().manual_seed(seed)
    proximal = -2 * torch.rand(11, generator=numbers, dtype=torch.float64)
    gaps = spread * torch.randn(11, generator=numbers, dtype=torch.float64)
    per_sequence = torch.randn(4, generator=numbers, dtype=torch.float64)
    sequences = Sequences.from_lengths(LENGTHS)
    return LossInput(
        logprobs=(proximal + gaps).requires_grad_(),
        proximal_logprobs=proximal,
        advantages=sequences.expand(per_sequence),
        importance_weights=None,
        sequences=sequences,
    )


def gradient(batch: LossInput, name: str = "vespo", **numbers: float) -> Tensor:
    loss = POLICY_LOSSES[name](batch, LossConfig(**numbers)).loss
    return torch.autograd.grad(loss, batch.logprobs)[0]


def by_the_paper(batch: LossInput) -> Tensor:
    """Appendix of arXiv 2602.10693, sequence by sequence; the mean over tokens."""
    losses = []
    columns = (batch.logprobs, batch.proximal_logprobs, batch.advantages)
    for log_pi, log_mu, advantages in zip(*(c.split(LENGTHS) for c in columns), strict=True):
        if not len(log_pi):
            continue
        seq_log_w = (log_pi - log_mu).sum()
        c1, c2 = (2, 3) if advantages[0] >= 0 else (3, 2)
        phi = (c2 + c1 * seq_log_w - c2 * seq_log_w.exp()).exp().detach()
        losses.append(-phi * advantages * log_pi)
    return torch.cat(losses).mean()


@for_any
@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.05, 0.5]))
def test_the_loss_is_that_of_the_paper(seed: int, spread: float) -> None:
    batch = make_batch(seed, spread)
    output = POLICY_LOSSES["vespo"](batch, VespoSettings())
    torch.testing.assert_close(output.loss, by_the_paper(batch))
    (theirs,) = torch.autograd.grad(by_the_paper(batch), batch.logprobs)
    torch.testing.assert_close(gradient(batch), theirs)


@for_any
@given(st.integers(0, 10_000))
def test_on_policy_the_gradient_is_exactly_that_of_reinforce(seed: int) -> None:
    batch = make_batch(seed, spread=0.0)
    assert torch.equal(gradient(batch), gradient(batch, "reinforce"))


@for_any
@given(st.integers(0, 10_000), st.sampled_from([-30.0, 30.0]))
def test_ratios_far_from_one_weigh_nothing(seed: int, shift: float) -> None:
    batch = make_batch(seed, spread=0.0)
    far = replace(batch, logprobs=(batch.proximal_logprobs + shift).requires_grad_())
    assert float(gradient(far).abs().max()) < 1e-12


def test_where_nothing_dampens_a_ratio_it_ends_at_20_nats() -> None:
    batch, undamped = make_batch(0, spread=0.0), {"lambda_pos": 0.0, "lambda_neg": 0.0}
    far, further = (
        replace(batch, logprobs=(batch.proximal_logprobs + shift).requires_grad_())
        for shift in (15.0, 30.0)
    )
    torch.testing.assert_close(gradient(far, **undamped), gradient(further, **undamped))


@for_any
@given(st.integers(0, 10_000))
def test_masked_tokens_are_not_in_the_ratio(seed: int) -> None:
    batch = make_batch(seed, spread=0.3)
    mask = torch.rand(11, generator=torch.Generator().manual_seed(seed)) < 0.7
    masked = replace(batch, loss_mask=mask)
    extreme = batch.logprobs.detach() + torch.where(mask, 0.0, 5.0)
    moved = replace(masked, logprobs=extreme.requires_grad_())
    torch.testing.assert_close(gradient(moved), gradient(masked))
