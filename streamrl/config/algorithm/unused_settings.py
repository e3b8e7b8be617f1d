"""Settings that have no effect under the others, each with what would give it one.

Invariant: a setting listed here changes no update of the run, whatever its value. If set by hand it
is refused, except to null, which switches it off; otherwise it has its default and is omitted from
the run's config.yaml.
"""

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, TypeAlias

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
from streamrl.config.algorithm.settings import AlgorithmSettings
from streamrl.config.section import unfolded

_Row: TypeAlias = tuple[str, Iterable[str], str]
"""A section, names of settings in it, and why they have no effect."""
_SEVERAL_UPDATES = "set learner.updates_per_batch or learner.epochs above 1"
_SHAPES_THE_SUM = (
    *("format_penalty", "truncated_penalty", "agentic", "norm_mean", "norm_std"),
    *("clip", "length", "whiten"),
)
_BY_PLACE = ("gae", "reinforce", "reinforce_plus_plus", "remax", "otb", "gigpo")
_OF_ADVANTAGES = RATIO_SETTINGS - PENALTY_SETTINGS | {
    *("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "divergence_topk")
}


def unused_settings(config: AlgorithmSettings, num_updates: int) -> Iterator[tuple[str, str, str]]:
    """Section, name and reason of each setting that has no effect with so many updates per batch,
    whether it is set or not; the reason says what would give it one."""
    rows = (
        _of_the_loss(config, num_updates),
        _of_rewards(config),
        _of_values(config, num_updates),
        _of_rollout_is(config),
    )
    for section, names, why in chain(*rows):
        yield from ((section, name, unfolded(why)) for name in names)


def refusals(config: AlgorithmSettings, num_updates: int) -> Iterator[InitErrorDetails]:
    """A sentence for each setting without effect that was set by hand."""
    for section, name, sentence in unused_settings(config, num_updates):
        record: Any = getattr(config, section)
        is_set = section in config.model_fields_set and name in record.model_fields_set
        value = getattr(record, name)
        if is_set and value is not None:
            error = PydanticCustomError("cannot_act", "{sentence}", {"sentence": sentence})
            yield InitErrorDetails(type=error, loc=("algorithm", section, name), input=value)


def _of_the_loss(config: AlgorithmSettings, num_updates: int) -> Iterator[_Row]:
    """Nothing is known about a user's own loss."""
    if config.loss not in LOSS_SETTINGS:
        return
    numbers = LOSS_SETTINGS[config.loss].model_fields
    if num_updates == 1 and config.proximal == "recompute":
        why = f"""with one update a batch and algorithm.proximal recompute the ratio is always 1, so
            it cannot act; {_SEVERAL_UPDATES}, or algorithm.proximal to behavior, loglinear or
            linear"""
        yield "loss_config", [name for name in numbers if name in RATIO_SETTINGS], why
    elif config.num_taught and not config.reads_rewards:
        why = """with algorithm.distillation.top_k and reward_coef 0 every advantage is 0, so it
            cannot act; set algorithm.distillation.reward_coef"""
        yield "loss_config", [name for name in numbers if name in _OF_ADVANTAGES], why
    has_terms = config.has_other_terms or config.echo_coef > 0
    is_ignored = config.loss in SEQUENCE_MEAN_LOSSES and not has_terms
    if is_ignored:
        why = f"""{config.loss} is a mean over sequences whatever it says, and there is no other
            term, so it cannot act; set algorithm.kl_loss.coef, algorithm.entropy_coef,
            algorithm.sft_coef, algorithm.echo_coef or algorithm.distillation.top_k"""
        yield "loss_config", ["loss_agg_mode"], why
    modes = {config.value.loss_agg_mode} if config.needs_values else set()
    if not is_ignored:
        modes |= {config.loss_config.loss_agg_mode}
    if SUM_NORM not in modes:
        why = f"""only {SUM_NORM} reads it, so it cannot act; set
            algorithm.loss_config.loss_agg_mode to that"""
        yield "loss_config", SUM_NORM_SETTINGS, why


def _of_rewards(config: AlgorithmSettings) -> Iterator[_Row]:
    if not config.reads_rewards:
        why = """with algorithm.distillation.reward_coef 0 the advantage is that of the teachers
            alone, so it cannot act; set algorithm.distillation.reward_coef"""
        yield "advantage_config", type(config.advantage_config).model_fields, why
        yield "kl_reward", type(config.kl_reward).model_fields, why
        yield "reward", (*_SHAPES_THE_SUM, "placement"), why
        return
    if config.advantage in ADVANTAGE_SETTINGS and config.advantage not in _BY_PLACE:
        why = f"""algorithm.advantage {config.advantage} reads the sum of an episode's rewards
            alone, so it cannot act; {", ".join(_BY_PLACE)} read where they stand"""
        yield "reward", ["placement"], why
    if config.advantage == "gdpo":
        why = """algorithm.advantage gdpo normalizes each reward as it was recorded, and leaves no
            sum of them to shape, so it cannot act; use another advantage, or give it a reward of
            its own"""
        yield "reward", [name for name in _SHAPES_THE_SUM if getattr(config.reward, name)], why
        yield "kl_reward", ["coef"] if config.kl_reward.coef else [], why


def _of_values(config: AlgorithmSettings, num_updates: int) -> Iterator[_Row]:
    if config.needs_values and num_updates == 1:
        why = f"""with one update a batch no value has moved when it is compared, so it cannot act;
            {_SEVERAL_UPDATES}"""
        yield "value", ["clip_range"], why


def _of_rollout_is(config: AlgorithmSettings) -> Iterator[_Row]:
    """A switch that is off is not listed: writing it out is harmless."""
    correction = config.rollout_is
    if correction.threshold is None:
        why = """the veto makes weights 0, and threshold null switches weights off, so it cannot
            act; set algorithm.rollout_is.threshold"""
        yield "rollout_is", ["veto_threshold"], why
    if correction.batch_normalize and not correction.applies_weights:
        why = """threshold null or apply false switches weights off, so it cannot act; set
            algorithm.rollout_is.threshold, and apply true"""
        yield "rollout_is", ["batch_normalize"], why
    if correction.scale_lr and correction.is_off:
        why = """with threshold null, no rejection and no second_moment no ratio is computed, so it
            cannot act; set algorithm.rollout_is.threshold, and apply false for the ratios alone"""
        yield "rollout_is", ["scale_lr"], why
    has_weights = correction.applies_weights and not config.ratio_holds_correction
    if not config.rescore_share:
        why = """with algorithm.rescore_share 0 engine mismatch and policy lag are not told apart,
            so it cannot act; set algorithm.rescore_share"""
        yield "rollout_is", ["engine_threshold", "lag_threshold"], why
    elif not has_weights and not correction.zeroes_outside:
        why = """truncate caps a factor of the importance weights, and these are not in the loss, so
            it cannot act; set algorithm.rollout_is.mode=mask, which takes tokens out of the loss"""
        yield "rollout_is", ["engine_threshold", "lag_threshold"], why
