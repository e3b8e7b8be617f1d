"""Terms added to the policy loss: entropy bonus, KL to a reference, SFT on positives; value loss.

Each takes [R] tensors and, for micro-batches, the totals of the whole batch, and returns a scalar
without its coefficient.
"""

import torch
from torch import Tensor

from streamrl.algorithms.losses.aggregation import (
    BatchTotals,
    LossInput,
    LossOutput,
    aggregate,
    token_mean,
)
from streamrl.algorithms.sequences import Sequences
from streamrl.config.algorithm.losses import LossSettings
from streamrl.config.algorithm.settings import ValueSettings


def entropy_bonus(entropy: Tensor, batch: LossInput, config: LossSettings) -> Tensor:
    """Aggregated entropy [R]; the objective subtracts it."""
    return _aggregate(entropy, batch, config)


def kl_loss(per_token: Tensor, batch: LossInput, config: LossSettings) -> Tensor:
    """Aggregated KL [R] to the reference policy, from `kl_penalty` or `full_kl`."""
    return _aggregate(per_token, batch, config)


def sft_loss(batch: LossInput, config: LossSettings) -> Tensor:
    """Aggregated -log p over trajectories with a positive reward; the others count as 0.

    Raises:
        ValueError: `batch.rewards` is missing.
    """
    if batch.rewards is None:
        raise ValueError("rewards: the SFT term needs the trajectory rewards [S]")
    positive = batch.sequences.expand(batch.rewards > 0)
    return _aggregate(torch.where(positive, -batch.logprobs, 0.0), batch, config)


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    sequences: Sequences,
    config: ValueSettings,
    totals: BatchTotals | None = None,
    loss_mask: Tensor | None = None,
    aggregation: LossSettings | None = None,
) -> LossOutput:
    """Half the squared error, or that of the value clipped around the old one if larger.

    Args:
        values, old_values, returns: [R]; `values` with gradient.
        aggregation: `loss_scale_factor` and `norm_by_sequences` for seq-mean-token-sum-norm.
    """
    plain = (values - returns).square()
    error, clipped = plain, torch.zeros_like(plain)
    if config.clip_range is not None:
        near = values.clamp(old_values - config.clip_range, old_values + config.clip_range)
        bounded = (near - returns).square()
        error, clipped = torch.maximum(plain, bounded), (bounded > plain).to(plain.dtype)
    mode = config.loss_agg_mode
    loss = 0.5 * aggregate(error, sequences, mode, totals, loss_mask, aggregation)
    fraction = token_mean(clipped, sequences, totals, loss_mask)
    return LossOutput(loss, {"critic/vf_clipfrac": fraction, "critic/vf_loss": loss.detach()})


def _aggregate(per_token: Tensor, batch: LossInput, config: LossSettings) -> Tensor:
    mode, mask = config.loss_agg_mode, batch.loss_mask
    return aggregate(per_token, batch.sequences, mode, batch.batch_totals, mask, config)
