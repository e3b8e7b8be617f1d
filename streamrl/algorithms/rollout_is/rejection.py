"""Rejection: which tokens leave the loss, by divergence tests, independently of the weights; and
the veto, which gives a whole sequence the weight 0.

With d = log(train / behavior) clamped to +-20: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d
(Schulman, "Approximating KL divergence", 2020), per token or as sum, mean or maximum over a
sequence. Bounds of k1 are ratios behavior / train: the other way round from those of a weight.

Invariant: a token is kept if every rule passes.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from streamrl.algorithms.rollout_is.statistics import RESCORED, SAFETY_BOUND, largest, smallest
from streamrl.algorithms.sequences import Sequences
from streamrl.config.algorithm.rollout_is import RejectionRule, RolloutISSettings


@dataclass(frozen=True, eq=False)
class Rejection:
    """What the rules together say, and the parts of their metrics that merge over shards."""

    keep: Tensor
    """[R] bool."""
    sums: dict[str, Tensor]
    extremes: dict[str, Tensor]


def reject(log_ratio: Tensor, sequences: Sequences, rules: Iterable[RejectionRule]) -> Rejection:
    """Apply every rule to log_ratio [R] (float64, finite); names are verl's `rollout_rs_*`."""
    keep = torch.ones_like(log_ratio, dtype=torch.bool)
    sums: dict[str, Tensor] = {}
    extremes: dict[str, Tensor] = {}
    for rule in rules:
        verdict = _judge(log_ratio, sequences, rule)
        keep = keep & verdict.keep
        sums, extremes = sums | verdict.sums, extremes | verdict.extremes
    if sums:
        sums |= _masked("rollout_rs", keep, sequences)
    return Rejection(keep, sums, extremes)


def veto(
    log_ratio: Tensor, sequences: Sequences, config: RolloutISSettings
) -> tuple[Tensor, dict[str, Tensor]]:
    """vetoed [S]: sequences with a token that the training policy finds all but impossible."""
    vetoed = log_ratio.new_zeros(len(sequences), dtype=torch.bool)
    catastrophic = log_ratio.new_zeros((), dtype=torch.bool)
    if config.veto_threshold is not None:
        catastrophic = log_ratio < math.log(config.veto_threshold)
        vetoed = sequences.sum(catastrophic) > 0
    return vetoed, {
        "mismatch/rollout_is_catastrophic_token_fraction": catastrophic.sum(),
        "mismatch/rollout_is_veto_fraction": vetoed.sum(),
    }


def _judge(log_ratio: Tensor, sequences: Sequences, rule: RejectionRule) -> Rejection:
    """One rule; its statistic is [R] for a token rule, else [S]."""
    scope, kind = rule.statistic.rsplit("_", 1)
    per_token = _divergence(log_ratio.clamp(-SAFETY_BOUND, SAFETY_BOUND), kind)
    match scope:
        case "token":
            statistic = per_token
        case "seq_sum":
            statistic = sequences.sum(per_token)
        case "seq_mean":
            statistic = sequences.mean(per_token)
        case _:
            statistic = sequences.max(per_token)
    # A divergence has no lower bound.
    lower, upper = -math.inf, rule.upper
    if rule.is_ratio:
        lower, upper = math.log(rule.ratio_lower), math.log(rule.upper)
    passes = (statistic >= lower) & (statistic <= upper)
    by_token = scope == "token"
    keep = passes if by_token else sequences.expand(passes)
    name = f"rollout_rs_{rule.statistic}"
    sums = {
        f"mismatch/{name}_mean": (statistic if by_token else sequences.expand(statistic)).sum(),
        f"mismatch/{name}_fraction_high": (statistic > upper).sum(),
        f"mismatch/{name}_fraction_low": (statistic < lower).sum(),
    }
    extremes = {
        f"mismatch/{name}_max": largest(statistic),
        f"mismatch/{name}_min": smallest(statistic),
    }
    return Rejection(keep, sums | _masked(name, keep, sequences), extremes)


def _masked(name: str, keep: Tensor, sequences: Sequences) -> dict[str, Tensor]:
    return {
        f"mismatch/{name}_masked_fraction": (~keep).sum(),
        f"mismatch/{name}_seq_masked_fraction": (sequences.sum(~keep) > 0).sum(),
    }


def _divergence(log_ratio: Tensor, kind: str) -> Tensor:
    match kind:
        case "k1":
            return -log_ratio
        case "k2":
            return 0.5 * log_ratio.square()
        case _:
            return log_ratio.expm1() - log_ratio


@dataclass(frozen=True, eq=False)
class Split:
    """What the two factors of a shard's tokens say, and what their bounds make of them."""

    sums: dict[str, Tensor]
    """Over the rescored tokens; none where nothing was rescored in the whole run."""
    keep: Tensor | None = None
    """[R] bool, the tokens whose factors are within their bounds; None keeps all."""
    excess: Tensor | None = None
    """[R] nats by which truncation lowers the logarithm of a ratio; None is 0."""


def split(log_ratio: Tensor, mismatch: Tensor | None, config: RolloutISSettings) -> Split:
    """Engine mismatch and policy lag told apart: the two factors of the importance ratio [R], which
    is given as logarithm in float64.

        train / behavior = (rescored / behavior) * (train / rescored)
                            engine mismatch         policy lag

    The first compares two programs with the same weights, the second two versions in one program;
    at staleness 0 it is 1. Where only the ratio is bounded a large mismatch and a small lag hide
    each other, so each has a bound of its own ("Missing Old Logits in Asynchronous Agentic RL",
    arXiv 2605.12070). A token that was not rescored is in no metric but the share of those that
    were, and no bound of a factor acts on it.

    Args:
        mismatch: [R] log-probability under the learner's weights of the version that sampled it,
            less that of the behavior policy, in nats; not finite where it is not known; None if no
            token is ever rescored.
    """
    if mismatch is None:
        return Split({})
    is_known = mismatch.isfinite()
    engine = torch.where(is_known, mismatch, 0.0)
    factors = {
        "engine": (engine, config.engine_threshold),
        "lag": (torch.where(is_known, log_ratio - engine, 0.0), config.lag_threshold),
    }
    sums, keep, excess = {RESCORED: is_known.sum()}, is_known.new_ones(()), log_ratio.new_zeros(())
    for name, (factor, threshold) in factors.items():
        clamped = factor.clamp(-SAFETY_BOUND, SAFETY_BOUND)
        sums[f"mismatch/{name}_kl"] = -factor.sum()
        sums[f"mismatch/{name}_k3_kl"] = (clamped.expm1() - clamped).sum()
        if threshold is None:
            continue
        bound = math.log(threshold)
        is_outside = factor.abs() > bound if config.zeroes_outside else factor > bound
        sums[f"mismatch/{name}_bounded_fraction"] = is_outside.sum()
        if config.zeroes_outside:
            keep = keep & ~is_outside
        else:
            excess = excess + (factor - bound).clamp(min=0.0)
    if not config.bounds_factors:
        return Split(sums)
    return Split(sums, keep=keep) if config.zeroes_outside else Split(sums, excess=excess)
