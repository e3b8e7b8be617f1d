"""Settings that were given but have no effect in this configuration.

A new case is a line in `_unused`, or in `_refused` if it cannot be meant for any run: the
condition, the settings, and what would make them effective. A setting at its default is not
reported, even if it was written. Settings of the algorithm without effect are refused by the
configuration itself; see `streamrl.config.algorithm.unused_settings`.
"""

from collections.abc import Iterator
from operator import attrgetter
from typing import Any, TypeAlias

from streamrl.config import RunConfig
from streamrl.findings import CONFIGURATION, Finding

_ENGINES = ("hf", "vllm", "sglang")
_VALIDATION = (
    "at_start at_end end_wait_s num_samples num_prompts temperature top_p top_k max_new_tokens "
    "pass_reward generator keep"
)
_Line: TypeAlias = tuple[bool, str, str, str]
"""The condition, the section, its settings, and why."""


def check_unused_settings(config: RunConfig) -> Iterator[Finding]:
    """Check for settings that nothing reads: a warning, since they may be meant for another engine
    or for the run's continuation; a problem for those of `_refused`."""
    last = config.run.max_steps
    if late := [step for step in config.learner.profiler.steps if step > last]:
        yield CONFIGURATION.warning(
            f"learner.profiler.steps: step {late[0]} has no trace: run.max_steps {last} is the "
            "last one"
        )
    for finding, table in ((CONFIGURATION.problem, _refused), (CONFIGURATION.warning, _unused)):
        for is_unused, place, names, why in table(config):
            section = attrgetter(place)(config) if is_unused else None
            for name in names.split() if is_unused else ():
                if (value := getattr(section, name)) != default_of(section, name):
                    sentence = f"{place}.{name}: was {value!r}, and nothing reads it: {why}"
                    yield finding(sentence)


def default_of(section: Any, name: str) -> Any:
    return type(section).model_fields[name].get_default(call_default_factory=True)


def _refused(c: RunConfig) -> Iterator[_Line]:
    agentic, is_alone = c.algorithm.reward.agentic, len(c.entries) == 1
    is_single_turn = {entry.environment for entry in c.entries} == {"single_turn"}
    why = "environment single_turn has no form that a turn could break; the others have one"
    yield is_single_turn, "algorithm.reward", "format_penalty", why
    is_inductive = agentic is not None and agentic.grouping == "inductive"
    why = "the run has one environment, for which batch does the same"
    yield is_alone and is_inductive, "algorithm.reward.agentic", "grouping", why


def _unused(c: RunConfig) -> Iterator[_Line]:
    tracking, algorithm, early_stop = c.tracking, c.algorithm, c.validation.early_stop
    why = "learner.profiler.steps is empty"
    yield not c.learner.profiler.steps, "learner.profiler", "ranks memory", why
    why = "the run is not validated; set validation.every"
    yield not c.is_validated, "validation", _VALIDATION, why
    why = "validation.early_stop.patience is 0"
    yield not early_stop.patience, "validation.early_stop", "min_improvement", why
    is_unawaited = c.is_validated and not c.validation.at_end
    yield is_unawaited, "validation", "end_wait_s", "validation.at_end is false"
    yield from _of_generator(c)
    yield from _of_transport(c)
    yield c.data.truncation != "filter", "data", "filter_workers", "data.truncation is not filter"
    has_dashboard = tracking.trackio or tracking.wandb != "off"
    why = "tracking.tensorboard, wandb and trackio are off"
    yield not (has_dashboard or tracking.tensorboard), "tracking.samples", "table_every", why
    yield not has_dashboard, "tracking", "project", "tracking.wandb and trackio are off"
    why = "tracking.prometheus.enabled is false"
    yield not tracking.prometheus.enabled, "tracking.prometheus", "host port", why
    why = "algorithm.kl_loss.coef is 0"
    yield not algorithm.kl_loss.coef, "algorithm.kl_loss", "kind", why
    names, why = "kind controller target horizon", "algorithm.kl_reward.coef is 0"
    yield not algorithm.kl_reward.coef, "algorithm.kl_reward", names, why


def _of_generator(c: RunConfig) -> Iterator[_Line]:
    engines, why = {c.generator.engine}, f"generator.engine is {c.generator.engine}"
    if c.is_validated:
        engines |= {c.validation.engine_settings(c.generator).engine}
    for name in _ENGINES:
        fields = " ".join(type(getattr(c.generator, name)).model_fields)
        yield engines <= {*_ENGINES} - {name}, f"generator.{name}", fields, why
    why = "generator.oversample.num_siblings is 0"
    yield not c.generator.oversample.num_siblings, "generator.oversample", "keep", why


def _of_transport(c: RunConfig) -> Iterator[_Line]:
    buffer, weights = c.buffer, c.weights
    why = "only the journal of zmq:// waits for the disk, and the run has none"
    yield not (buffer.binds_url and buffer.journal), "buffer", "durability", why
    yield not buffer.record, "buffer", "record_max_bytes", "buffer.record is false"
    is_elsewhere = not buffer.url.startswith("redis")
    yield is_elsewhere, "buffer", "password_file", "buffer.url is not redis://"
    why = f"weights.transport is {weights.transport}"
    yield weights.transport != "broadcast", "weights", "backend catch_up", why
    why = "weights.delta is false, and there is no weights.store"
    yield not weights.delta and weights.store is None, "weights", "full_every", why
