"""Names of algorithms that are given to one setting, and are here another one or several.

A published algorithm is an advantage and a loss with their numbers: GRPO names the advantage, and
its loss is PPO's.
"""

from streamrl.config.algorithm.advantages import ADVANTAGE_SETTINGS
from streamrl.config.algorithm.losses import LOSS_SETTINGS

_PUBLISHED = {
    "dapo": (
        "DAPO is algorithm.advantage: grpo and algorithm.loss: ppo with "
        "algorithm.loss_config.clip_ratio_high: 0.28, learner.updates_per_batch: 16, "
        "algorithm.dynamic_sampling.metric: reward and algorithm.reward.truncated: mask"
    ),
    "dr.grpo": (
        "Dr. GRPO is algorithm.advantage: dr_grpo and algorithm.loss: ppo with "
        "algorithm.loss_config.loss_agg_mode: seq-mean-token-sum-norm"
    ),
    "reinforce++": "REINFORCE++ is algorithm.advantage: reinforce_plus_plus",
    "m2po": "M2PO is algorithm.rollout_is: m2po",
    "vcpo": "VCPO is algorithm.rollout_is: vcpo with algorithm.advantage: opob",
    "dppo": (
        "DPPO is algorithm.loss: dppo_tv or dppo_kl with algorithm.proximal: behavior, and over "
        "the likeliest tokens with algorithm.loss_config.divergence_topk: 20"
    ),
    "a2c": "it is algorithm.advantage: gae with algorithm.loss: reinforce",
    "vtrace": "off-policy correction is algorithm.rollout_is",
    "impala": "off-policy correction is algorithm.rollout_is",
}

NOT_LOSSES = _PUBLISHED | {
    name: f"{name} is an advantage here: set algorithm.advantage: {name} and algorithm.loss: ppo"
    for name in ADVANTAGE_SETTINGS.keys() - LOSS_SETTINGS.keys()
}

NOT_ADVANTAGES = _PUBLISHED | {
    name: f"{name} is a loss here: set algorithm.loss: {name}"
    + ("; PPO's advantage is gae" if name == "ppo" else "")
    for name in LOSS_SETTINGS.keys() - ADVANTAGE_SETTINGS.keys()
}
"""By name, what to set instead."""
