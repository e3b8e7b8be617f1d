"""What an ablation varies, and the table of two varied things.

    --vary algorithm.rollout_is=off,token_is     one axis, each value a variant
    --variants FILE                              one axis: {NAME: {section.key: value, ...}, ...}

Invariant: an axis has at least one variant; with several axes every combination is run.
The table has the final reward by row and column, and its share of the first cell, which is the
reference, such as no correction at lag 0: on policy.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

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


def grid(axes: Sequence[Axis], rewards: Mapping[str, Sequence[float]]) -> Iterator[str]:
    """The lines of the table; `rewards` are those of each seed, by the name of the combination."""
    rows, columns = axes
    reference = fmean(rewards[name_of(rows.variants[0].name, columns.variants[0].name)])
    names = [column.name for column in columns.variants]
    yield f"| final reward (spread), % of the first | {' | '.join(names)} |"
    yield "|---" * (1 + len(names)) + "|"
    for row in rows.variants:
        cells = (_cell(rewards[name_of(row.name, name)], reference) for name in names)
        yield f"| {row.name} | {' | '.join(cells)} |"


def name_of(*names: str) -> str:
    """Of a combination."""
    return ", ".join(names)


def _cell(rewards: Sequence[float], reference: float) -> str:
    spread = stdev(rewards) if len(rewards) > 1 else 0.0
    share = f"{100 * fmean(rewards) / reference:.0f} %" if reference else "-"
    return f"{fmean(rewards):.3f} ({spread:.3f}), {share}"
