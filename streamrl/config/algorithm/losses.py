"""`algorithm.loss` and `algorithm.loss_config`: the policy loss, and a record of numbers for each.

Invariant: `LOSS_SETTINGS` names the record of every loss; a record holds what its loss reads, and
the aggregation that the other terms of the objective share. `POLICY_LOSSES` in
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
    """Numbers of the loss: how those per token become one, and its own below."""

    loss_agg_mode: AggregationMode = "token-mean"
    """How token losses become one. gspo, luspo, sapo and geo_mean take a mean over sequences, and
    use this for KL, entropy and SFT."""
    loss_scale_factor: PositiveNumber | None = None
    """What seq-mean-token-sum-norm divides by; null: `generator.max_new_tokens`."""
    norm_by_sequences: bool = True
    """Whether seq-mean-token-sum-norm divides by the number of sequences, too."""


class ClipRangeSettings(LossSettings):
    """Losses that clip the ratio to the proximal policy."""

    clip_ratio_low: NotNegativeNumber = 0.2
    """How far the ratio may fall below 1."""
    clip_ratio_high: NotNegativeNumber = 0.2
    """How far the ratio may rise above 1."""


class PpoSettings(ClipRangeSettings):
    """ppo: the clipped surrogate with dual clip."""

    clip_ratio_c: Annotated[float, Field(gt=1)] | None = 3.0
    """Dual clip: largest ratio counted where the advantage is negative; null: off."""


class GspoSettings(ClipRangeSettings):
    """gspo: the clipped ratio of whole sequences."""


class LuspoSettings(ClipRangeSettings):
    """luspo: gspo with every sequence counted by its length."""


class GeoMeanSettings(ClipRangeSettings):
    """geo_mean: the geometric mean of clipped ratios; the range is that of the log-ratio."""


class CispoSettings(ClipRangeSettings):
    """cispo: the clipped ratio as a constant weight; the paper has `clip_ratio_low: 1`, no lower
    bound."""


class SapoSettings(LossSettings):
    """sapo: a soft gate instead of a clip."""

    tau_pos: PositiveNumber = 1.0
    """Sharpness of the gate where the advantage is positive."""
    tau_neg: PositiveNumber = 1.05
    """Sharpness of the gate elsewhere."""


class ClipCovSettings(ClipRangeSettings):
    """clip_cov: drops the loss of random tokens of high covariance; which, depends on how a batch
    is cut into micro-batches and over ranks."""

    clip_cov_ratio: Share = 2e-4
    """Share of the tokens of a micro-batch whose loss is dropped."""
    clip_cov_lb: float = 1.0
    """Only above this covariance."""
    clip_cov_ub: float = 5.0
    """Only below this covariance."""


class KlCovSettings(LossSettings):
    """kl_cov: penalizes the tokens of highest covariance; which, depends on the cut as well."""

    kl_cov_ratio: Share = 2e-4
    """Share of the tokens of a micro-batch with the penalty."""
    kl_cov_coef: NotNegativeNumber = 0.1
    """Weight of the penalty."""


class DppoSettings(LossSettings):
    """dppo_tv and dppo_kl: a trust region on the divergence of each token."""

    clip_ratio_low: NotNegativeNumber = 0.2
    """Divergence allowed where a token becomes less likely."""
    clip_ratio_high: NotNegativeNumber = 0.2
    """Divergence allowed where a token becomes likelier."""
    clip_ratio_c: Annotated[float, Field(gt=1)] | None = 3.0
    """Largest weight of a token, its ratio to the proximal policy; null: no bound."""
    divergence_topk: NotNegative = 0
    """Likeliest tokens of the behavior policy compared one by one; all others count as one."""
    log_ratio_coef: NotNegativeNumber = 0.0
    """Of the squared log-ratio, outside the region too; 0.001 is usual."""


class VespoSettings(LossSettings):
    """vespo: a soft weight of whole sequences, w^k exp(lambda (1 - w))."""

    k_pos: NotNegativeNumber = 2.0
    """k where the advantage is not negative: how fast the weight falls below 1."""
    lambda_pos: NotNegativeNumber = 3.0
    """lambda there: how fast it falls above 1."""
    k_neg: NotNegativeNumber = 3.0
    """k elsewhere."""
    lambda_neg: NotNegativeNumber = 2.0
    """lambda elsewhere."""


class ToprSettings(LossSettings):
    """topr: positive trajectories as in SFT, negative ones tapered."""

    topr_positive_weight: NotNegativeNumber = 1.0
    """Of trajectories with a positive reward."""
    topr_negative_weight: NotNegativeNumber = 1.0
    """Of the others."""


class DroSettings(LossSettings):
    """dro: a quadratic penalty on the log-ratio."""

    dro_beta: PositiveNumber = 0.5
    """Weight of half the squared log-ratio."""
    dro_level: Literal["token", "sequence"] = "token"
    """Whose: of each token, or of the whole response (Kimi k1.5)."""


class UserLossSettings(LossSettings):
    """A loss of the user's own (PATH.py:NAME). Other keys are kept as they are written and read as
    attributes, `settings.beta`; `model_extra` is the mapping of all of them."""

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
"""The record of numbers of each loss, by its name."""

PENALTY_SETTINGS = frozenset(
    {"kl_cov_ratio", "kl_cov_coef", "dro_beta", "dro_level", "log_ratio_coef"}
)
"""Numbers of what is added to the loss of a token for its ratio, whatever its advantage."""

RATIO_SETTINGS = PENALTY_SETTINGS | {
    *("clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "tau_pos", "tau_neg"),
    *("k_pos", "lambda_pos", "k_neg", "lambda_neg"),
}
"""Numbers that change nothing while the ratio to the proximal policy is 1."""

SUM_NORM = "seq-mean-token-sum-norm"
SUM_NORM_SETTINGS = ("loss_scale_factor", "norm_by_sequences")
"""Numbers of that aggregation."""

RATIO_FREE_LOSSES = ("gpg", "reinforce", "dro")
"""Losses without a ratio to the proximal policy: only importance weights correct them."""

SEQUENCE_MEAN_LOSSES: Mapping[str, AggregationMode] = {
    "gspo": "seq-mean-token-mean",
    "luspo": "seq-mean-token-sum",
    "geo_mean": "seq-mean-token-mean",
    "sapo": "seq-mean-token-mean",
}
"""Losses that are always aggregated so, a mean over sequences, whatever `loss_agg_mode`."""
