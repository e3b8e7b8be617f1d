"""`algorithm.value`: the critic."""

from pydantic import Field

from streamrl.config.algorithm.losses import AggregationMode
from streamrl.config.numbers import LearningRate
from streamrl.config.section import Section


class ValueSettings(Section):
    """The critic's loss; used by advantage gae."""

    clip_range: float | None = Field(default=0.5, gt=0)
    """How far a value may move from the old one before its loss stops falling; null: no limit."""
    coef: float = Field(default=1.0, ge=0)
    """Weight of the value loss."""
    loss_agg_mode: AggregationMode = "token-mean"
    """How per-token value losses become one number."""
    lr: LearningRate | None = None
    """Learning rate of the critic; null: that of the policy."""
    critic_warmup: int = Field(default=0, ge=0)
    """First steps in which only the critic is trained."""
