"""The `algorithm:` section: which advantage, which loss, which correction, and their numbers.

Invariant: every name in it is a name that `streamrl.algorithms` knows, checked without importing
torch.
"""

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from streamrl.config.algorithm.advantages import ADVANTAGE_NAMES, AdvantageConfig
from streamrl.config.algorithm.kl import KlLossSettings, KlRewardSettings
from streamrl.config.algorithm.losses import LOSS_NAMES, RATIO_FREE_LOSSES, LossConfig
from streamrl.config.algorithm.rewards import PfPpoSettings, RewardSettings, SampleWeightSettings
from streamrl.config.algorithm.rollout_is import (
    ROLLOUT_IS_PRESETS,
    RolloutISSettings,
    rollout_is_preset,
)
from streamrl.config.algorithm.value import ValueSettings
from streamrl.config.section import Section
from streamrl.errors import did_you_mean


def _preset_or_record(value: object) -> object:
    return rollout_is_preset(value) if isinstance(value, str) else value


class AlgorithmSettings(Section):
    """Everything between trajectories and the gradient."""

    advantage: str = "grpo"
    """Estimator of the advantage, by name."""
    advantage_config: AdvantageConfig = AdvantageConfig()
    """Numbers of the estimator."""
    loss: str = "ppo"
    """Policy loss, by name."""
    loss_config: LossConfig = LossConfig()
    """Numbers of the loss."""
    rollout_is: Annotated[RolloutISSettings, BeforeValidator(_preset_or_record)] = (
        ROLLOUT_IS_PRESETS["token_is"]
    )
    """Importance sampling for stale or mismatched generation: a preset's name or a record."""
    proximal: Literal["recompute", "behavior", "loglinear"] = "recompute"
    """The policy that ratios are taken to: a pass of its own, the behavior policy, or between."""
    rl_loss_coef: float = Field(default=1.0, ge=0)
    """Weight of the policy loss."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""
    sft_coef: float = Field(default=0.0, ge=0)
    """Weight of the negative log-likelihood of trajectories with a positive reward."""
    kl_loss: KlLossSettings = KlLossSettings()
    """KL to the reference policy in the loss."""
    kl_reward: KlRewardSettings = KlRewardSettings()
    """KL to the reference policy in the reward."""
    value: ValueSettings = ValueSettings()
    """The critic of advantage gae."""
    reward: RewardSettings = RewardSettings()
    """Shaping of rewards."""
    sample_weight: SampleWeightSettings = SampleWeightSettings()
    """Weights per trajectory."""
    pf_ppo: PfPpoSettings | None = None
    """Resampling of trajectories by reward; null for none."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.advantage not in ADVANTAGE_NAMES:
            hint = did_you_mean(self.advantage, ADVANTAGE_NAMES)
            raise ValueError(f"advantage: {self.advantage!r} is unknown; {hint}")
        if self.loss not in LOSS_NAMES:
            raise ValueError(
                f"loss: {self.loss!r} is unknown; {did_you_mean(self.loss, LOSS_NAMES)}"
            )
        return self

    @property
    def needs_reference(self) -> bool:
        """Whether some term compares with the reference policy."""
        return self.kl_loss.coef > 0 or self.kl_reward.coef > 0

    @property
    def needs_reference_logprobs(self) -> bool:
        """Whether a term takes them token by token; exact KL takes hidden states instead."""
        return self.kl_reward.coef > 0 or (self.kl_loss.coef > 0 and not self.kl_loss.is_exact)

    @property
    def needs_values(self) -> bool:
        return self.advantage == "gae"

    @property
    def needs_greedy_rewards(self) -> bool:
        """Whether generators add a greedy completion per prompt."""
        return self.advantage == "remax"

    @property
    def weighs_current_policy(self) -> bool:
        """Whether importance weights compare the current policy with the behavior policy.

        So it is when there is no proximal policy of its own. The losses with a ratio then hold the
        correction in the ratio, and weights would count it twice.
        """
        return self.proximal == "behavior"

    @property
    def ratio_holds_correction(self) -> bool:
        """Whether weights must not be applied: the loss's ratio is to the behavior policy."""
        return self.proximal == "behavior" and self.loss not in RATIO_FREE_LOSSES
