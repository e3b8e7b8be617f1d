"""Losses that bound the ratio, of a token or of a sequence: ppo, gspo, geo_mean, cispo, sapo,
vespo."""

import torch

from streamrl.algorithms.losses.finish import (
    clamped_ratio,
    clip_terms,
    counted_mean,
    counted_sum,
    finish,
    loss_metrics,
    unclamped_ratio,
)
from streamrl.algorithms.losses.input import LossInput, LossOutput
from streamrl.config.algorithm.losses import (
    CispoSettings,
    GeoMeanSettings,
    GspoSettings,
    PpoSettings,
    SapoSettings,
    VespoSettings,
)

_GSPO_LOG_BOUND = 10.0
_VESPO_LOG_BOUND = 20.0


def ppo(batch: LossInput, config: PpoSettings) -> LossOutput:
    """Clipped surrogate (arXiv 1707.06347) with dual clip (arXiv 1912.09729)."""
    log_ratio, ratio = clamped_ratio(batch)
    plain, bounded = clip_terms(ratio, batch.advantages, config)
    loss = torch.maximum(plain, bounded)
    clipped = bounded > plain
    lower = torch.zeros_like(clipped)
    if config.clip_ratio_c is not None:
        cap = -batch.advantages * config.clip_ratio_c
        lower = (loss > cap) & (batch.advantages < 0)
        loss = torch.where(batch.advantages < 0, torch.minimum(loss, cap), loss)
    return finish(batch, config, loss, log_ratio, clipped, lower)


def gspo(batch: LossInput, config: GspoSettings) -> LossOutput:
    """Ratio of whole sequences (GSPO, arXiv 2507.18071); always seq-mean-token-mean."""
    log_ratio = batch.log_ratio
    shared = batch.sequences.expand(counted_mean(log_ratio.detach(), batch))
    straight_through = batch.logprobs - batch.logprobs.detach()
    ratio = (straight_through + shared).clamp(max=_GSPO_LOG_BOUND).exp()
    plain, bounded = clip_terms(ratio, batch.advantages, config)
    loss, clipped = torch.maximum(plain, bounded), bounded > plain
    return finish(batch, config, loss, log_ratio, clipped, mode="seq-mean-token-mean")


def geo_mean(batch: LossInput, config: GeoMeanSettings) -> LossOutput:
    """Geometric mean of the token ratios (GMPO, arXiv 2507.20673); mean over sequences.

    Weights enter as their geometric mean over the sequence.
    """
    log_ratio = batch.log_ratio
    bounded = log_ratio.clamp(-config.clip_ratio_low, config.clip_ratio_high)
    sign = batch.advantages.sign()
    pessimistic = sign * torch.minimum(sign * log_ratio, sign * bounded)
    ratio = unclamped_ratio(counted_mean(pessimistic, batch))
    loss = -counted_mean(batch.advantages, batch) * ratio
    if batch.importance_weights is not None:
        weights = batch.importance_weights
        mean_log = counted_mean((weights + 1e-10).log(), batch)
        some = counted_mean((weights > 0).to(loss.dtype), batch) > 0
        loss = loss * torch.where(some, mean_log.exp(), 0.0)
    if batch.sample_weights is not None:
        loss = loss * batch.sample_weights
    above = (log_ratio != bounded) & (batch.advantages > 0)
    below = (log_ratio != bounded) & (batch.advantages < 0)
    loss = loss.sum() / max(batch.batch_totals.num_sequences, 1)
    return LossOutput(loss, loss_metrics(batch, log_ratio, above, below))


def cispo(batch: LossInput, config: CispoSettings) -> LossOutput:
    """Clipped ratio as a constant weight of log p (CISPO, arXiv 2506.13585)."""
    log_ratio, ratio = clamped_ratio(batch)
    bounded = ratio.detach().clamp(1 - config.clip_ratio_low, 1 + config.clip_ratio_high)
    loss = -bounded * batch.advantages * batch.logprobs
    return finish(batch, config, loss, log_ratio, ratio.detach() != bounded)


def sapo(batch: LossInput, config: SapoSettings) -> LossOutput:
    """A soft gate instead of a clip (SAPO, arXiv 2511.20347); always seq-mean-token-mean."""
    log_ratio, ratio = clamped_ratio(batch)
    tau = torch.full_like(ratio, config.tau_neg).masked_fill_(batch.advantages > 0, config.tau_pos)
    loss = -(4 / tau) * torch.sigmoid(tau * (ratio - 1)) * batch.advantages
    return finish(batch, config, loss, log_ratio, mode="seq-mean-token-mean")


def vespo(batch: LossInput, config: VespoSettings) -> LossOutput:
    """-phi(w) A log p, with w the ratio of the whole sequence and the constant weight phi(w) = w^k
    exp(lambda (1 - w)), whose k and lambda depend on the sign of A (VESPO, arXiv 2602.10693,
    pseudocode in its appendix and github.com/FloyedShen/VESPO: w is a product, without a division
    by the length, its logarithm within +-20)."""
    log_ratio = batch.log_ratio
    total = counted_sum(log_ratio.detach().double(), batch)
    log_weight = batch.sequences.expand(total.clamp(-_VESPO_LOG_BOUND, _VESPO_LOG_BOUND))
    is_negative = batch.advantages < 0
    k = torch.where(is_negative, config.k_neg, config.k_pos)
    rate = torch.where(is_negative, config.lambda_neg, config.lambda_pos)
    weight = (k * log_weight - rate * log_weight.expm1()).exp().to(log_ratio.dtype)
    return finish(batch, config, -weight * batch.advantages * batch.logprobs, log_ratio)
