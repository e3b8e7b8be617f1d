"""The policy losses by name.

    bound the ratio, of a token or of a sequence    ppo, gspo, luspo, geo_mean, cispo, sapo, vespo
    pick tokens by covariance of A and log p        clip_cov, kl_cov
    weigh log p                                     gpg, reinforce, dro, topr
    drop tokens outside a trust region              dppo_tv, dppo_kl

All share the code for ratios, clipping, weighting, aggregation and metrics. The two that pick by
covariance choose among the tokens of one call, as the authors' code does, so a batch divided into
micro-batches gets other tokens, at least one of each. All others add up however it is divided.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from streamrl.algorithms.candidates import Candidates
from streamrl.algorithms.losses.aggregation import LossInput, LossOutput, aggregate, token_mean
from streamrl.config.algorithm import losses as settings
from streamrl.config.algorithm.losses import SEQUENCE_MEAN_LOSSES, AggregationMode, LossSettings
from streamrl.user_code import named

_LOG_RATIO_BOUND = 20.0
_OVERFLOW_LOG = 80.0
"""Keeps the ratio finite in float32 where a formula does not clamp it."""


def clamped_ratio(batch: LossInput) -> tuple[Tensor, Tensor]:
    log_ratio = batch.log_ratio.clamp(-_LOG_RATIO_BOUND, _LOG_RATIO_BOUND)
    return log_ratio, log_ratio.exp()


def unclamped_ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(max=_OVERFLOW_LOG).exp()


def clip_terms(
    ratio: Tensor, advantages: Tensor, config: settings.ClipRangeSettings
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
    """Apply the weights, aggregate, and add metrics."""
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
    batch: LossInput, log_ratio: Tensor, clipped: Tensor | None, clipped_lower: Tensor | None
) -> dict[str, Tensor]:
    masks = {"actor/pg_clipfrac": clipped, "actor/pg_clipfrac_lower": clipped_lower}
    never = torch.zeros_like(log_ratio)
    return {
        "actor/ppo_kl": batch.mean(-log_ratio),
        **{
            name: batch.mean(never if mask is None else mask.to(log_ratio.dtype))
            for name, mask in masks.items()
        },
    }


_GSPO_LOG_BOUND = 10.0
_VESPO_LOG_BOUND = 20.0


def ppo(batch: LossInput, config: settings.PpoSettings) -> LossOutput:
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


def gspo(batch: LossInput, config: settings.GspoSettings) -> LossOutput:
    """Clipped surrogate with one ratio per sequence (GSPO, arXiv 2507.18071); always
    seq-mean-token-mean."""
    return _sequence_ratio(batch, config, SEQUENCE_MEAN_LOSSES["gspo"])


def luspo(batch: LossInput, config: settings.LuspoSettings) -> LossOutput:
    """GSPO with each sequence's loss multiplied by its length, so that a token counts as much in a
    long response as in a short one (LUSPO, arXiv 2602.05261); always seq-mean-token-sum.

    The gradient is larger than gspo's by about the length of a response; choose the learning rate
    or the gradient clipping accordingly.
    """
    return _sequence_ratio(batch, config, SEQUENCE_MEAN_LOSSES["luspo"])


def _sequence_ratio(
    batch: LossInput, config: settings.ClipRangeSettings, mode: AggregationMode
) -> LossOutput:
    log_ratio = batch.log_ratio
    shared = batch.sequences.expand(counted_mean(log_ratio.detach(), batch))
    straight_through = batch.logprobs - batch.logprobs.detach()
    ratio = (straight_through + shared).clamp(max=_GSPO_LOG_BOUND).exp()
    plain, bounded = clip_terms(ratio, batch.advantages, config)
    loss, clipped = torch.maximum(plain, bounded), bounded > plain
    return finish(batch, config, loss, log_ratio, clipped, mode=mode)


def geo_mean(batch: LossInput, config: settings.GeoMeanSettings) -> LossOutput:
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


def cispo(batch: LossInput, config: settings.CispoSettings) -> LossOutput:
    """The clipped ratio as a constant weight on log p (CISPO, arXiv 2506.13585)."""
    log_ratio, ratio = clamped_ratio(batch)
    bounded = ratio.detach().clamp(1 - config.clip_ratio_low, 1 + config.clip_ratio_high)
    loss = -bounded * batch.advantages * batch.logprobs
    return finish(batch, config, loss, log_ratio, ratio.detach() != bounded)


def sapo(batch: LossInput, config: settings.SapoSettings) -> LossOutput:
    """A soft gate instead of a clip (SAPO, arXiv 2511.20347); always seq-mean-token-mean."""
    log_ratio, ratio = clamped_ratio(batch)
    tau = torch.full_like(ratio, config.tau_neg).masked_fill_(batch.advantages > 0, config.tau_pos)
    loss = -(4 / tau) * torch.sigmoid(tau * (ratio - 1)) * batch.advantages
    return finish(batch, config, loss, log_ratio, mode=SEQUENCE_MEAN_LOSSES["sapo"])


def vespo(batch: LossInput, config: settings.VespoSettings) -> LossOutput:
    """-phi(w) A log p with the constant weight phi(w) = w^k exp(lambda (1 - w)), where w is the
    ratio of the whole sequence and k and lambda depend on the sign of A (VESPO, arXiv 2602.10693;
    github.com/FloyedShen/VESPO: w is the product of the token ratios, log w within +-20)."""
    log_ratio = batch.log_ratio
    total = counted_sum(log_ratio.detach().double(), batch)
    log_weight = batch.sequences.expand(total.clamp(-_VESPO_LOG_BOUND, _VESPO_LOG_BOUND))
    is_negative = batch.advantages < 0
    k = torch.where(is_negative, config.k_neg, config.k_pos)
    rate = torch.where(is_negative, config.lambda_neg, config.lambda_pos)
    weight = (k * log_weight - rate * log_weight.expm1()).exp().to(log_ratio.dtype)
    return finish(batch, config, -weight * batch.advantages * batch.logprobs, log_ratio)


def clip_cov(batch: LossInput, config: settings.ClipCovSettings) -> LossOutput:
    """Drop the loss of random tokens with high covariance of A and log p (arXiv 2505.22617)."""
    log_ratio = batch.log_ratio
    plain, bounded = clip_terms(unclamped_ratio(log_ratio), batch.advantages, config)
    covariance = _covariance(batch).masked_fill(bounded > plain, -torch.inf)
    eligible = (covariance > config.clip_cov_lb) & (covariance < config.clip_cov_ub)
    candidates = eligible.nonzero().squeeze(1)
    count = max(int(config.clip_cov_ratio * _num_counted(batch)), 1)
    chosen = candidates[torch.randperm(len(candidates))[:count].to(candidates.device)]
    dropped = torch.zeros_like(eligible).index_fill_(0, chosen, True)
    loss = torch.where(dropped, 0.0, torch.maximum(plain, bounded))
    return finish(batch, config, loss, log_ratio, dropped)


def kl_cov(batch: LossInput, config: settings.KlCovSettings) -> LossOutput:
    """Penalize |D| on the tokens with the highest covariance (arXiv 2505.22617).

    Its `ppo_kl` is the mean of |D|, as in the original.
    """
    log_ratio = batch.log_ratio
    loss = -batch.advantages * unclamped_ratio(log_ratio)
    num_counted = _num_counted(batch)
    if num_counted:
        top = _covariance(batch).topk(max(1, int(num_counted * config.kl_cov_ratio))).indices
        penalized = torch.zeros_like(loss).index_fill_(0, top, config.kl_cov_coef)
        loss = loss + penalized * log_ratio.abs()
    return finish(batch, config, loss, -log_ratio.detach().abs())


def _covariance(batch: LossInput) -> Tensor:
    """[R] (A - mean A)(log p - mean log p) without gradient; -inf for tokens that do not count."""
    mask = batch.loss_mask
    counted = torch.ones_like(batch.logprobs, dtype=torch.bool) if mask is None else mask
    advantages, logprobs = batch.advantages, batch.logprobs.detach()
    mean_advantage = token_mean(advantages, batch.sequences, None, mask)
    mean_logprob = token_mean(logprobs, batch.sequences, None, mask)
    covariance = (advantages - mean_advantage) * (logprobs - mean_logprob)
    return covariance.masked_fill(~counted, -torch.inf)


def _num_counted(batch: LossInput) -> int:
    return batch.sequences.num_tokens if batch.loss_mask is None else int(batch.loss_mask.sum())


def gpg(batch: LossInput, config: LossSettings) -> LossOutput:
    """Group policy gradient (arXiv 2504.02546): -A log p."""
    return finish(batch, config, -batch.logprobs * batch.advantages, batch.log_ratio)


def reinforce(batch: LossInput, config: LossSettings) -> LossOutput:
    """-A log p; importance weights make it off-policy (arXiv 1802.01561)."""
    return finish(batch, config, -batch.advantages * batch.logprobs, batch.log_ratio)


def dro(batch: LossInput, config: settings.DroSettings) -> LossOutput:
    """-A log p + beta / 2 D^2. D is the log-ratio of each token, as in ROLL and tinker, or with
    `dro_level: sequence` that of the whole response, the sum over its tokens (DRO, arXiv
    2405.19107; Kimi k1.5, arXiv 2501.12599, section 2.3.2, with tau = beta). The latter grows with
    the response length and needs a smaller beta. D is not clamped."""
    log_ratio = batch.log_ratio
    square = log_ratio.square()
    if config.dro_level == "sequence":
        total = batch.sequences.expand(counted_sum(log_ratio.detach(), batch))
        # Over a response these sum to the square of the total, with the gradient of that square.
        square = total * (2 * log_ratio - log_ratio.detach())
    penalty = 0.5 * config.dro_beta * square
    return finish(batch, config, penalty - batch.logprobs * batch.advantages, log_ratio)


def topr(batch: LossInput, config: settings.ToprSettings) -> LossOutput:
    """Positive trajectories as in SFT, negative ones tapered (TOPR, arXiv 2503.14286)."""
    if batch.rewards is None:
        raise ValueError("rewards: loss topr needs the trajectory rewards [S]")
    log_ratio, ratio = clamped_ratio(batch)
    positive = batch.sequences.expand(batch.rewards > 0)
    taper = config.topr_negative_weight * ratio.detach().clamp(0, 1)
    weight = torch.where(positive, config.topr_positive_weight, taper)
    loss = -weight * batch.advantages * batch.logprobs
    return finish(batch, config, loss, log_ratio, ~positive & (ratio.detach() > 1))


_LEAST_REST = 1e-12
"""The authors' value (github.com/sail-sg/Stable-RL, verl/workers/actor/utils.py)."""


def dppo_tv(batch: LossInput, config: settings.DppoSettings) -> LossOutput:
    """Trust region on the change of the token's probability, or with `divergence_topk` on the
    total variation over the likeliest candidates (DPPO, arXiv 2602.04879)."""
    if config.divergence_topk:
        return _truncated_reinforce(batch, config, _is_inside(batch, config, topk_tv(batch)))
    change = batch.logprobs.detach().exp() - batch.proximal_logprobs.exp()
    inside = torch.where(
        batch.advantages > 0, change <= config.clip_ratio_high, change >= -config.clip_ratio_low
    )
    return _truncated_reinforce(batch, config, inside)


def dppo_kl(batch: LossInput, config: settings.DppoSettings) -> LossOutput:
    """Trust region on the KL between the two outcomes "this token" and "any other", or with
    `divergence_topk` on the KL over the likeliest candidates (DPPO, arXiv 2602.04879)."""
    if config.divergence_topk:
        return _truncated_reinforce(batch, config, _is_inside(batch, config, topk_kl(batch)))
    new_log, old_log = batch.logprobs.detach(), batch.proximal_logprobs
    new, old = new_log.exp(), old_log.exp()
    rest = (1 - old) * torch.log((1 - old + 1e-8) / (1 - new + 1e-8))
    divergence = old * (old_log - new_log) + rest
    return _truncated_reinforce(batch, config, _is_inside(batch, config, divergence))


def topk_tv(batch: LossInput) -> Tensor:
    """[R] half the sum of |p - q| over the token, its likeliest candidates, and all other tokens as
    one outcome; p is the current policy, q the behavior policy."""
    candidates, token, others = _terms(batch)
    changes = [(part.p - part.q).abs() for part in (token, others)]
    rest = (_rest(token.p, others.p, candidates) - _rest(token.q, others.q, candidates)).abs()
    return (changes[0] + candidates.sum(changes[1]) + rest) / 2


def topk_kl(batch: LossInput) -> Tensor:
    """[R] KL(q, p) of the distributions of `topk_tv`."""
    candidates, token, others = _terms(batch)
    parts = [part.q * (part.log_q - part.log_p) for part in (token, others)]
    rest_p, rest_q = _rest(token.p, others.p, candidates), _rest(token.q, others.q, candidates)
    rest = rest_q * (rest_q.log() - rest_p.log())
    return parts[0] + candidates.sum(parts[1]) + rest


class _Terms(NamedTuple):
    log_p: Tensor
    log_q: Tensor

    @property
    def p(self) -> Tensor:
        return self.log_p.exp()

    @property
    def q(self) -> Tensor:
        return self.log_q.exp()


def _terms(batch: LossInput) -> tuple[Candidates, _Terms, _Terms]:
    """The candidates, and the terms of the tokens [R] and of the candidates [M]."""
    candidates = batch.top_candidates
    if candidates is None:
        raise ValueError("top_candidates: divergence_topk needs the likeliest candidates")
    if batch.top_logprobs is None or candidates.behavior_logprobs is None:
        raise ValueError("top_logprobs: divergence_topk needs those of both policies")
    token = _Terms(batch.logprobs.detach(), batch.proximal_logprobs)
    return candidates, token, _Terms(batch.top_logprobs, candidates.behavior_logprobs)


def _rest(token: Tensor, others: Tensor, candidates: Candidates) -> Tensor:
    """[R] the probability of all tokens except the token and its candidates."""
    return (1 - token - candidates.sum(others)).clamp(min=_LEAST_REST)


def _is_inside(batch: LossInput, config: settings.DppoSettings, divergence: Tensor) -> Tensor:
    """[R] bool: inside the trust region, or moving back to it."""
    new, old = batch.logprobs.detach(), batch.proximal_logprobs
    return torch.where(
        batch.advantages > 0,
        (divergence <= config.clip_ratio_high) | (new <= old),
        (divergence <= config.clip_ratio_low) | (new >= old),
    )


def _truncated_reinforce(
    batch: LossInput, config: settings.DppoSettings, inside: Tensor
) -> LossOutput:
    """-A min(r, C) log p on the tokens inside the trust region, with a constant ratio, plus
    `log_ratio_coef` D^2 on all tokens: the regularizer of Kimi K2.5 (arXiv 2602.02276), which
    prime-rl adds to DPPO (github.com/PrimeIntellect-ai/prime-rl, trainer/rl/loss.py)."""
    log_ratio, ratio = clamped_ratio(batch)
    ratio = ratio.detach()
    truncated = ratio if config.clip_ratio_c is None else ratio.clamp(max=config.clip_ratio_c)
    loss = torch.where(inside, -batch.advantages * truncated * batch.logprobs, 0.0)
    if config.log_ratio_coef:
        loss = loss + config.log_ratio_coef * log_ratio.square()
    return finish(batch, config, loss, log_ratio, ~inside, inside & (ratio != truncated))


PolicyLoss = Callable[[LossInput, Any], LossOutput]
"""(batch, settings) -> loss; the settings are an instance of `LOSS_SETTINGS[name]`, or of
`UserLossSettings` for a user's own loss."""

POLICY_LOSSES: dict[str, PolicyLoss] = {
    loss.__name__: loss
    for loss in (
        *(ppo, gspo, luspo, gpg, clip_cov, kl_cov, geo_mean, cispo, sapo),
        *(dppo_tv, dppo_kl, vespo, topr, reinforce, dro),
    )
}


def policy_loss(name: str) -> PolicyLoss:
    """Return the loss named by `algorithm.loss`; raises as `streamrl.user_code.named`."""
    return named("algorithm.loss", name, POLICY_LOSSES)
