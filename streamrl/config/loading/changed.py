"""A configuration that is read back, with other settings.

Invariant: what the configuration has by default counts as not given, so another choice (an
advantage, a loss, a preset) comes with its own numbers, not with those of the old one. Called by
what takes a run's configuration and tries others.
"""

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

from pydantic import ValidationError

from streamrl.config.algorithm import AlgorithmSettings
from streamrl.config.algorithm.presets import CHOICES
from streamrl.config.loading.explain import explain
from streamrl.config.loading.load import with_setting
from streamrl.config.loading.sources import from_override
from streamrl.config.run_config import RunConfig


def with_overrides(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """The configuration changed by "section.key=value". A preset that is named replaces all that
    presets stand for.

    Raises:
        ConfigError: unknown, or in contradiction to the rest.
    """
    settings = [from_override(text) for text in overrides]
    given = _given(config.algorithm)
    if any(setting.path == ("algorithm", "preset") for setting in settings):
        given = {name: value for name, value in given.items() if name not in CHOICES}
    tree = {**config.model_dump(mode="json"), "algorithm": given}
    tree = reduce(with_setting, settings, tree)
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        origins = {".".join(setting.path): setting.origin for setting in settings}
        raise explain(error, RunConfig, origins) from error


def _given(algorithm: AlgorithmSettings) -> Mapping[str, Any]:
    """What makes the same section beside the preset, the choices and the defaults of both."""
    choices = {"advantage": algorithm.advantage, "loss": algorithm.loss}
    of_preset, of_choices = (
        AlgorithmSettings.model_validate({"preset": algorithm.preset, **more}).model_dump(
            mode="json"
        )
        for more in ({}, choices)
    )
    values = {
        name: value if name == "rollout_is" else _beyond(value, of_choices[name])
        for name, value in algorithm.model_dump(mode="json").items()
        if value != of_choices[name]
    }
    chosen = {name: value for name, value in choices.items() if value != of_preset[name]}
    return {"preset": algorithm.preset, **chosen, **values}


def _beyond(value: Any, default: Any) -> Any:
    """Of a section, the keys that differ from the default's."""
    if not isinstance(value, Mapping) or not isinstance(default, Mapping):
        return value
    return {
        key: _beyond(item, default.get(key))
        for key, item in value.items()
        if key not in default or item != default[key]
    }
