"""Policy losses, by name.

With r = exp(clamp(D, -20, 20)), D = logprobs - proximal_logprobs and A the advantages, each loss
is a number per token; importance weights and sample weights multiply it after clipping, before it
is aggregated. Formulas as in verl (github.com/volcengine/verl, core_algos.py) and ROLL
(github.com/alibaba/ROLL); each function names its paper.

Invariant: losses and metrics of micro-batches that share `totals` add up to those of the batch;
only clip_cov and kl_cov pick their tokens within a micro-batch.

Different from the originals on purpose: empty sequences are in no mean (verl's gspo becomes NaN,
its geo_mean counts them); in geo_mean a sequence of zero weights contributes 0, not 1e-10 of it.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from streamrl.algorithms.aggregation import BatchTotals, aggregate, token_mean
from streamrl.algorithms.loss_input import LossInput, LossOutput
from streamrl.algorithms.terms import entropy_bonus, kl_loss, sft_loss, value_loss
from streamrl.config.losses import AggregationMode, LossConfig

__all__ = [
    "POLICY_LOSSES",
    "BatchTotals",
    "LossConfig",
    "LossInput",
    "LossOutput",
    "PolicyLoss",
    "aggregate",
    "entropy_bonus",
    "kl_loss",
    "sft_loss",
    "value_loss",
]

_LOG_RATIO_BOUND = 20.0
_GSPO_LOG_BOUND = 10.0
_OVERFLOW_LOG = 80.0
"""Where a formula leaves the ratio unclamped, this still keeps float32 finite."""


PolicyLoss = Callable[[LossInput, LossConfig], LossOutput]


def ppo(batch: LossInput, config: LossConfig) -> LossOutput:
    """Clipped surrogate (arXiv 1707.06347) with dual clip (arXiv 1912.09729)."""
    log_ratio, ratio = _clamped_ratio(batch)
    plain, bounded = _clip_terms(ratio, batch.advantages, config)
    loss = torch.maximum(plain, bounded)
    clipped = bounded > plain
    lower = torch.zeros_like(clipped)
    if config.clip_ratio_c is not None:
        cap = -batch.advantages * config.clip_ratio_c
        lower = (loss > cap) & (batch.advantages < 0)
        loss = torch.where(batch.advantages < 0, torch.minimum(loss, cap), loss)
    return _finish(batch, config, loss, log_ratio, clipped, lower)


def gspo(batch: LossInput, config: LossConfig) -> LossOutput:
    """Ratio of whole sequences (GSPO, arXiv 2507.18071); always seq-mean-token-mean."""
    log_ratio = batch.log_ratio
    shared = batch.sequences.expand(_masked_mean(log_ratio.detach(), batch))
    straight_through = batch.logprobs - batch.logprobs.detach()
    ratio = (straight_through + shared).clamp(max=_GSPO_LOG_BOUND).exp()
    plain, bounded = _clip_terms(ratio, batch.advantages, config)
    loss, clipped = torch.maximum(plain, bounded), bounded > plain
    return _finish(batch, config, loss, log_ratio, clipped, mode="seq-mean-token-mean")


def gpg(batch: LossInput, config: LossConfig) -> LossOutput:
    """Group policy gradient (arXiv 2504.02546): -A log p."""
    return _finish(batch, config, -batch.logprobs * batch.advantages, batch.log_ratio)


def clip_cov(batch: LossInput, config: LossConfig) -> LossOutput:
    """Drop the loss of random tokens of high covariance of A and log p (arXiv 2505.22617)."""
    log_ratio = batch.log_ratio
    plain, bounded = _clip_terms(_unclamped(log_ratio), batch.advantages, config)
    covariance = _covariance(batch).masked_fill(bounded > plain, -torch.inf)
    eligible = (covariance > config.clip_cov_lb) & (covariance < config.clip_cov_ub)
    candidates = eligible.nonzero().squeeze(1)
    count = max(int(config.clip_cov_ratio * _num_counted(batch)), 1)
    chosen = candidates[torch.randperm(len(candidates))[:count].to(candidates.device)]
    dropped = torch.zeros_like(eligible).index_fill_(0, chosen, True)
    loss = torch.where(dropped, 0.0, torch.maximum(plain, bounded))
    return _finish(batch, config, loss, log_ratio, dropped)


def kl_cov(batch: LossInput, config: LossConfig) -> LossOutput:
    """Penalize |D| on the tokens of highest covariance (arXiv 2505.22617).

    Its `ppo_kl` is the mean of |D|, as the original reports it.
    """
    log_ratio = batch.log_ratio
    loss = -batch.advantages * _unclamped(log_ratio)
    num_counted = _num_counted(batch)
    if num_counted:
        top = _covariance(batch).topk(max(1, int(num_counted * config.kl_cov_ratio))).indices
        penalized = torch.zeros_like(loss).index_fill_(0, top, config.kl_cov_coef)
        loss = loss + penalized * log_ratio.abs()
    return _finish(batch, config, loss, -log_ratio.detach().abs())


def geo_mean(batch: LossInput, config: LossConfig) -> LossOutput:
    """Geometric mean of the token ratios (GMPO, arXiv 2507.20673); mean over sequences.

    Weights enter as their geometric mean over the sequence.
    """
    log_ratio = batch.log_ratio
    bounded = log_ratio.clamp(-config.clip_ratio_low, config.clip_ratio_high)
    sign = batch.advantages.sign()
    pessimistic = sign * torch.minimum(sign * log_ratio, sign * bounded)
    ratio = _unclamped(_masked_mean(pessimistic, batch))
    loss = -_masked_mean(batch.advantages, batch) * ratio
    if batch.importance_weights is not None:
        weights = batch.importance_weights
        mean_log = _masked_mean((weights + 1e-10).log(), batch)
        some = _masked_mean((weights > 0).to(loss.dtype), batch) > 0
        loss = loss * torch.where(some, mean_log.exp(), 0.0)
    if batch.sample_weights is not None:
        loss = loss * batch.sample_weights
    above = (log_ratio != bounded) & (batch.advantages > 0)
    below = (log_ratio != bounded) & (batch.advantages < 0)
    loss = loss.sum() / max(batch.batch_totals.num_sequences, 1)
    return LossOutput(loss, _metrics(batch, log_ratio, above, below))


def cispo(batch: LossInput, config: LossConfig) -> LossOutput:
    """Clipped ratio as a constant weight of log p (CISPO, arXiv 2506.13585)."""
    log_ratio, ratio = _clamped_ratio(batch)
    bounded = ratio.detach().clamp(1 - config.clip_ratio_low, 1 + config.clip_ratio_high)
    loss = -bounded * batch.advantages * batch.logprobs
    return _finish(batch, config, loss, log_ratio, ratio.detach() != bounded)


def sapo(batch: LossInput, config: LossConfig) -> LossOutput:
    """A soft gate instead of a clip (SAPO, arXiv 2511.20347); always seq-mean-token-mean."""
    log_ratio, ratio = _clamped_ratio(batch)
    tau = torch.full_like(ratio, config.tau_neg).masked_fill_(batch.advantages > 0, config.tau_pos)
    loss = -(4 / tau) * torch.sigmoid(tau * (ratio - 1)) * batch.advantages
    return _finish(batch, config, loss, log_ratio, mode="seq-mean-token-mean")


def dppo_tv(batch: LossInput, config: LossConfig) -> LossOutput:
    """Trust region on the change of the token's probability (DPPO, arXiv 2602.04879)."""
    change = batch.logprobs.detach().exp() - batch.proximal_logprobs.exp()
    inside = torch.where(
        batch.advantages > 0, change <= config.clip_ratio_high, change >= -config.clip_ratio_low
    )
    return _truncated_reinforce(batch, config, inside)


def dppo_kl(batch: LossInput, config: LossConfig) -> LossOutput:
    """Trust region on the KL of "this token or another" (DPPO, arXiv 2602.04879)."""
    new_log, old_log = batch.logprobs.detach(), batch.proximal_logprobs
    new, old = new_log.exp(), old_log.exp()
    rest = (1 - old) * torch.log((1 - old + 1e-8) / (1 - new + 1e-8))
    divergence = old * (old_log - new_log) + rest
    inside = torch.where(
        batch.advantages > 0,
        (divergence <= config.clip_ratio_high) | (new <= old),
        (divergence <= config.clip_ratio_low) | (new >= old),
    )
    return _truncated_reinforce(batch, config, inside)


def topr(batch: LossInput, config: LossConfig) -> LossOutput:
    """Positive trajectories as in SFT, negative ones tapered (TOPR, arXiv 2503.14286)."""
    if batch.rewards is None:
        raise ValueError("rewards: loss topr needs the trajectory rewards [S]")
    log_ratio, ratio = _clamped_ratio(batch)
    positive = batch.sequences.expand(batch.rewards > 0)
    taper = config.topr_negative_weight * ratio.detach().clamp(0, 1)
    weight = torch.where(positive, config.topr_positive_weight, taper)
    loss = -weight * batch.advantages * batch.logprobs
    return _finish(batch, config, loss, log_ratio, ~positive & (ratio.detach() > 1))


def reinforce(batch: LossInput, config: LossConfig) -> LossOutput:
    """-A log p; importance weights make it off-policy (arXiv 1802.01561)."""
    return _finish(batch, config, -batch.advantages * batch.logprobs, batch.log_ratio)


def dro(batch: LossInput, config: LossConfig) -> LossOutput:
    """-A log p with a quadratic penalty on D (DRO, arXiv 2405.19107; Kimi k1.5 with tau = beta)."""
    log_ratio = batch.log_ratio
    penalty = 0.5 * config.dro_beta * log_ratio.square()
    return _finish(batch, config, penalty - batch.logprobs * batch.advantages, log_ratio)


POLICY_LOSSES: dict[str, PolicyLoss] = {
    "ppo": ppo,
    "gspo": gspo,
    "gpg": gpg,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "geo_mean": geo_mean,
    "cispo": cispo,
    "sapo": sapo,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "topr": topr,
    "reinforce": reinforce,
    "dro": dro,
}


def _clamped_ratio(batch: LossInput) -> tuple[Tensor, Tensor]:
    log_ratio = batch.log_ratio.clamp(-_LOG_RATIO_BOUND, _LOG_RATIO_BOUND)
    return log_ratio, log_ratio.exp()


def _unclamped(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(max=_OVERFLOW_LOG).exp()


def _clip_terms(ratio: Tensor, advantages: Tensor, config: LossConfig) -> tuple[Tensor, Tensor]:
    bounded = ratio.clamp(1 - config.clip_ratio_low, 1 + config.clip_ratio_high)
    return -advantages * ratio, -advantages * bounded


def _truncated_reinforce(batch: LossInput, config: LossConfig, inside: Tensor) -> LossOutput:
    """-A min(r, C) log p, the ratio a constant, on the tokens inside the trust region."""
    log_ratio, ratio = _clamped_ratio(batch)
    ratio = ratio.detach()
    truncated = ratio if config.clip_ratio_c is None else ratio.clamp(max=config.clip_ratio_c)
    loss = torch.where(inside, -batch.advantages * truncated * batch.logprobs, 0.0)
    return _finish(batch, config, loss, log_ratio, ~inside, inside & (ratio != truncated))


def _covariance(batch: LossInput) -> Tensor:
    """[R] (A - mean A)(log p - mean log p) without gradient; -inf where a token does not count."""
    mask = batch.loss_mask
    counted = torch.ones_like(batch.logprobs, dtype=torch.bool) if mask is None else mask
    advantages, logprobs = batch.advantages, batch.logprobs.detach()
    mean_advantage = token_mean(advantages, batch.sequences, None, mask)
    mean_logprob = token_mean(logprobs, batch.sequences, None, mask)
    covariance = (advantages - mean_advantage) * (logprobs - mean_logprob)
    return covariance.masked_fill(~counted, -torch.inf)


def _num_counted(batch: LossInput) -> int:
    return batch.sequences.num_tokens if batch.loss_mask is None else int(batch.loss_mask.sum())


def _masked_mean(per_token: Tensor, batch: LossInput) -> Tensor:
    """[R] -> [S] mean over the counted tokens of each sequence."""
    if batch.loss_mask is None:
        return batch.sequences.mean(per_token)
    total = batch.sequences.sum(torch.where(batch.loss_mask, per_token, 0.0))
    return total / batch.sequences.sum(batch.loss_mask).clamp(min=1)


def _finish(
    batch: LossInput,
    config: LossConfig,
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
    return LossOutput(loss, _metrics(batch, log_ratio, clipped, clipped_lower))


def _metrics(
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
