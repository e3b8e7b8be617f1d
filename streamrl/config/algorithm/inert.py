"""Settings that cannot act under the other ones, each with what would make it act.

Invariant: a setting listed here changes no update of the run, whatever its value. Set by hand it is
refused, unless to null, which switches it off; left alone it has its default, and the run's
config.yaml leaves it out.
"""

from collections.abc import Iterator
from typing import Any

from pydantic_core import InitErrorDetails, PydanticCustomError

from streamrl.config.algorithm.advantages import ADVANTAGE_SETTINGS
from streamrl.config.algorithm.losses import (
    LOSS_SETTINGS,
    PENALTY_SETTINGS,
    RATIO_SETTINGS,
    SEQUENCE_MEAN_LOSSES,
    SUM_NORM,
    SUM_NORM_SETTINGS,
)
from streamrl.config.algorithm.rollout_is import RolloutISSettings
from streamrl.config.algorithm.settings import AlgorithmSettings

_SEVERAL_UPDATES = "set learner.updates_per_batch or learner.epochs above 1"
_RATIO_IS_ONE = (
    "with one update a batch and algorithm.proximal recompute the ratio is always 1, so it cannot "
    f"act; {_SEVERAL_UPDATES}, or algorithm.proximal to behavior, loglinear or linear"
)
_VALUES_STAND = (
    "with one update a batch no value has moved when it is compared, so it cannot act; "
    + _SEVERAL_UPDATES
)
_NO_OTHER_TERM = (
    "{} is a mean over sequences whatever it says, and there is no other term, so it cannot act; "
    "set algorithm.kl_loss.coef, algorithm.entropy_coef, algorithm.sft_coef, algorithm.echo_coef "
    "or algorithm.distillation.top_k"
)
_NOT_SUM_NORM = (
    f"only {SUM_NORM} reads it, so it cannot act; set algorithm.loss_config.loss_agg_mode to that"
)
_NO_WEIGHTS = (
    "the veto makes weights 0, and threshold null switches weights off, so it cannot act; set "
    "algorithm.rollout_is.threshold"
)
_NO_NORMALIZED = (
    "threshold null or apply false switches weights off, so it cannot act; set "
    "algorithm.rollout_is.threshold, and apply true"
)
_NO_RATIOS = (
    "with threshold null, no rejection and no second_moment no ratio is computed, so it cannot "
    "act; set algorithm.rollout_is.threshold, and apply false for the ratios alone"
)
_NOT_RESCORED = (
    "with algorithm.rescore_share 0 engine mismatch and policy lag are not told apart, so it "
    "cannot act; set algorithm.rescore_share"
)
_NO_FACTOR = (
    "truncate caps a factor of the importance weights, and these are not in the loss, so it cannot "
    "act; set algorithm.rollout_is.mode=mask, which takes tokens out of the loss"
)
_AS_RECORDED = (
    "algorithm.advantage gdpo normalizes each reward as it was recorded, and leaves no sum of them "
    "to shape, so it cannot act; use another advantage, or give it a reward of its own"
)
_SHAPES_THE_SUM = (
    *("format_penalty", "truncated_penalty", "agentic", "norm_mean", "norm_std"),
    *("clip", "length", "whiten"),
)
_BY_PLACE = ("gae", "reinforce", "reinforce_plus_plus", "remax", "otb", "gigpo")
_SUM_ALONE = (
    "algorithm.advantage {} reads the sum of an episode's rewards alone, so it cannot act; "
    f"{', '.join(_BY_PLACE)} read where they stand"
)
_TEACHERS_ALONE = (
    "with algorithm.distillation.reward_coef 0 the advantage is that of the teachers alone, so it "
    "cannot act; set algorithm.distillation.reward_coef"
)
_NO_ADVANTAGE = (
    "with algorithm.distillation.top_k and reward_coef 0 every advantage is 0, so it cannot act; "
    "set algorithm.distillation.reward_coef"
)
_OF_ADVANTAGES = RATIO_SETTINGS - PENALTY_SETTINGS | {
    *("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "divergence_topk")
}
_OF_THE_REWARD = (*_SHAPES_THE_SUM, "placement")


def inert_settings(config: AlgorithmSettings, num_updates: int) -> Iterator[tuple[str, str, str]]:
    """Section and name of those that cannot act with so many updates a batch, set or not; and why,
    with what would make each act."""
    yield from (("loss_config", name, why) for name, why in _of_the_loss(config, num_updates))
    if not config.reads_rewards:
        records = {"advantage_config": config.advantage_config, "kl_reward": config.kl_reward}
        names = {name: type(record).model_fields for name, record in records.items()}
        for section, fields in {**names, "reward": _OF_THE_REWARD}.items():
            yield from ((section, name, _TEACHERS_ALONE) for name in fields)
    if config.needs_values and num_updates == 1:
        yield "value", "clip_range", _VALUES_STAND
    is_built_in = config.reads_rewards and config.advantage in ADVANTAGE_SETTINGS
    if is_built_in and config.advantage not in _BY_PLACE:
        yield "reward", "placement", _SUM_ALONE.format(config.advantage)
    if config.reads_rewards and config.advantage == "gdpo":
        shaping = (name for name in _SHAPES_THE_SUM if getattr(config.reward, name))
        yield from (("reward", name, _AS_RECORDED) for name in shaping)
        if config.kl_reward.coef:
            yield "kl_reward", "coef", _AS_RECORDED
    yield from (("rollout_is", name, why) for name, why in _of_rollout_is(config.rollout_is))
    if (why := _why_no_factor(config)) is not None:
        yield from (("rollout_is", name, why) for name in ("engine_threshold", "lag_threshold"))


def refusals(config: AlgorithmSettings, num_updates: int) -> Iterator[InitErrorDetails]:
    """One for each setting that cannot act and was set by hand."""
    for section, name, sentence in inert_settings(config, num_updates):
        record: Any = getattr(config, section)
        is_set = section in config.model_fields_set and name in record.model_fields_set
        value = getattr(record, name)
        if is_set and value is not None:
            error = PydanticCustomError("cannot_act", "{sentence}", {"sentence": sentence})
            yield InitErrorDetails(type=error, loc=("algorithm", section, name), input=value)


def _of_rollout_is(config: RolloutISSettings) -> Iterator[tuple[str, str]]:
    """A switch that is off is not listed: it may be spelled out."""
    if config.threshold is None:
        yield "veto_threshold", _NO_WEIGHTS
    if config.batch_normalize and not config.applies_weights:
        yield "batch_normalize", _NO_NORMALIZED
    if config.scale_lr and config.is_off:
        yield "scale_lr", _NO_RATIOS


def _why_no_factor(config: AlgorithmSettings) -> str | None:
    """Why bounds of engine mismatch and policy lag cannot act, if that is so."""
    correction = config.rollout_is
    if not config.rescore_share:
        return _NOT_RESCORED
    has_weights = correction.applies_weights and not config.ratio_holds_correction
    return None if has_weights or correction.zeroes_outside else _NO_FACTOR


def _of_the_loss(config: AlgorithmSettings, num_updates: int) -> Iterator[tuple[str, str]]:
    """Fields of the loss's record; nothing is known of a user's own loss."""
    if config.loss not in LOSS_SETTINGS:
        return
    if num_updates == 1 and config.proximal == "recompute":
        fields = LOSS_SETTINGS[config.loss].model_fields
        yield from ((name, _RATIO_IS_ONE) for name in fields if name in RATIO_SETTINGS)
    elif config.num_taught and not config.reads_rewards:
        fields = LOSS_SETTINGS[config.loss].model_fields
        yield from ((name, _NO_ADVANTAGE) for name in fields if name in _OF_ADVANTAGES)
    has_terms = config.has_other_terms or config.echo_coef > 0
    is_ignored = config.loss in SEQUENCE_MEAN_LOSSES and not has_terms
    if is_ignored:
        yield "loss_agg_mode", _NO_OTHER_TERM.format(config.loss)
    modes = {config.value.loss_agg_mode} if config.needs_values else set()
    if not is_ignored:
        modes |= {config.loss_config.loss_agg_mode}
    if SUM_NORM not in modes:
        yield from ((name, _NOT_SUM_NORM) for name in SUM_NORM_SETTINGS)
