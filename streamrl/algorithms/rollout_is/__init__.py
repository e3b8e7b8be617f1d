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
- empty sequences are in no mean, minimum or fraction, and those with a NaN or infinite
  log-probability are dropped (`nonfinite_sequence_fraction`).
"""

from streamrl.algorithms.rollout_is.statistics import (
    SEQUENCE_ESS as SEQUENCE_ESS,
    RolloutISStatistics as RolloutISStatistics,
)
from streamrl.algorithms.rollout_is.weights import (
    RolloutIS as RolloutIS,
    rollout_is_weights as rollout_is_weights,
)
