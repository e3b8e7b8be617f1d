"""The policy losses by name."""

from collections.abc import Callable

from streamrl.algorithms.losses.clipped import cispo, geo_mean, gspo, ppo, sapo
from streamrl.algorithms.losses.covariance import clip_cov, kl_cov
from streamrl.algorithms.losses.input import LossInput, LossOutput
from streamrl.algorithms.losses.policy_gradient import dro, gpg, reinforce, topr
from streamrl.algorithms.losses.trust_region import dppo_kl, dppo_tv
from streamrl.config.algorithm.losses import LossConfig

PolicyLoss = Callable[[LossInput, LossConfig], LossOutput]

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
    "topr": topr,
    "reinforce": reinforce,
    "dro": dro,
}
