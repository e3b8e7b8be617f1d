"""The `algorithm:` section: which advantage, which loss, which correction, and their numbers.

Invariant: every name in it is a name that `streamrl.algorithms` knows, checked without importing
torch.
"""

from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    SerializeAsAny,
    ValidationInfo,
    field_validator,
    model_validator,
)

from streamrl.config.algorithm.advantages import (
    ADVANTAGE_SETTINGS,
    AdvantageSettings,
    UserAdvantageSettings,
)
from streamrl.config.algorithm.choice import check_choice, choose_record
from streamrl.config.algorithm.dynamic_sampling import DynamicSamplingSettings
from streamrl.config.algorithm.kl import KlLossSettings, KlRewardSettings
from streamrl.config.algorithm.losses import (
    LOSS_SETTINGS,
    RATIO_FREE_LOSSES,
    LossSettings,
    UserLossSettings,
)
from streamrl.config.algorithm.presets import DEFAULT_PRESET, with_preset
from streamrl.config.algorithm.recipes import NOT_ADVANTAGES, NOT_LOSSES
from streamrl.config.algorithm.rewards import PfPpoSettings, RewardSettings, SampleWeightSettings
from streamrl.config.algorithm.rollout_is import (
    ROLLOUT_IS_PRESETS,
    RolloutISSettings,
    rollout_is_preset,
)
from streamrl.config.algorithm.value import ValueSettings
from streamrl.config.section import Section


def _preset_or_record(value: object) -> object:
    return rollout_is_preset(value) if isinstance(value, str) else value


class AlgorithmSettings(Section):
    """Everything between trajectories and the gradient."""

    # The defaults of the two records depend on a field beside them: validation makes them of {}.

    advantage: str = "grpo"
    """Estimator of the advantage: gae, reinforce, reinforce_plus_plus,
    reinforce_plus_plus_baseline, grpo, dr_grpo, grpo_passk, rloo, remax, opo, opob, gpg, or
    PATH.py:FUNCTION."""
    advantage_config: SerializeAsAny[AdvantageSettings] = Field(default_factory=dict)  # type: ignore[assignment]
    """Numbers of the estimator: the record of the one that is chosen."""
    loss: str = "ppo"
    """Policy loss: ppo, gspo, gpg, clip_cov, kl_cov, geo_mean, cispo, sapo, dppo_tv, dppo_kl,
    vespo, topr, reinforce, dro, or PATH.py:FUNCTION."""
    loss_config: SerializeAsAny[LossSettings] = Field(default_factory=dict)  # type: ignore[assignment]
    """Numbers of the loss: the record of the one that is chosen."""
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
    dynamic_sampling: DynamicSamplingSettings | None = None
    """Leaving out groups whose siblings all have one reward; null leaves out none."""
    pf_ppo: PfPpoSettings | None = None
    """Resampling of trajectories by reward; null for none."""
    preset: Literal["stream"] | None = DEFAULT_PRESET
    """Settings that were measured together. They go before the defaults of this section, and what
    is given beside the name goes before them: stream is advantage opob, loss vespo, proximal
    behavior and rollout_is.scale_lr, for trajectories that are several versions old. A name from
    --set or the environment replaces what the file says of these. It is null where advantage, loss,
    their _config, proximal or rollout_is is given and it is not."""

    @model_validator(mode="before")
    @classmethod
    def _with_preset(cls, section: object) -> object:
        return with_preset(section)

    @field_validator("advantage")
    @classmethod
    def _is_an_advantage(cls, name: str) -> str:
        return check_choice(name, ADVANTAGE_SETTINGS, NOT_ADVANTAGES)

    @field_validator("loss")
    @classmethod
    def _is_a_loss(cls, name: str) -> str:
        return check_choice(name, LOSS_SETTINGS, NOT_LOSSES)

    @field_validator("advantage_config", mode="before")
    @classmethod
    def _is_of_the_advantage(cls, value: Any, info: ValidationInfo) -> AdvantageSettings:
        if "advantage" not in info.data:
            return AdvantageSettings()
        name = info.data["advantage"]
        return choose_record("advantage", name, ADVANTAGE_SETTINGS, UserAdvantageSettings, value)

    @field_validator("loss_config", mode="before")
    @classmethod
    def _is_of_the_loss(cls, value: Any, info: ValidationInfo) -> LossSettings:
        if "loss" not in info.data:
            return LossSettings()
        return choose_record("loss", info.data["loss"], LOSS_SETTINGS, UserLossSettings, value)

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
    def needs_ratios(self) -> bool:
        """Whether the advantage weighs trajectories by their ratios, so that the policy's
        log-probabilities must be known before."""
        return self.advantage == "opob"

    @property
    def needs_greedy_rewards(self) -> bool:
        """Whether generators add a greedy completion per prompt."""
        return self.advantage == "remax"

    @property
    def weighs_current_policy(self) -> bool:
        """Whether importance weights compare the current policy with the behavior policy: there is
        no proximal policy of its own."""
        return self.proximal == "behavior"

    @property
    def ratio_holds_correction(self) -> bool:
        """Whether weights are for the metrics only: the loss's ratio is to the behavior policy, and
        they would count it twice. Tokens that rejection and veto take out still weigh 0."""
        return self.proximal == "behavior" and self.loss not in RATIO_FREE_LOSSES

    @property
    def corrects_as_a_whole(self) -> bool:
        """Whether the correction of a token depends on the other tokens of its update."""
        correction = self.rollout_is
        return (
            correction.normalize_by == "kept"
            or correction.second_moment is not None
            or (correction.batch_normalize and not self.ratio_holds_correction)
        )
