"""The `algorithm:` section: which advantage, which loss, which correction, and their numbers.

Invariant: every name in it is a name that `streamrl.algorithms` knows, checked without importing
torch.

The record of the loss, or of the advantage, is that of the choice, so a number that the choice does
not read is refused. A published algorithm is an advantage and a loss with their numbers: GRPO names
the advantage, and its loss is PPO's.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SerializeAsAny,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from streamrl.config.algorithm.advantages import (
    ADVANTAGE_SETTINGS,
    AdvantageSettings,
    UserAdvantageSettings,
)
from streamrl.config.algorithm.distillation import DistillationSettings
from streamrl.config.algorithm.losses import (
    LOSS_SETTINGS,
    RATIO_FREE_LOSSES,
    AggregationMode,
    LossSettings,
    UserLossSettings,
)
from streamrl.config.algorithm.presets import DEFAULT_PRESET, with_preset
from streamrl.config.algorithm.rewards import (
    PfPpoSettings,
    RewardShapingSettings,
    SampleWeightSettings,
)
from streamrl.config.algorithm.rollout_is import (
    ROLLOUT_IS_PRESETS,
    RolloutISSettings,
    rollout_is_preset,
)
from streamrl.config.section import Decay, LearningRate, Section
from streamrl.errors import did_you_mean, nearest
from streamrl.user_code import check_user_code, is_user_code

Record = TypeVar("Record", bound=Section)


def check_choice(
    name: str, known: Mapping[str, object], elsewhere: Mapping[str, str] | None = None
) -> str:
    """The name, if it is built in or has the form of a user's own.

    Args:
        elsewhere: what to set instead, for names that people give to this choice by mistake.

    Raises:
        ValueError: neither; pydantic makes it a refusal of the field.
    """
    if is_user_code(name):
        check_user_code(name)
    elif name not in known and name.lower() in (elsewhere or {}):
        raise ValueError(f"was {name!r}; {(elsewhere or {})[name.lower()]}")
    elif name not in known:
        raise ValueError(f"{name!r} is unknown; {did_you_mean(name, known)}")
    return name


def choose_record(
    kind: str, name: str, records: Mapping[str, type[Record]], own: type[Record], value: object
) -> Record:
    """The value as the record of the choice.

    Args:
        kind: what is chosen: loss or advantage.
        own: the record of a user's own, which keeps every key.
        value: a mapping of the file, or a record.

    Raises:
        ValidationError: a key that the record does not have, or a number out of range.
    """
    record = own if is_user_code(name) else records[name]
    if isinstance(value, Mapping) and record is not own:
        refusals = [
            _refusal(str(key), value[key], kind, name, records)
            for key in value
            if key not in record.model_fields
        ]
        if refusals:
            raise ValidationError.from_exception_data(record.__name__, refusals)
    return record.model_validate(value)


def _refusal(
    key: str, value: object, kind: str, name: str, records: Mapping[str, type[Record]]
) -> InitErrorDetails:
    allowed = records[name].model_fields
    owners = [other for other, record in records.items() if key in record.model_fields]
    known = f"{name} has {', '.join(allowed)}"
    if owners:
        hint = f"it belongs to {kind} {' and '.join(owners)} ({known})"
    elif close := nearest(key, allowed):
        hint = f"did you mean {close!r}? ({known})"
    else:
        hint = known
    context: dict[str, Any] = {"sentence": f"unknown key for {kind} {name}; {hint}"}
    return InitErrorDetails(
        type=PydanticCustomError("unknown_key", "{sentence}", context), loc=(key,), input=value
    )


KL_ESTIMATORS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
KL_KINDS = (*KL_ESTIMATORS, *(f"{name}+" for name in KL_ESTIMATORS), "full")


def _known_kl(kind: str) -> str:
    if kind not in KL_KINDS:
        raise ValueError(f"{kind!r} is unknown; {did_you_mean(kind, KL_KINDS)}")
    return kind


KlKind = Annotated[str, AfterValidator(_known_kl)]


class KlLossSettings(Section):
    """KL to the reference policy as a term of the loss; `coef` 0 switches it off."""

    coef: float = Field(default=0.0, ge=0)
    """Weight of the term; 0.001 is usual."""
    kind: KlKind = "low_var_kl"
    """Estimator; a trailing + keeps its value and takes the gradient of k2."""

    @property
    def is_exact(self) -> bool:
        return self.coef > 0 and self.kind == "full"


class KlRewardSettings(Section):
    """KL to the reference policy, subtracted from the reward of each token; `coef` 0 is off."""

    coef: float = Field(default=0.0, ge=0)
    """Weight, or with the adaptive controller its first value."""
    kind: KlKind = "kl"
    """Estimator of the per-token KL; `full` exists in the loss only."""
    controller: Literal["fixed", "adaptive"] = "fixed"
    """Whether the weight follows the measured KL."""
    target: float = Field(default=0.1, gt=0)
    """adaptive: the KL aimed for."""
    horizon: int = Field(default=10_000, gt=0)
    """adaptive: trajectories over which the weight may change by a fifth."""

    @field_validator("kind")
    @classmethod
    def _is_an_estimator(cls, kind: str) -> str:
        if kind == "full":
            raise ValueError(
                f"was 'full', which kl_loss alone computes; use one of {KL_ESTIMATORS}"
            )
        return kind


class ValueSettings(Section):
    """The critic and its loss; used by advantage gae."""

    model_path: str | None = None
    """Folder or hub name of the model that the critic begins as, of any size and architecture, with
    the policy's tokenizer; null: model.path."""
    max_tokens_per_micro_batch: int | None = Field(default=None, gt=0)
    """Tokens of one forward and backward pass of the critic; null: as the policy's."""
    clip_range: float | None = Field(default=0.5, gt=0)
    """How far a value may move from the old one before its loss stops falling; null: no limit."""
    coef: float = Field(default=1.0, ge=0)
    """Weight of the value loss."""
    loss_agg_mode: AggregationMode = "token-mean"
    """How per-token value losses become one number."""
    lr: LearningRate | None = None
    """Learning rate of the critic; null: that of the policy."""
    betas: tuple[Decay, Decay] | None = None
    """Decay of the first and second moment of the critic; null: as the policy's."""
    eps: float | None = Field(default=None, gt=0)
    """Added to the denominator of the critic's update; null: as the policy's."""
    weight_decay: float | None = Field(default=None, ge=0)
    """Decoupled weight decay of the critic; null: as the policy's."""
    max_grad_norm: float | None = Field(default=None, gt=0)
    """Global norm the critic's gradients are clipped to; null: as the policy's."""
    critic_warmup: int = Field(default=0, ge=0)
    """First steps in which only the critic is trained."""


class DynamicSamplingSettings(Section):
    """Groups whose siblings all have one reward are left out, and the prompts that follow are
    sampled in their place (DAPO, arXiv 2503.14476); they are counted as dropped, `uniform`."""

    metric: str = "reward"
    """What must differ among the siblings: reward, before any shaping, or the name of a metric
    that the environment records."""
    max_refills: float = Field(default=9.0, gt=0)
    """Groups that may be left out for each one that is kept, at most; beyond that, groups are
    trained although they are alike."""


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
    "kimi_k1.5": (
        "Kimi k1.5 is algorithm.loss: dro with algorithm.advantage: dr_grpo; its tau is "
        "algorithm.loss_config.dro_beta"
    ),
    "a-3po": "A-3PO is algorithm.proximal: loglinear",
    "optimal_token_baseline": "it is algorithm.advantage: otb",
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


def _preset_or_record(value: object) -> object:
    return rollout_is_preset(value) if isinstance(value, str) else value


RouterReplay = Literal["off", "record", "replay"]


class AlgorithmSettings(Section):
    """Everything between trajectories and the gradient."""

    # The defaults of the two records depend on a field beside them: validation makes them of {}.

    advantage: str = "grpo"
    """Estimator of the advantage: gae, reinforce, reinforce_plus_plus,
    reinforce_plus_plus_baseline, grpo, dr_grpo, grpo_passk, rloo, remax, opo, opob, otb, maxrl,
    gdpo, gigpo, gpg, or PATH.py:FUNCTION."""
    advantage_config: SerializeAsAny[AdvantageSettings] = Field(default_factory=dict)  # type: ignore[assignment]
    """Numbers of the estimator: the record of the one that is chosen."""
    loss: str = "ppo"
    """Policy loss: ppo, gspo, luspo, gpg, clip_cov, kl_cov, geo_mean, cispo, sapo, dppo_tv,
    dppo_kl, vespo, topr, reinforce, dro, or PATH.py:FUNCTION."""
    loss_config: SerializeAsAny[LossSettings] = Field(default_factory=dict)  # type: ignore[assignment]
    """Numbers of the loss: the record of the one that is chosen."""
    rollout_is: Annotated[RolloutISSettings, BeforeValidator(_preset_or_record)] = (
        ROLLOUT_IS_PRESETS["token_is"]
    )
    """Importance sampling for stale or mismatched generation: a preset's name or a record."""
    proximal: Literal["recompute", "behavior", "loglinear", "linear"] = "recompute"
    """The policy that ratios are taken to: a pass of its own, the behavior policy, or between, by
    log-probabilities or by probabilities."""
    rescore_share: float = Field(default=0.0, ge=0, le=1)
    """Share of the groups whose tokens are scored once more under the learner's own weights of the
    version that sampled them, which tells engine mismatch from policy lag; 0 is off. The host's
    memory then holds the trained weights of the last `buffer.max_staleness` versions."""
    router_replay: RouterReplay = "off"
    """Experts of a mixture-of-experts model: record those that the engine took for each token, and
    train with the recorded ones (replay) or with the learner's own (record, for the metrics)."""
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
    distillation: DistillationSettings | None = None
    """Teachers whose log-probabilities make the advantage, or are added to it; null for none."""
    value: ValueSettings = ValueSettings()
    """The critic of advantage gae."""
    reward: RewardShapingSettings = RewardShapingSettings()
    """Shaping of rewards."""
    sample_weight: SampleWeightSettings = SampleWeightSettings()
    """Weights per trajectory."""
    dynamic_sampling: DynamicSamplingSettings | None = None
    """Leaving out groups whose siblings all have one reward; null leaves out none."""
    pf_ppo: PfPpoSettings | None = None
    """Resampling of trajectories by reward; null for none."""
    preset: Literal["stream"] | None = DEFAULT_PRESET
    """stream is advantage opob, loss vespo, proximal behavior and rollout_is.scale_lr, for
    trajectories that are several versions old; what is given beside the name goes before it. A name
    from --set or the environment replaces what the file says of these. It is null where advantage,
    loss, their _config, proximal or rollout_is is given and it is not."""

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

    @model_validator(mode="after")
    def _has_ratios_to_split(self) -> Self:
        if self.rescore_share and self.rollout_is.is_off:
            raise ValueError(
                f"rescore_share: was {self.rescore_share:g}, and rollout_is computes no ratio to "
                "tell apart; set rollout_is: metrics_only, or another preset"
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
    def records_experts(self) -> bool:
        """Whether generators record the experts of each token."""
        return self.router_replay != "off"

    @property
    def reads_rewards(self) -> bool:
        """Whether the advantage of the reward is part of a token's advantage."""
        return self.distillation is None or self.distillation.reward_coef > 0

    @property
    def has_teachers(self) -> bool:
        """Whether the learner holds teachers."""
        return self.distillation is not None and bool(self.distillation.in_learner)

    @property
    def has_other_terms(self) -> bool:
        """Whether the loss has more terms than that of the policy."""
        return bool(self.kl_loss.coef or self.entropy_coef or self.sft_coef or self.num_taught)

    @property
    def num_taught(self) -> int:
        """Candidates of a teacher that the loss compares with, of each token."""
        return 0 if self.distillation is None else self.distillation.top_k

    @property
    def needs_values(self) -> bool:
        return self.advantage == "gae" and self.reads_rewards

    @property
    def needs_ratios(self) -> bool:
        """Whether the advantage is made of the policy's log-probabilities, which must be known
        before: it weighs trajectories by their ratios, or teachers are compared with them."""
        is_compared = self.distillation is not None and self.distillation.compares_proximal
        return is_compared or (self.advantage in ("opob", "otb") and self.reads_rewards)

    @property
    def needs_anchors(self) -> bool:
        """Whether the advantage compares turns that answered the same observation."""
        return self.advantage == "gigpo" and self.reads_rewards

    @property
    def needs_greedy_rewards(self) -> bool:
        """Whether generators add a greedy completion per prompt."""
        return self.advantage == "remax" and self.reads_rewards

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
