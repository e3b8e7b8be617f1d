"""Rollout importance sampling: weights for data sampled by an older or different policy.

With d = train - behavior log-probability of a token, the weight is exp(d), or of a sequence
exp(sum d) or exp(mean d), bounded above (truncated IS) or zeroed outside two bounds. Source: verl's
rollout importance sampling (github.com/volcengine/verl) and "Your Efficient RL
Framework Secretly Brings You Off-Policy RL Training" (Yao et al., 2025); IcePop (Ling team, 2025).

Invariant: weights are finite, detached and in [0, threshold] (before batch normalization); tokens
of a vetoed or non-finite sequence weigh exactly 0.

Different from verl on purpose:
- the standard deviation takes two passes in float64 (the one-pass formula reads 0 for a true 1e-4);
- `rollout_is_applied_*` and `staleness_*` metrics stand beside those of the raw weights, which
  look healthy even where three quarters of the sequences are clipped away;
- empty sequences are in no mean, minimum or fraction;
- a sequence with a NaN or infinite log-probability is dropped (`nonfinite_sequence_fraction`)
  instead of poisoning the batch;
- thresholds are validated, and ones at or below 1 need an explicit `threshold_lower`.
"""

from pydantic import Field

from streamrl.algorithms.rollout_is.statistics import (
    SEQUENCE_ESS as SEQUENCE_ESS,
    RolloutISStatistics as RolloutISStatistics,
)
from streamrl.algorithms.rollout_is.weights import (
    RolloutIS as RolloutIS,
    rollout_is_weights as rollout_is_weights,
)
from streamrl.config.algorithm.rollout_is import (
    ROLLOUT_IS_PRESETS as ROLLOUT_IS_PRESETS,
    RejectionRule as RejectionRule,
    RolloutISSettings,
    rollout_is_preset as rollout_is_preset,
)


class RolloutISConfig(RolloutISSettings):
    """The record `algorithm.rollout_is` for Python code, with verl's default of the veto."""

    veto_threshold: float | None = Field(default=1e-4, gt=0, lt=1)
