"""`algorithm.advantage` and `algorithm.advantage_config`: the estimator, and a record of numbers
for each.

Invariant: `ADVANTAGE_SETTINGS` names the record of every estimator; `ADVANTAGES` in
`streamrl.algorithms.advantages` has the same keys (a test compares them).
"""

from collections.abc import Mapping

from pydantic import ConfigDict, FiniteFloat

from streamrl.config.section import Decay, PositiveNumber, Probability, Section


class AdvantageSettings(Section):
    """Numbers of the estimator, its own below."""

    whiten: bool | None = None
    """Standardize over the batch. Null: where the estimator is defined so (gae, gdpo,
    reinforce_plus_plus, reinforce_plus_plus_baseline)."""
    clip: PositiveNumber | None = None
    """Bound on the magnitude, after whitening."""


class DiscountSettings(AdvantageSettings):
    """reinforce, reinforce_plus_plus: discount rewards."""

    gamma: Probability = 1.0
    """Discount per response token."""


class GaeSettings(DiscountSettings):
    """gae: generalized advantage estimation."""

    lam: Probability = 1.0
    """Near 1 less bias, near 0 less variance."""


class GroupNormSettings(AdvantageSettings):
    """grpo, grpo_passk, gdpo, gigpo: may divide by a group's spread."""

    norm_adv_by_std: bool = True
    """Divide by the standard deviation of the group."""


class GdpoSettings(GroupNormSettings):
    """gdpo: each reward is normalized within its group before they are added."""

    rewards: Mapping[str, FiniteFloat] = {}
    """Weights of recorded metrics, such as reward/format; these are the rewards."""


class GigpoSettings(GroupNormSettings):
    """gigpo: compares siblings as a whole, and turns that met one observation."""

    turn_gamma: Probability = 0.95
    """Discount per turn."""
    step_weight: PositiveNumber = 1.0
    """Of turns beside episodes."""


class RaeSettings(AdvantageSettings):
    """rae: one running baseline for each environment and role."""

    role: str | None = None
    """Recorded metric whose value is the role that an episode played; null: all have one."""
    decay: Decay = 0.95
    """Of a baseline, for each episode of its role."""


class GpgAdvantageSettings(AdvantageSettings):
    """gpg: the group policy gradient."""

    f_norm: PositiveNumber = 1.0
    """Divisor of the advantages."""


class UserAdvantageSettings(AdvantageSettings):
    """An estimator of the user's own (PATH.py:NAME). Other keys are kept as they are written and
    read as attributes, `settings.beta`; `model_extra` is the mapping of all of them."""

    model_config = ConfigDict(extra="allow")


ADVANTAGE_SETTINGS: Mapping[str, type[AdvantageSettings]] = {
    "gae": GaeSettings,
    "reinforce": DiscountSettings,
    "reinforce_plus_plus": DiscountSettings,
    "reinforce_plus_plus_baseline": AdvantageSettings,
    "grpo": GroupNormSettings,
    "dr_grpo": AdvantageSettings,
    "grpo_passk": GroupNormSettings,
    "rloo": AdvantageSettings,
    "remax": AdvantageSettings,
    "opo": AdvantageSettings,
    "opob": AdvantageSettings,
    "otb": AdvantageSettings,
    "maxrl": AdvantageSettings,
    "gdpo": GdpoSettings,
    "gigpo": GigpoSettings,
    "rae": RaeSettings,
    "gpg": GpgAdvantageSettings,
}
"""The record of numbers of each estimator, by its name."""
