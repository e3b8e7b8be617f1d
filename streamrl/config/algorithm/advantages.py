"""`algorithm.advantage` and `algorithm.advantage_config`: the estimator and its numbers."""

from pydantic import Field

from streamrl.config.section import Section

ADVANTAGE_NAMES = (
    "gae",
    "reinforce",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "grpo",
    "dr_grpo",
    "grpo_passk",
    "rloo",
    "remax",
    "opo",
    "gpg",
)


class AdvantageConfig(Section):
    """Numbers of the advantage estimators; each reads those it needs."""

    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount per response token."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """gae: near 1 less bias, near 0 less variance."""
    norm_adv_by_std: bool = True
    """grpo, grpo_passk: divide by the standard deviation of the group."""
    f_norm: float = Field(default=1.0, gt=0)
    """gpg: divisor of the advantages."""
    whiten: bool = False
    """Standardize the advantages over the batch, whatever the estimator."""
    clip: float | None = Field(default=None, gt=0)
    """Bound on the absolute advantage, after whitening."""
