"""`algorithm.advantage` and `algorithm.advantage_config`: the estimator and its settings.

Invariant: `ADVANTAGE_SETTINGS` has the settings class of every estimator; `ADVANTAGES` in
`streamrl.algorithms.advantages` has the same keys (a test compares them).
"""

from collections.abc import Mapping

from pydantic import ConfigDict, FiniteFloat

from streamrl.config.section import Decay, PositiveNumber, Probability, Section


class AdvantageSettings(Section):
    """Settings of the estimator; its own are listed below."""

    whiten: bool | None = None
    """Standardize over the batch. Null: for gae, gdpo, reinforce_plus_plus and
    reinforce_plus_plus_baseline."""
    clip: PositiveNumber | None = None
    """Bound on the magnitude after whitening."""


class DiscountSettings(AdvantageSettings):
    """reinforce, reinforce_plus_plus: discounted rewards."""

    gamma: Probability = 1.0
    """Discount per response token."""


class GaeSettings(DiscountSettings):
    """gae: generalized advantage estimation."""

    lam: Probability = 1.0
    """Near 1: less bias; near 0: less variance."""


class GroupNormSettings(AdvantageSettings):
    """grpo, grpo_passk, gdpo, gigpo: optional division by the group's spread."""

    norm_adv_by_std: bool = True
    """Divide by the standard deviation of the group."""


class GdpoSettings(GroupNormSettings):
    """gdpo: each reward is normalized within its group before they are added."""

    rewards: Mapping[str, FiniteFloat] = {}
    """The rewards: names of recorded metrics, such as reward/format, with their weights."""


class GigpoSettings(GroupNormSettings):
    """gigpo: compares whole siblings, and turns that answered the same observation."""

    turn_gamma: Probability = 0.95
    """Discount per turn."""
    step_weight: PositiveNumber = 1.0
    """Weight of the turns' advantage beside the episode's."""


class RaeSettings(AdvantageSettings):
    """rae: a running baseline per environment and role."""

    role: str | None = None
    """Recorded metric whose value is the role of an episode; null: all episodes have one role."""
    decay: Decay = 0.95
    """Decay of a baseline per episode of its role."""


class GpgAdvantageSettings(AdvantageSettings):
    """gpg: the group policy gradient."""

    f_norm: PositiveNumber = 1.0
    """Divisor of the advantages."""


class UserAdvantageSettings(AdvantageSettings):
    """A user's own estimator (PATH.py:NAME). It keeps all other keys, as attributes
    (`settings.beta`) and in the mapping `model_extra`."""

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
"""The settings class of each estimator, by name."""
