"""What the policy losses share: ratios, clipping, weighting, aggregation and metrics."""

import torch
from torch import Tensor

from streamrl.algorithms.losses.aggregation import aggregate, token_mean
from streamrl.algorithms.losses.input import LossInput, LossOutput
from streamrl.config.algorithm.losses import AggregationMode, ClipRangeSettings, LossSettings

_LOG_RATIO_BOUND = 20.0
_OVERFLOW_LOG = 80.0
"""Where a formula leaves the ratio unclamped, this still keeps float32 finite."""


def clamped_ratio(batch: LossInput) -> tuple[Tensor, Tensor]:
    log_ratio = batch.log_ratio.clamp(-_LOG_RATIO_BOUND, _LOG_RATIO_BOUND)
    return log_ratio, log_ratio.exp()


def unclamped_ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(max=_OVERFLOW_LOG).exp()


def clip_terms(
    ratio: Tensor, advantages: Tensor, config: ClipRangeSettings
) -> tuple[Tensor, Tensor]:
    bounded = ratio.clamp(1 - config.clip_ratio_low, 1 + config.clip_ratio_high)
    return -advantages * ratio, -advantages * bounded


def counted_sum(per_token: Tensor, batch: LossInput) -> Tensor:
    """[R] -> [S] sum over the counted tokens of each sequence."""
    mask = batch.loss_mask
    return batch.sequences.sum(per_token if mask is None else torch.where(mask, per_token, 0.0))


def counted_mean(per_token: Tensor, batch: LossInput) -> Tensor:
    """[R] -> [S] mean over the counted tokens of each sequence."""
    if batch.loss_mask is None:
        return batch.sequences.mean(per_token)
    return counted_sum(per_token, batch) / batch.sequences.sum(batch.loss_mask).clamp(min=1)


def finish(
    batch: LossInput,
    config: LossSettings,
    per_token: Tensor,
    log_ratio: Tensor,
    clipped: Tensor | None = None,
    clipped_lower: Tensor | None = None,
    mode: AggregationMode | None = None,
) -> LossOutput:
    """Weigh, aggregate, report."""
    if batch.importance_weights is not None:
        per_token = per_token * batch.importance_weights
    if batch.sample_weights is not None:
        per_token = per_token * batch.sequences.expand(batch.sample_weights)
    loss = aggregate(
        per_token,
        batch.sequences,
        config.loss_agg_mode if mode is None else mode,
        batch.batch_totals,
        batch.loss_mask,
        config,
    )
    return LossOutput(loss, loss_metrics(batch, log_ratio, clipped, clipped_lower))


def loss_metrics(
    batch: LossInput,
    log_ratio: Tensor,
    clipped: Tensor | None,
    clipped_lower: Tensor | None,
) -> dict[str, Tensor]:
    never = torch.zeros_like(log_ratio)
    parts = {
        "actor/ppo_kl": -log_ratio,
        "actor/pg_clipfrac": never if clipped is None else clipped.to(log_ratio.dtype),
        "actor/pg_clipfrac_lower": (
            never if clipped_lower is None else clipped_lower.to(log_ratio.dtype)
        ),
    }
    return {
        name: token_mean(values, batch.sequences, batch.batch_totals, batch.loss_mask)
        for name, values in parts.items()
    }
