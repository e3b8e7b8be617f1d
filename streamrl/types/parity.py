"""What the engine hands to the learner so that their log-probabilities can be compared, and the
comparison.

A gap is the learner's log-probability of a sampled token minus the engine's, in nats.
"""

from msgspec import Struct

from streamrl.types.rollouts import TrajectoryGroup


class ParitySamples(Struct, frozen=True, kw_only=True):
    """Groups of one trajectory each, sampled as the run samples, with the engine's record."""

    engine: str
    dtype: str
    groups: tuple[TrajectoryGroup, ...]


class GapStatistics(Struct, frozen=True, kw_only=True):
    """Of the response tokens at positions `first` to `last`, both counted from 0.

    `mean`, `p99` and `max` are of |gap|. `ratio_error` is the mean of |exp(gap) - 1|, what the gap
    does to importance weights. `k3_kl` is the mean of exp(gap) - 1 - gap: the KL divergence of the
    learner's policy from the engine's, in nats (Schulman, "Approximating KL Divergence", 2020).
    """

    first: int
    last: int
    num_tokens: int
    mean: float
    p99: float
    max: float
    ratio_error: float
    k3_kl: float


class ParityReport(Struct, frozen=True, kw_only=True):
    """One engine's precision against the learner's; `by_position` is spaced by powers of two."""

    engine: str
    engine_dtype: str
    learner_dtype: str
    num_prompts: int
    overall: GapStatistics
    by_position: tuple[GapStatistics, ...]
