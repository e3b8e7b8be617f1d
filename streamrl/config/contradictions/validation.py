"""Settings of `validation` that do nothing, or cannot work, with others.

Each function returns a sentence that names both settings, or None.
"""

from typing import TYPE_CHECKING

from pydantic import ValidationError

from streamrl.errors import did_you_mean

if TYPE_CHECKING:
    from streamrl.config.run_config import RunConfig


def alike_samples(c: "RunConfig") -> str | None:
    v = c.validation
    if not v.every or v.num_samples == 1 or v.temperature > 0:
        return None
    return (
        f"validation.num_samples {v.num_samples} with validation.temperature 0 samples the same "
        "response each time: set a temperature, or num_samples to 1"
    )


def never_published(c: "RunConfig") -> str | None:
    every, publish_every = c.validation.every, c.weights.publish_every
    if every % publish_every == 0:
        return None
    return (
        f"validation.every {every} is no multiple of weights.publish_every {publish_every}: "
        "versions in between are not published, so no validator gets them"
    )


def more_prompts_than_held_out(c: "RunConfig") -> str | None:
    wanted, held_out = c.validation.num_prompts, c.data.num_eval_prompts
    if wanted is None or wanted <= held_out:
        return None
    return (
        f"validation.num_prompts {wanted} is more than data.num_eval_prompts {held_out}, and no "
        "others are held out"
    )


def bad_generator(c: "RunConfig") -> str | None:
    if names := c.validation.sampling_in_generator:
        return (
            f"validation.generator: {names[0]} has no effect there; set validation.{_own(names[0])}"
        )
    try:
        engine = c.validation.engine_settings(c.generator)
    except ValidationError as error:
        return f"validation.generator: {_sentence(error, tuple(type(c.generator).model_fields))}"
    if not c.validation.every or engine.url is None or engine.url != c.generator.url:
        return None
    return (
        f"validation.every {c.validation.every} needs an engine of its own, which keeps a version "
        f"while generators get newer ones, but {engine.url} is the server of the generators: name "
        f"another in validation.generator: {{{engine.engine}: {{url: ...}}}}"
    )


def early_stop_without_validation(c: "RunConfig") -> str | None:
    patience = c.validation.early_stop.patience
    if c.validation.every or not patience:
        return None
    return f"validation.early_stop.patience {patience} needs validations: set validation.every"


def best_without_validation(c: "RunConfig") -> str | None:
    checkpoint = c.learner.checkpoint
    if not checkpoint.keep_best or not checkpoint.is_best_validated:
        return None
    if not c.validation.every:
        return f"learner.checkpoint.best_by {checkpoint.best_by} needs validation.every"
    longer = max(checkpoint.every, c.validation.every)
    if longer % min(checkpoint.every, c.validation.every) == 0:
        return None
    return (
        f"validation.every {c.validation.every} and learner.checkpoint.every {checkpoint.every} "
        "rarely meet, and only a validated checkpoint can be the best: make one a multiple of the "
        "other"
    )


def agents_of_others(c: "RunConfig") -> str | None:
    agents = [entry.setting for entry in c.entries if entry.environment == "agent"]
    if not c.validation.every or not agents:
        return None
    return (
        f"validation.every {c.validation.every} cannot validate {agents[0]} agent: agents from "
        "elsewhere come to generators, not to a validator; set validation.every=0"
    )


def _own(name: str) -> str:
    return "num_samples" if name == "group_size" else name


def _sentence(error: ValidationError, allowed: tuple[str, ...]) -> str:
    first = error.errors()[0]
    name = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        return f"generator has no {name!r}; {did_you_mean(name, allowed)}"
    return f"{name} was {first['input']!r}: {first['msg']}"
