"""Settings that were given and that nothing reads beside the others of this configuration.

A new one is a line in `_idle`, or in `_refused` where no other run could mean it: whether it is
so, the settings, and what would make them act. A setting with its default is not said, whoever has
written it. What cannot act in the algorithm is refused by the configuration itself, see
`streamrl.config.algorithm.inert`.
"""

from collections.abc import Iterator
from operator import attrgetter
from typing import Any

from streamrl.config import RunConfig
from streamrl.findings import CONFIGURATION, Finding

_ENGINES = ("hf", "vllm", "sglang")
_VALIDATION = (
    *("at_start", "at_end", "end_wait_s", "num_samples", "num_prompts", "temperature", "top_p"),
    *("top_k", "max_new_tokens", "pass_reward", "generator", "keep"),
)


def check_idle(config: RunConfig) -> Iterator[Finding]:
    """A warning for what may be meant for another engine, or for a run that goes on."""
    yield from _check_profiler(config)
    for finding, table in ((CONFIGURATION.problem, _refused), (CONFIGURATION.warning, _idle)):
        for is_idle, names, why in table(config):
            for name in names if is_idle else ():
                if (value := attrgetter(name)(config)) != _default(config, name):
                    yield finding(f"{name}: was {value!r}, and nothing reads it: {why}")


def _default(config: RunConfig, name: str) -> Any:
    place, _, last = name.rpartition(".")
    section = attrgetter(place)(config)
    return type(section).model_fields[last].get_default(call_default_factory=True)


def _below(place: str, names: str) -> tuple[str, ...]:
    return tuple(f"{place}.{name}" for name in names.split())


def _check_profiler(config: RunConfig) -> Iterator[Finding]:
    last = config.run.max_steps
    if late := [step for step in config.learner.profiler.steps if step > last]:
        yield CONFIGURATION.warning(
            f"learner.profiler.steps: step {late[0]} has no trace: run.max_steps {last} is the "
            "last one"
        )


def _refused(c: RunConfig) -> Iterator[tuple[bool, tuple[str, ...], str]]:
    agentic = c.algorithm.reward.agentic
    yield (
        {entry.environment for entry in c.entries} == {"single_turn"},
        ("algorithm.reward.format_penalty",),
        "environment single_turn has no form that a turn could break; the others have one",
    )
    yield (
        agentic is not None and agentic.grouping == "inductive" and len(c.entries) == 1,
        ("algorithm.reward.agentic.grouping",),
        "the run has one environment, for which batch does the same",
    )


def _idle(c: RunConfig) -> Iterator[tuple[bool, tuple[str, ...], str]]:
    learner, tracking, algorithm = c.learner, c.tracking, c.algorithm
    yield (
        not learner.profiler.steps,
        _below("learner.profiler", "ranks memory"),
        "learner.profiler.steps is empty",
    )
    yield (
        not c.is_validated,
        tuple(f"validation.{name}" for name in _VALIDATION),
        "the run is not validated; set validation.every",
    )
    yield (
        not c.validation.early_stop.patience,
        ("validation.early_stop.min_improvement",),
        "validation.early_stop.patience is 0",
    )
    yield (
        c.is_validated and not c.validation.at_end,
        ("validation.end_wait_s",),
        "validation.at_end is false",
    )
    yield from _of_generator(c)
    yield from _of_transport(c)
    yield c.data.truncation != "filter", ("data.filter_workers",), "data.truncation is not filter"
    has_dashboard = tracking.tensorboard or tracking.trackio or tracking.wandb != "off"
    yield (
        not has_dashboard,
        ("tracking.samples.table_every",),
        "tracking.tensorboard, wandb and trackio are off",
    )
    yield (
        not tracking.trackio and tracking.wandb == "off",
        ("tracking.project",),
        "tracking.wandb and trackio are off",
    )
    yield (
        not tracking.prometheus.enabled,
        _below("tracking.prometheus", "host port"),
        "tracking.prometheus.enabled is false",
    )
    yield not algorithm.kl_loss.coef, ("algorithm.kl_loss.kind",), "algorithm.kl_loss.coef is 0"
    yield (
        not algorithm.kl_reward.coef,
        _below("algorithm.kl_reward", "kind controller target horizon"),
        "algorithm.kl_reward.coef is 0",
    )


def _of_generator(c: RunConfig) -> Iterator[tuple[bool, tuple[str, ...], str]]:
    engines = {c.generator.engine}
    if c.is_validated:
        engines |= {c.validation.engine_settings(c.generator).engine}
    for name in _ENGINES:
        fields = type(getattr(c.generator, name)).model_fields
        yield (
            engines <= {*_ENGINES} - {name},
            tuple(f"generator.{name}.{field}" for field in fields),
            f"generator.engine is {c.generator.engine}",
        )
    yield (
        not c.generator.oversample.num_siblings,
        ("generator.oversample.keep",),
        "generator.oversample.num_siblings is 0",
    )


def _of_transport(c: RunConfig) -> Iterator[tuple[bool, tuple[str, ...], str]]:
    buffer, weights = c.buffer, c.weights
    has_journal = buffer.binds_url and buffer.journal
    yield (
        not has_journal,
        ("buffer.durability",),
        "only the journal of zmq:// waits for the disk, and the run has none",
    )
    yield not buffer.record, ("buffer.record_max_bytes",), "buffer.record is false"
    yield (
        not buffer.url.startswith("redis"),
        ("buffer.password_file",),
        "buffer.url is not redis://",
    )
    yield (
        weights.transport != "broadcast",
        _below("weights", "backend catch_up"),
        f"weights.transport is {weights.transport}",
    )
    yield (
        not weights.delta and weights.store is None,
        ("weights.full_every",),
        "weights.delta is false, and there is no weights.store",
    )
