"""Engine mismatch and policy lag told apart: the two factors of the importance ratio.

    train / behavior = (rescored / behavior) * (train / rescored)
                        engine mismatch         policy lag

`rescored` is the log-probability of a token under the learner's own weights of the version that
sampled it. The first factor compares two programs with the same weights, the second two versions
in one program; at staleness 0 it is 1. Each has a bound of its own. Where only the ratio is bounded
a large mismatch and a small lag hide each other. Source: "Missing Old Logits in Asynchronous
Agentic RL" (arXiv 2605.12070), whose snapshots of the weights per version these are.

Invariant: the factors of a token multiply to its ratio. A token that was not rescored is in no
metric but the share of those that were, and no bound of a factor acts on it.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from streamrl.algorithms.rollout_is.statistics import RESCORED, SAFETY_BOUND
from streamrl.config.algorithm.rollout_is import RolloutISSettings


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
    """The factors of ratios [R], given as logarithms in float64.

    Args:
        mismatch: [R] rescored less behavior log-probability in nats, not finite where it is not
            known; None if no token is ever rescored.
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
