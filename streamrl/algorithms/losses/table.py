"""The policy losses by name, and the record that holds the numbers of all of them."""

from collections.abc import Callable
from typing import Any

from streamrl.algorithms.losses.clipped import cispo, geo_mean, gspo, ppo, sapo, vespo
from streamrl.algorithms.losses.covariance import clip_cov, kl_cov
from streamrl.algorithms.losses.input import LossInput, LossOutput
from streamrl.algorithms.losses.policy_gradient import dro, gpg, reinforce, topr
from streamrl.algorithms.losses.trust_region import dppo_kl, dppo_tv
from streamrl.config.algorithm.losses import (
    CispoSettings,
    ClipCovSettings,
    DppoSettings,
    DroSettings,
    GeoMeanSettings,
    GpgSettings,
    GspoSettings,
    KlCovSettings,
    PpoSettings,
    ReinforceSettings,
    SapoSettings,
    ToprSettings,
    VespoSettings,
)
from streamrl.user_code import named

PolicyLoss = Callable[[LossInput, Any], LossOutput]
"""(batch, settings) -> loss; the settings are a `LOSS_SETTINGS[name]`, a `LossConfig`, or for a
user's own loss a `UserLossSettings`."""

POLICY_LOSSES: dict[str, PolicyLoss] = {
    "ppo": ppo,
    "gspo": gspo,
    "gpg": gpg,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "geo_mean": geo_mean,
    "cispo": cispo,
    "sapo": sapo,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "vespo": vespo,
    "topr": topr,
    "reinforce": reinforce,
    "dro": dro,
}


class LossConfig(
    PpoSettings,
    GspoSettings,
    GeoMeanSettings,
    CispoSettings,
    ClipCovSettings,
    KlCovSettings,
    SapoSettings,
    DppoSettings,
    VespoSettings,
    ToprSettings,
    DroSettings,
    GpgSettings,
    ReinforceSettings,
):
    """The numbers of all losses in one record, which every loss accepts: for Python code that
    sweeps over losses. A configuration has the record of one loss."""


def policy_loss(name: str) -> PolicyLoss:
    """The loss that `algorithm.loss` names; raises as `streamrl.user_code.named` does."""
    return named("algorithm.loss", name, POLICY_LOSSES)
