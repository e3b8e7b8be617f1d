"""Rejection of tokens by divergence tests, independently of their weights; the veto of sequences;
and the split of the ratio into engine mismatch and policy lag.

With d = log(train / behavior) clamped to +-20: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d
(Schulman, "Approximating KL divergence", 2020), per token or as sum, mean or maximum over a
sequence. Bounds on k1 are ratios behavior / train, the inverse of those on a weight.

Invariant: a token is kept if it passes every rule.
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
    """The tokens that pass all rules, and the parts of their metrics, to be merged over shards."""

    keep: Tensor
    """[R] bool."""
    sums: dict[str, Tensor]
    extremes: dict[str, Tensor]


def reject(log_ratio: Tensor, sequences: Sequences, rules: Iterable[RejectionRule]) -> Rejection:
    """Apply all rules to log_ratio [R] (float64, finite); metrics are verl's `rollout_rs_*`."""
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
    """[S] bool, true for sequences with a token whose ratio train / behavior is below
    `veto_threshold`, and the sums of the metrics."""
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
    """Apply one rule; its statistic is [R] for a token rule, otherwise [S]."""
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
    """The metrics of the two factors of a shard's tokens, and the effect of their bounds."""

    sums: dict[str, Tensor]
    """Sums over the rescored tokens; empty if the run rescores none."""
    keep: Tensor | None = None
    """[R] bool, true for tokens whose factors are within their bounds; None keeps all."""
    excess: Tensor | None = None
    """[R] nats by which truncation lowers the log-ratio; None means 0."""


def split(log_ratio: Tensor, mismatch: Tensor | None, config: RolloutISSettings) -> Split:
    """Separate engine mismatch from policy lag: the two factors of the importance ratio, whose
    logarithm [R] is given in float64.

        train / behavior = (rescored / behavior) * (train / rescored)
                            engine mismatch         policy lag

    The first factor compares two programs with the same weights, the second two versions in one
    program; at staleness 0 the second is 1. In the ratio alone a mismatch and a lag can cancel, so
    each factor has a bound of its own ("Missing Old Logits in Asynchronous Agentic RL", arXiv
    2605.12070). Tokens that were not rescored enter no metric except the rescored share, and the
    bounds of the factors do not apply to them.

    Args:
        mismatch: [R] nats, the log-probability under the learner's weights of the sampling version
            minus that under the behavior policy; not finite if unknown. None if the run rescores no
            token.
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
