"""`algorithm.loss` and `algorithm.loss_config`: the policy loss and its numbers.

The name tuples are the vocabulary of the YAML; the tables in `streamrl.algorithms` carry exactly
these names (a test compares them). Knows nothing of torch.
"""

from typing import Literal

from pydantic import Field

from streamrl.config.section import Section

LOSS_NAMES = (
    "ppo",
    "gspo",
    "gpg",
    "clip_cov",
    "kl_cov",
    "geo_mean",
    "cispo",
    "sapo",
    "dppo_tv",
    "dppo_kl",
    "topr",
    "reinforce",
    "dro",
)

RATIO_FREE_LOSSES = ("gpg", "reinforce", "dro")
"""Losses without a ratio to the proximal policy: only importance weights correct them."""

AggregationMode = Literal[
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
]


class LossConfig(Section):
    """Numbers of the policy losses; each loss reads those it needs."""

    loss_agg_mode: AggregationMode = "token-mean"
    """How per-token losses become one number; gspo and sapo always use seq-mean-token-mean."""
    loss_scale_factor: float | None = Field(default=None, gt=0)
    """Fixed length that seq-mean-token-sum-norm divides by; null means the longest response."""
    norm_by_sequences: bool = True
    """Whether seq-mean-token-sum-norm also divides by the number of sequences."""
    clip_ratio_low: float = Field(default=0.2, ge=0)
    """How far the ratio may fall below 1; for dppo the divergence allowed downwards."""
    clip_ratio_high: float = Field(default=0.2, ge=0)
    """How far the ratio may rise above 1; for dppo the divergence allowed upwards."""
    clip_ratio_c: float | None = Field(default=3.0, gt=1)
    """Dual clip: largest ratio counted where the advantage is negative; null switches it off."""
    clip_cov_ratio: float = Field(default=2e-4, gt=0, le=1)
    """clip_cov: share of the tokens whose loss is dropped."""
    clip_cov_lb: float = 1.0
    """clip_cov: only tokens whose covariance is above this are dropped."""
    clip_cov_ub: float = 5.0
    """clip_cov: only tokens whose covariance is below this are dropped."""
    kl_cov_ratio: float = Field(default=2e-4, gt=0, le=1)
    """kl_cov: share of the tokens, by covariance, that get the penalty."""
    kl_cov_coef: float = Field(default=0.1, ge=0)
    """kl_cov: weight of the penalty."""
    tau_pos: float = Field(default=1.0, gt=0)
    """sapo: sharpness of the gate where the advantage is positive."""
    tau_neg: float = Field(default=1.05, gt=0)
    """sapo: sharpness of the gate elsewhere."""
    topr_positive_weight: float = Field(default=1.0, ge=0)
    """topr: weight of the trajectories with a positive reward."""
    topr_negative_weight: float = Field(default=1.0, ge=0)
    """topr: weight of the others."""
    dro_beta: float = Field(default=0.5, gt=0)
    """dro: weight of the squared log-ratio."""
