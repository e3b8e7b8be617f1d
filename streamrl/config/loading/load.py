"""From a YAML file, the environment and `--set` to a `RunConfig` that knows where values came from.

    defaults  <  FILE.yaml  <  STREAMRL__SECTION__KEY=value  <  --set section.key=value

Invariant: a value is read by YAML 1.2 rules wherever it stands, so `3e-6` is a number and `on` a
string; a key that stands twice is refused. A preset replaces what sources before its own say of its
choices; what its own says of them stands beside it.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from streamrl.config.algorithm.presets import CHOICES
from streamrl.config.loading.epochs import with_steps
from streamrl.config.loading.explain import explain
from streamrl.config.loading.sources import Setting, from_environment, from_file, from_override
from streamrl.config.run_config import RunConfig
from streamrl.config.secrets import without_secrets
from streamrl.errors import ConfigError


@dataclass(frozen=True)
class LoadedConfig:
    """A valid configuration; `origins` maps "section.key" to where it was set, if it was."""

    config: RunConfig
    origins: Mapping[str, str]


def load_config(
    path: Path | str,
    overrides: Iterable[str] = (),
    environment: Mapping[str, str] | None = None,
) -> LoadedConfig:
    """The configuration of the file, changed by the environment and by "section.key=value".

    Raises:
        ConfigError: unreadable, unknown or contradictory; one sentence per finding, none of which
            shows a password.
    """
    loaded, refusal = load_usable(path, overrides, environment)
    if refusal is not None:
        raise refusal
    assert loaded is not None, "what is not refused is usable"
    return loaded


def load_usable(
    path: Path | str,
    overrides: Iterable[str] = (),
    environment: Mapping[str, str] | None = None,
) -> tuple[LoadedConfig | None, ConfigError | None]:
    """As `load_config`, for a check that goes on: what is refused, and the configuration without
    it. Settings that are refused have their defaults there; None if too few are left.

    Raises:
        ConfigError: the file, a variable or an override cannot be read.
    """
    try:
        sources = [
            [*from_file(Path(path))],
            [*from_environment(os.environ if environment is None else environment)],
            [*map(from_override, overrides)],
        ]
        settings = reduce(_over, sources)
        tree: dict[str, Any] = reduce(with_setting, settings, {})
    except ConfigError as error:
        raise ConfigError(_without_secrets(error, path)) from None
    origins = {".".join(setting.path): setting.origin for setting in settings}
    try:
        tree, origins = with_steps(tree, origins)
        return LoadedConfig(RunConfig.model_validate(tree), origins), None
    except ConfigError as error:
        rest = _usable(tree, [("run", "total_epochs")])
        return None if rest is None else LoadedConfig(rest, origins), error
    except ValidationError as error:
        refusal = ConfigError(_without_secrets(explain(error, RunConfig, origins), path))
        rest = _usable(tree, [detail["loc"] for detail in error.errors()])
        return None if rest is None else LoadedConfig(rest, origins), refusal


def _over(below: Sequence[Setting], source: Sequence[Setting]) -> list[Setting]:
    """The settings of both; a preset that the source names makes the choices below it."""
    if any(setting.path == ("algorithm", "preset") and setting.value for setting in source):
        choices = {("algorithm", name) for name in CHOICES}
        below = [setting for setting in below if setting.path[:2] not in choices]
    return [*below, *source]


def _without_secrets(error: ConfigError, path: Path | str) -> str:
    """The sentence with the file's path, which may have an @, as it is."""
    file = str(Path(path))
    return file.join(map(without_secrets, str(error).split(file)))


def _usable(tree: Mapping[str, Any], refused: Sequence[tuple[int | str, ...]]) -> RunConfig | None:
    """The sections without what was refused, unless that is all of a section that must be given;
    whether they contradict each other is not looked at."""
    rest = reduce(_without, refused, tree)
    try:
        sections = {
            name: TypeAdapter[Any](field.annotation).validate_python(rest.get(name, field.default))  # type: ignore[arg-type]
            for name, field in RunConfig.model_fields.items()
        }
    except ValidationError:
        return None
    return RunConfig.model_construct(**sections)


def _without(tree: Mapping[str, Any], path: tuple[int | str, ...]) -> Mapping[str, Any]:
    """The tree without the value at the path, or without the last part of it that there is."""
    if not path or not isinstance(tree.get(str(path[0])), Mapping | str | int | float | list):
        return tree
    key, *below = str(path[0]), *path[1:]
    inner = tree[key]
    if isinstance(inner, Mapping) and below and below[0] in inner:
        return {**tree, key: _without(inner, tuple(below))}
    return {name: value for name, value in tree.items() if name != key}


def with_setting(tree: Mapping[str, Any], setting: Setting) -> dict[str, Any]:
    """The tree with the setting's value; the tree given stays as it is.

    Raises:
        ConfigError: a value stands where the setting has a section.
    """
    return _with(tree, setting.path, setting.value, setting.origin)


def _with(
    tree: Mapping[str, Any], path: tuple[str, ...], value: Any, origin: str
) -> dict[str, Any]:
    key, *rest = path
    if not rest:
        return {**tree, key: value}
    below = tree.get(key)
    if below is None:
        below = {}
    if not isinstance(below, Mapping):
        raise ConfigError(f"{origin}: {key} is {below!r} and has no keys below it")
    return {**tree, key: _with(below, tuple(rest), value, origin)}
