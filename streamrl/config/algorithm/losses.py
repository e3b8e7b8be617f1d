"""`algorithm.loss` and `algorithm.loss_config`: the policy loss and its settings.

Invariant: `LOSS_SETTINGS` has the settings class of every loss, with what the loss reads and the
aggregation that the other terms of the objective share. `POLICY_LOSSES` in
`streamrl.algorithms.losses` has the same keys (a test compares them).
"""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from streamrl.config.section import NotNegative, NotNegativeNumber, PositiveNumber, Section, Share

AggregationMode = Literal[
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
]


class LossSettings(Section):
    """Settings of the loss: the aggregation, and its own listed below."""

    loss_agg_mode: AggregationMode = "token-mean"
    """How the losses of tokens are aggregated. gspo, luspo, sapo and geo_mean use it only for KL,
    entropy and SFT."""
    loss_scale_factor: PositiveNumber | None = None
    """Divisor of seq-mean-token-sum-norm; null: `generator.max_new_tokens`."""
    norm_by_sequences: bool = True
    """Whether seq-mean-token-sum-norm also divides by the number of sequences."""


class ClipRangeSettings(LossSettings):
    """Losses that clip the ratio to the proximal policy."""

    clip_ratio_low: NotNegativeNumber = 0.2
    """How far the ratio may fall below 1."""
    clip_ratio_high: NotNegativeNumber = 0.2
    """How far the ratio may rise above 1."""


class PpoSettings(ClipRangeSettings):
    """ppo: the clipped surrogate with dual clip."""

    clip_ratio_c: Annotated[float, Field(gt=1)] | None = 3.0
    """Dual clip: largest ratio for negative advantages; null: off."""


class GspoSettings(ClipRangeSettings):
    """gspo: clips the ratio of whole sequences."""


class LuspoSettings(ClipRangeSettings):
    """luspo: gspo with each sequence weighted by its length."""


class GeoMeanSettings(ClipRangeSettings):
    """geo_mean: the geometric mean of clipped ratios; the clip range is that of the log-ratio."""


class CispoSettings(ClipRangeSettings):
    """cispo: the clipped ratio as a constant weight; the paper has no lower bound (`clip_ratio_low:
    1`)."""


class SapoSettings(LossSettings):
    """sapo: a soft gate instead of a clip."""

    tau_pos: PositiveNumber = 1.0
    """Sharpness of the gate for positive advantages."""
    tau_neg: PositiveNumber = 1.05
    """Sharpness of the gate for other advantages."""


class ClipCovSettings(ClipRangeSettings):
    """clip_cov: drops the loss of random tokens with high covariance in each micro-batch."""

    clip_cov_ratio: Share = 2e-4
    """Share of a micro-batch's tokens whose loss is dropped."""
    clip_cov_lb: float = 1.0
    """Lower bound of the covariance of these tokens."""
    clip_cov_ub: float = 5.0
    """Upper bound of the covariance of these tokens."""


class KlCovSettings(LossSettings):
    """kl_cov: penalizes the tokens with the highest covariance in each micro-batch."""

    kl_cov_ratio: Share = 2e-4
    """Share of a micro-batch's tokens that are penalized."""
    kl_cov_coef: NotNegativeNumber = 0.1
    """Weight of the penalty."""


class DppoSettings(LossSettings):
    """dppo_tv and dppo_kl: a trust region on each token's divergence."""

    clip_ratio_low: NotNegativeNumber = 0.2
    """Allowed divergence of tokens that become less likely."""
    clip_ratio_high: NotNegativeNumber = 0.2
    """Allowed divergence of tokens that become likelier."""
    clip_ratio_c: Annotated[float, Field(gt=1)] | None = 3.0
    """Upper bound of a token's weight, its ratio to the proximal policy; null: none."""
    divergence_topk: NotNegative = 0
    """Number of the behavior policy's likeliest tokens to compare one by one; all others count as
    one outcome."""
    log_ratio_coef: NotNegativeNumber = 0.0
    """Weight of the squared log-ratio of all tokens; 0.001 is usual."""


class VespoSettings(LossSettings):
    """vespo: a soft weight of whole sequences, w^k exp(lambda (1 - w))."""

    k_pos: NotNegativeNumber = 2.0
    """k for advantages that are not negative: how fast the weight falls for w below 1."""
    lambda_pos: NotNegativeNumber = 3.0
    """lambda for advantages that are not negative: how fast the weight falls for w above 1."""
    k_neg: NotNegativeNumber = 3.0
    """k for negative advantages."""
    lambda_neg: NotNegativeNumber = 2.0
    """lambda for negative advantages."""


class ToprSettings(LossSettings):
    """topr: positive trajectories as in SFT, negative ones tapered."""

    topr_positive_weight: NotNegativeNumber = 1.0
    """Weight of trajectories with a positive reward."""
    topr_negative_weight: NotNegativeNumber = 1.0
    """Weight of the others."""


class DroSettings(LossSettings):
    """dro: a quadratic penalty on the log-ratio."""

    dro_beta: PositiveNumber = 0.5
    """Weight of half the squared log-ratio."""
    dro_level: Literal["token", "sequence"] = "token"
    """Whose log-ratio: of each token, or of the whole response (Kimi k1.5)."""


class UserLossSettings(LossSettings):
    """A user's own loss (PATH.py:NAME). It keeps all other keys, as attributes (`settings.beta`)
    and in the mapping `model_extra`."""

    model_config = ConfigDict(extra="allow")


LOSS_SETTINGS: Mapping[str, type[LossSettings]] = {
    "ppo": PpoSettings,
    "gspo": GspoSettings,
    "luspo": LuspoSettings,
    "gpg": LossSettings,
    "clip_cov": ClipCovSettings,
    "kl_cov": KlCovSettings,
    "geo_mean": GeoMeanSettings,
    "cispo": CispoSettings,
    "sapo": SapoSettings,
    "dppo_tv": DppoSettings,
    "dppo_kl": DppoSettings,
    "vespo": VespoSettings,
    "topr": ToprSettings,
    "reinforce": LossSettings,
    "dro": DroSettings,
}
"""The settings class of each loss, by name."""

PENALTY_SETTINGS = frozenset(
    {"kl_cov_ratio", "kl_cov_coef", "dro_beta", "dro_level", "log_ratio_coef"}
)
"""Settings of penalties on a token's ratio that do not depend on its advantage."""

RATIO_SETTINGS = PENALTY_SETTINGS | {
    *("clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "tau_pos", "tau_neg"),
    *("k_pos", "lambda_pos", "k_neg", "lambda_neg"),
}
"""Settings without effect while the ratio to the proximal policy is 1."""

SUM_NORM = "seq-mean-token-sum-norm"
SUM_NORM_SETTINGS = ("loss_scale_factor", "norm_by_sequences")
"""Settings of the aggregation seq-mean-token-sum-norm."""

RATIO_FREE_LOSSES = ("gpg", "reinforce", "dro")
"""Losses without a ratio to the proximal policy, which only importance weights correct."""

SEQUENCE_MEAN_LOSSES: Mapping[str, AggregationMode] = {
    "gspo": "seq-mean-token-mean",
    "luspo": "seq-mean-token-sum",
    "geo_mean": "seq-mean-token-mean",
    "sapo": "seq-mean-token-mean",
}
"""Losses that are always aggregated in this way, whatever `loss_agg_mode`."""
