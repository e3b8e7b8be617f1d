"""Rollout importance sampling: weights for data sampled by an older or different policy.

With d = train - behavior log-probability of a token, the weight of a token is exp(d), that of a
sequence exp(sum d) or exp(mean d). It is bounded above (truncated IS) or zeroed outside two bounds.
Sources: verl's rollout importance sampling (github.com/volcengine/verl), "Your Efficient RL
Framework Secretly Brings You Off-Policy RL Training" (Yao et al., 2025), IcePop (Ling team, 2025).

Invariant: weights are finite, detached and in [0, threshold] (before batch normalization); tokens
of a vetoed or non-finite sequence have weight exactly 0.

Deliberate differences from verl:
- the standard deviation is computed in two float64 passes (one pass reads 0 for a true 1e-4);
- besides the metrics of the raw weights, which look healthy even if three quarters of the sequences
  are clipped away, there are `rollout_is_applied_*` and `staleness_*`;
- empty sequences, and those with a NaN or infinite log-probability, enter no mean, minimum or
  fraction.
"""

from streamrl.algorithms.rollout_is.statistics import (
    SEQUENCE_ESS as SEQUENCE_ESS,
    RolloutISStatistics as RolloutISStatistics,
)
from streamrl.algorithms.rollout_is.weights import (
    RolloutIS as RolloutIS,
    rollout_is_weights as rollout_is_weights,
)
