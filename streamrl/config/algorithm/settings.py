"""The `algorithm:` section: advantage, loss, correction, and their settings.

Invariant: every name in it is known to `streamrl.algorithms`; this is checked without importing
torch. Settings given beside a preset override it, so a preset and its settings written out are the
same configuration; a preset of which nothing is left is refused.

The settings of the loss and of the advantage depend on the choice, so a setting that the choice
does not read is refused. A published algorithm is a combination of an advantage and a loss: GRPO
names the advantage, and its loss is PPO's.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, Literal

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
from streamrl.config.section import (
    Decay,
    LearningRate,
    NotNegative,
    NotNegativeNumber,
    Positive,
    PositiveNumber,
    Probability,
    Section,
    overlaid,
)
from streamrl.errors import did_you_mean, nearest
from streamrl.user_code import check_user_code, is_user_code


def _chosen_of(known: Mapping[str, object], elsewhere: Mapping[str, str]) -> AfterValidator:
    """Check that a name is built in or has the form of a user's own.

    Args:
        elsewhere: what to set instead, for names that people use here by mistake.
    """

    def check(name: str) -> str:
        if is_user_code(name):
            return check_user_code(name)
        if name not in known and name.lower() in elsewhere:
            raise ValueError(f"was {name!r}; {elsewhere[name.lower()]}")
        if name not in known:
            raise ValueError(f"{name!r} is unknown; {did_you_mean(name, known)}")
        return name

    return AfterValidator(check)


_RECORDS: Mapping[str, Mapping[str, type[Section]]] = {
    "advantage": ADVANTAGE_SETTINGS,
    "loss": LOSS_SETTINGS,
}
_OWN: Mapping[str, type[Section]] = {"advantage": UserAdvantageSettings, "loss": UserLossSettings}
"""The settings classes of a user's own choices, which keep every key."""


def _record_of(kind: str, name: str, value: object) -> Section:
    """Turn a mapping from the file, or a record, into the settings class of the advantage or the
    loss."""
    if is_user_code(name):
        return _OWN[kind].model_validate(value)
    record = _RECORDS[kind][name]
    given = value if isinstance(value, Mapping) else {}
    if unknown := given.keys() - record.model_fields.keys():
        refusals = [_refusal(str(k), v, kind, name) for k, v in given.items() if k in unknown]
        raise ValidationError.from_exception_data(record.__name__, refusals)
    return record.model_validate(value)


def _record_beside(fields: Mapping[str, Any], kind: str, value: object) -> Section:
    """`_record_of` for the choice among the fields; any record if the choice itself is refused."""
    return _record_of(kind, fields[kind], value) if kind in fields else _OWN[kind]()


def _refusal(key: str, value: object, kind: str, name: str) -> InitErrorDetails:
    allowed = _RECORDS[kind][name].model_fields
    owners = [other for other, record in _RECORDS[kind].items() if key in record.model_fields]
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
_KL_OF_TOKENS = (*KL_ESTIMATORS, *(f"{name}+" for name in KL_ESTIMATORS))
KL_KINDS = (*_KL_OF_TOKENS, "full")


def _one_of(kinds: Sequence[str]) -> AfterValidator:
    def check(kind: str) -> str:
        if kind not in kinds:
            known = "of kl_loss alone" if kind in KL_KINDS else "unknown"
            raise ValueError(f"{kind!r} is {known}; {did_you_mean(kind, kinds)}")
        return kind

    return AfterValidator(check)


class KlLossSettings(Section):
    """KL to the reference policy in the loss."""

    coef: NotNegativeNumber = 0.0
    """Weight; 0: off; 0.001 is usual."""
    kind: Annotated[str, _one_of(KL_KINDS)] = "low_var_kl"
    """KL estimator; with a trailing + it has the gradient of k2."""

    @property
    def is_exact(self) -> bool:
        return self.coef > 0 and self.kind == "full"


class KlRewardSettings(Section):
    """KL to the reference policy, subtracted from each token's reward."""

    coef: NotNegativeNumber = 0.0
    """Weight; 0: off; with the adaptive controller the initial value."""
    kind: Annotated[str, _one_of(_KL_OF_TOKENS)] = "kl"
    """KL estimator; not `full`."""
    controller: Literal["fixed", "adaptive"] = "fixed"
    """fixed, or adaptive: `coef` follows the measured KL."""
    target: PositiveNumber = 0.1
    """adaptive: the target KL."""
    horizon: Positive = 10_000
    """adaptive: number of trajectories over which `coef` may change by a fifth."""


class ValueSettings(Section):
    """The critic of advantage gae; null: as for the policy."""

    model_path: str | None = None
    """Folder or hub name of its initial model, which must have the policy's tokenizer."""
    max_tokens_per_micro_batch: Positive | None = None
    """Tokens per forward and backward pass."""
    clip_range: PositiveNumber | None = 0.5
    """How far a value may move from the old one before the loss clips it."""
    coef: NotNegativeNumber = 1.0
    """Weight of the critic's loss."""
    loss_agg_mode: AggregationMode = "token-mean"
    """Aggregation, as for the policy's loss."""
    lr: LearningRate | None = None
    """Learning rate."""
    betas: tuple[Decay, Decay] | None = None
    """Decay rates of the two moments."""
    eps: PositiveNumber | None = None
    """Added to the denominator of the update."""
    weight_decay: NotNegativeNumber | None = None
    """Decoupled weight decay."""
    max_grad_norm: PositiveNumber | None = None
    """Global norm that the critic's gradients are clipped to."""
    critic_warmup: NotNegative = 0
    """Number of first steps that train only the critic."""


class DynamicSamplingSettings(Section):
    """Drop groups whose siblings all have the same reward (DAPO, arXiv 2503.14476)."""

    metric: str = "reward"
    """What must differ within a group: the reward before shaping, or a metric that the environment
    records."""
    max_refills: PositiveNumber = 9.0
    """Most groups dropped per group that is kept."""


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
        "Kimi k1.5 is algorithm.loss: dro with algorithm.advantage: dr_grpo, algorithm.proximal: "
        "behavior and algorithm.loss_config.dro_level: sequence; its tau is "
        "algorithm.loss_config.dro_beta"
    ),
    "a-3po": "A-3PO is algorithm.proximal: loglinear",
    "echo": "ECHO is algorithm.echo_coef: 0.05, beside any advantage and loss",
    "spiral": "SPIRAL's advantage is algorithm.advantage: rae",
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
"""By name: what to set instead."""


ALGORITHM_PRESETS: dict[str, Mapping[str, Any]] = {
    "stream": {
        "advantage": "opob",
        "loss": "vespo",
        "proximal": "behavior",
        "rollout_is": {"scale_lr": True},
    }
}
"""By name: the fields of the section `algorithm`; docs/importance-sampling.md has the results of
each."""
DEFAULT_PRESET: Final = "stream"
CHOICES: Final = ("advantage", "advantage_config", "loss", "loss_config", "proximal", "rollout_is")
"""The fields of a preset."""


def _is_replaced(ours: Any, given: Any) -> bool:
    """Whether the given settings override everything in the preset."""
    if isinstance(ours, Mapping) and isinstance(given, Mapping):
        return all(key in given and given[key] != value for key, value in ours.items())
    return bool(given != ours)


RouterReplay = Literal["off", "record", "replay"]


class AlgorithmSettings(Section):
    """Everything between trajectories and the gradient."""

    # The defaults of the two records depend on a field beside them: validation makes them of {}.

    advantage: Annotated[str, _chosen_of(ADVANTAGE_SETTINGS, NOT_ADVANTAGES)] = "grpo"
    """gae, reinforce, reinforce_plus_plus, reinforce_plus_plus_baseline, grpo, dr_grpo, grpo_passk,
    rloo, remax, opo, opob, otb, maxrl, gdpo, gigpo, rae, gpg, or PATH.py:FUNCTION."""
    advantage_config: SerializeAsAny[AdvantageSettings] = Field(default_factory=dict)  # type: ignore[assignment]
    loss: Annotated[str, _chosen_of(LOSS_SETTINGS, NOT_LOSSES)] = "ppo"
    """ppo, gspo, luspo, gpg, clip_cov, kl_cov, geo_mean, cispo, sapo, dppo_tv, dppo_kl, vespo,
    topr, reinforce, dro, or PATH.py:FUNCTION."""
    loss_config: SerializeAsAny[LossSettings] = Field(default_factory=dict)  # type: ignore[assignment]
    rollout_is: Annotated[RolloutISSettings, BeforeValidator(rollout_is_preset)] = (
        ROLLOUT_IS_PRESETS["token_is"]
    )
    proximal: Literal["recompute", "behavior", "loglinear", "linear"] = "recompute"
    """The policy in the denominator of ratios: recomputed by a pass, the behavior policy, or
    interpolated."""
    rescore_share: Probability = 0.0
    """Share of the groups that are scored again under the weights that sampled them, to separate
    engine mismatch from policy lag."""
    router_replay: RouterReplay = "off"
    """Record the experts that the engine chose for each token, for metrics (record) or to train
    with them (replay)."""
    rl_loss_coef: NotNegativeNumber = 1.0
    """Weight of the policy loss."""
    entropy_coef: NotNegativeNumber = 0.0
    """Weight of the entropy bonus."""
    sft_coef: NotNegativeNumber = 0.0
    """Weight of the negative log-likelihood of trajectories with a positive reward."""
    echo_coef: NotNegativeNumber = 0.0
    """Weight of the negative log-likelihood of what the policy read between its turns (ECHO, arXiv
    2605.24517)."""
    kl_loss: KlLossSettings = KlLossSettings()
    kl_reward: KlRewardSettings = KlRewardSettings()
    distillation: DistillationSettings | None = None
    """Null: none."""
    value: ValueSettings = ValueSettings()
    reward: RewardShapingSettings = RewardShapingSettings()
    sample_weight: SampleWeightSettings = SampleWeightSettings()
    dynamic_sampling: DynamicSamplingSettings | None = None
    """Null: no group is dropped."""
    pf_ppo: PfPpoSettings | None = None
    """Null: none."""
    preset: Literal["stream"] | None = DEFAULT_PRESET
    """stream: advantage opob, loss vespo, proximal behavior and rollout_is.scale_lr, unless given.
    Left out, it is null if one of these or their _config is given."""

    @model_validator(mode="before")
    @classmethod
    def _over_preset(cls, section: object) -> object:
        """The given fields on top of those of the preset, of which something must be left. The
        default preset applies unless one of CHOICES is given."""
        if not isinstance(section, Mapping):
            return section
        preset = section.get("preset", DEFAULT_PRESET)
        if not isinstance(preset, str) or preset not in ALGORITHM_PRESETS:
            return section
        if "preset" not in section and any(name in section for name in CHOICES):
            return {"preset": None, **section}
        ours = ALGORITHM_PRESETS[preset]
        if all(name in section and _is_replaced(ours[name], section[name]) for name in ours):
            raise ValueError(
                f"algorithm.preset: was {preset}, and {', '.join(ours)} are all set to something "
                "else, so it cannot act; leave them out, or set it to null"
            )
        return overlaid(ours, section)

    # Two, since pydantic 2.12.0 does not say of which field a default is.

    @field_validator("advantage_config", mode="before")
    @classmethod
    def _is_of_the_advantage(cls, value: Any, info: ValidationInfo) -> Section:
        return _record_beside(info.data, "advantage", value)

    @field_validator("loss_config", mode="before")
    @classmethod
    def _is_of_the_loss(cls, value: Any, info: ValidationInfo) -> Section:
        return _record_beside(info.data, "loss", value)

    def contradictions(self) -> Iterator[str]:
        if self.rescore_share and self.rollout_is.is_off:
            yield f"""rescore_share: was {self.rescore_share:g}, and rollout_is computes no ratio to
                tell apart; set rollout_is: metrics_only, or another preset"""
        if not (self.rl_loss_coef or self.echo_coef or self.has_other_terms or self.needs_values):
            yield """rl_loss_coef: was 0, and the loss has no other term, so nothing would be
                trained; set one, such as sft_coef or echo_coef"""
        if not self.rl_loss_coef and self.distillation is not None and not self.num_taught:
            yield """rl_loss_coef: was 0, and the advantage of distillation is in the policy loss
                alone, so teachers cannot act; leave it out, or set distillation.top_k"""

    @property
    def needs_reference(self) -> bool:
        """Whether any term compares with the reference policy."""
        return self.kl_loss.coef > 0 or self.kl_reward.coef > 0

    @property
    def needs_reference_logprobs(self) -> bool:
        """Whether a term needs the reference's log-probabilities of tokens; the exact KL needs
        hidden states instead."""
        return self.kl_reward.coef > 0 or (self.kl_loss.coef > 0 and not self.kl_loss.is_exact)

    @property
    def records_experts(self) -> bool:
        """Whether generators record the experts of each token."""
        return self.router_replay != "off"

    @property
    def reads_rewards(self) -> bool:
        """Whether the reward's advantage is part of a token's advantage."""
        return self.distillation is None or self.distillation.reward_coef > 0

    @property
    def has_teachers(self) -> bool:
        """Whether the learner holds teachers."""
        return self.distillation is not None and bool(self.distillation.in_learner)

    @property
    def has_other_terms(self) -> bool:
        """Whether the loss has terms of sampled tokens besides the policy loss."""
        return bool(self.kl_loss.coef or self.entropy_coef or self.sft_coef or self.num_taught)

    @property
    def num_taught(self) -> int:
        """Number of a teacher's candidates per token that the loss compares with."""
        return 0 if self.distillation is None else self.distillation.top_k

    @property
    def needs_values(self) -> bool:
        return self.advantage == "gae" and self.reads_rewards

    @property
    def needs_ratios(self) -> bool:
        """Whether the advantage needs the policy's log-probabilities first: to weight trajectories
        by their ratios, or to compare teachers with them."""
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
    def ratio_holds_correction(self) -> bool:
        """Whether the loss's own ratio is to the behavior policy, so weights would count it twice
        and are for metrics only. Rejected and vetoed tokens still have weight 0."""
        return self.proximal == "behavior" and self.loss not in RATIO_FREE_LOSSES

    @property
    def corrects_as_a_whole(self) -> bool:
        """Whether the correction of a token depends on other tokens of its update."""
        correction = self.rollout_is
        return (
            correction.normalize_by == "kept"
            or correction.second_moment is not None
            or (correction.batch_normalize and not self.ratio_holds_correction)
        )
