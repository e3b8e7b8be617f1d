"""Rejection: which tokens leave the loss, by divergence tests, independently of the weights.

With d = log(train / behavior) clamped to +-20: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d
(Schulman, "Approximating KL divergence", 2020), per token or as sum, mean or maximum over a
sequence. Bounds of k1 are ratios behavior / train: the other way round from those of a weight.
Called by `streamrl.algorithms.rollout_is`.
"""

import math
from dataclasses import dataclass

from torch import Tensor

from streamrl.algorithms.rollout_is_statistics import SAFETY_BOUND
from streamrl.algorithms.sequences import Sequences
from streamrl.config.rollout_is import RejectionRule


@dataclass(frozen=True, eq=False)
class Verdict:
    """What one rule says. `statistic` and `passes` are [R] for a token rule, else [S]."""

    rule: RejectionRule
    statistic: Tensor
    passes: Tensor

    @property
    def by_token(self) -> bool:
        return self.rule.statistic.startswith("token")


def judge(log_ratio: Tensor, sequences: Sequences, rule: RejectionRule) -> Verdict:
    """Apply one rule to log_ratio [R] (float64, finite)."""
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
    lower, upper = rule_bounds(rule)
    return Verdict(rule, statistic, (statistic >= lower) & (statistic <= upper))


def rule_bounds(rule: RejectionRule) -> tuple[float, float]:
    """Bounds on the statistic; a divergence has no lower one."""
    if rule.is_ratio:
        return math.log(rule.ratio_lower), math.log(rule.upper)
    return -math.inf, rule.upper


def _divergence(log_ratio: Tensor, kind: str) -> Tensor:
    match kind:
        case "k1":
            return -log_ratio
        case "k2":
            return 0.5 * log_ratio.square()
        case _:
            return log_ratio.expm1() - log_ratio
