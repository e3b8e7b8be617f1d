"""From a YAML file, the environment and `--set` to a `RunConfig` that knows where values came from.

    defaults  <  FILE.yaml  <  STREAMRL__SECTION__KEY=value  <  --set section.key=value

Invariant: a value is read by YAML 1.2 rules wherever it stands, so `3e-6` is a number and `on` a
string; a key that stands twice is refused.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from streamrl.config.loading.explain import explain
from streamrl.config.loading.sources import from_environment, from_file, from_override
from streamrl.config.run_config import RunConfig
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
        ConfigError: unreadable, unknown or contradictory; one sentence per finding.
    """
    settings = [
        *from_file(Path(path)),
        *from_environment(os.environ if environment is None else environment),
        *(from_override(text) for text in overrides),
    ]
    tree: dict[str, Any] = {}
    for setting in settings:
        tree = _with(tree, setting.path, setting.value, setting.origin)
    origins = {".".join(setting.path): setting.origin for setting in settings}
    try:
        return LoadedConfig(RunConfig.model_validate(tree), origins)
    except ValidationError as error:
        raise explain(error, RunConfig, origins) from error


def _with(
    tree: Mapping[str, Any], path: tuple[str, ...], value: Any, origin: str
) -> dict[str, Any]:
    """The tree with the value at the path; the tree given stays as it is."""
    key, *rest = path
    if not rest:
        return {**tree, key: value}
    below = tree.get(key)
    if below is None:
        below = {}
    if not isinstance(below, Mapping):
        raise ConfigError(f"{origin}: {key} is {below!r} and has no keys below it")
    return {**tree, key: _with(below, tuple(rest), value, origin)}
