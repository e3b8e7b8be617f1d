"""What an ablation varies: the values of settings, and named sets of settings from a file.

    --vary algorithm.rollout_is=off,token_is     one axis, each value a variant
    --variants FILE                              one axis: {NAME: {section.key: value, ...}, ...}

Invariant: an axis has at least one variant; with several axes every combination is run.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from streamrl.errors import ConfigError

_OF_EACH_RUN = {
    "run.seed": "give the seeds as --seeds 0,1,2",
    "run.folder": "every run has a folder in that of the ablation",
    "run.name": "every run is named after its values and its seed",
}


@dataclass(frozen=True)
class Variant:
    """`overrides` as `--set` takes them."""

    name: str
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class Axis:
    """`name` is the setting, or "variant" for those of a file."""

    name: str
    variants: tuple[Variant, ...]


def axes(vary: Sequence[str], file: str | None) -> tuple[Axis, ...]:
    """That of the file first.

    Raises:
        ConfigError: nothing is varied, or what is given cannot be read.
    """
    found = (*((_of_file(file),) if file else ()), *map(_of_setting, vary))
    if not found:
        raise ConfigError("give --vary SECTION.KEY=A,B,... or --variants FILE")
    overrides = (text for axis in found for one in axis.variants for text in one.overrides)
    for key in (text.partition("=")[0].strip() for text in overrides):
        if key in _OF_EACH_RUN:
            raise ConfigError(f"{key}: cannot be varied; {_OF_EACH_RUN[key]}")
    return found


def _of_setting(text: str) -> Axis:
    key, equals, values = text.partition("=")
    if not equals or not values:
        raise ConfigError(f"--vary {text}: must look like section.key=first,second")
    return Axis(key, tuple(Variant(value, (f"{key}={value}",)) for value in values.split(",")))


def _of_file(file: str) -> Axis:
    try:
        content = yaml.safe_load(Path(file).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--variants {file}: cannot be read: {error}") from error
    if not isinstance(content, dict) or not content:
        raise ConfigError(f"--variants {file}: must be a mapping of names to settings")
    for name, settings in content.items():
        if not isinstance(settings, dict):
            raise ConfigError(
                f"--variants {file}: {name} was {settings!r}; must be a mapping of settings, such "
                "as {algorithm.loss: vespo}"
            )
    return Axis(
        "variant",
        tuple(
            Variant(str(name), tuple(f"{key}={json.dumps(v)}" for key, v in settings.items()))
            for name, settings in content.items()
        ),
    )
