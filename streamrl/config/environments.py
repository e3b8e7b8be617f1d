"""`environments`: those of a run with every default filled in, or the one that `generator` names;
and what says which prompt each index of the run is: settings, and the rows of the sources.

Invariant: a run has at least one entry, and no two of them have one name. Two configurations with
the same settings of prompts, and the same rows, have the same prompt at each index. A setting that
cannot move a prompt is not among them, so a run may go on with another value of it.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from msgspec import Struct
from pydantic import Field

from streamrl.config.data import DataSettings
from streamrl.config.section import Positive, PositiveNumber, Section, SomeOf, some_of
from streamrl.data_files import fingerprint, has_rows
from streamrl.user_code import is_user_code

if TYPE_CHECKING:
    from streamrl.config.run_config import RunConfig


class EnvironmentSettings(Section):
    """One of several environments, which are mixed by weight."""

    name: Annotated[str, Field(min_length=1)]
    """Name of the environment in metrics, samples and reward normalization."""
    environment: str
    """The environment, as in `generator.environment`."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the environment."""
    weight: PositiveNumber = 1.0
    """Share of the prompts, relative to the other entries."""
    group_size: Positive | None = None
    """Episodes per prompt; null: `generator.group_size`."""
    max_trajectories: Positive | None = None
    """Most episodes of this environment among `learner.groups_per_step` consecutive prompts."""
    reward: str | None = None
    """Null: `data.reward`."""
    reward_kwargs: dict[str, Any] | None = None
    """Null: none, or `data.reward_kwargs` if `reward` is null too."""
    data: Annotated[dict[str, Any], SomeOf(DataSettings)] = Field(default_factory=dict)
    """Settings of its prompts that differ from `data`."""


# The renderer and the evaluation are one for all entries, and the reward has settings of its own.
_OF_THE_RUN = {
    name: f"is one for the whole run: set data.{name}"
    for name in (
        *("chat_template", "tool_parser", "tool_schemas", "system_prompt", "max_prompt_length"),
        *("truncation", "num_eval_prompts", "changed", "first_prompt_index"),
    )
} | {name: f"stands beside data, as {name} of the entry" for name in ("reward", "reward_kwargs")}


@dataclass(frozen=True)
class EnvironmentEntry:
    """One environment of the run."""

    name: str
    environment: str
    kwargs: Mapping[str, Any]
    group_size: int
    data: DataSettings
    """Its prompts and its reward."""
    weight: float = 1.0
    max_trajectories: int | None = None
    place: str = ""
    """Prefix of its settings, such as "environments.0."; "" for the environment of `generator`."""

    @property
    def setting(self) -> str:
        """The setting that names the environment."""
        return f"{self.place or 'generator.'}environment"

    @property
    def kwargs_setting(self) -> str:
        """The setting that has its arguments."""
        return f"{self.place}kwargs" if self.place else "generator.environment_kwargs"

    @property
    def max_groups(self) -> int | None:
        """Most prompts that it plays among `learner.groups_per_step` consecutive ones."""
        return None if self.max_trajectories is None else self.max_trajectories // self.group_size


def entries_of(config: "RunConfig") -> tuple[EnvironmentEntry, ...]:
    """The entries in order. Raises ValidationError if `data` of an entry is refused."""
    if config.environments:
        return tuple(_entry(config, i, entry) for i, entry in enumerate(config.environments))
    generator = config.generator
    alone = EnvironmentEntry(
        name=generator.environment,
        environment=generator.environment,
        kwargs=generator.environment_kwargs,
        group_size=generator.group_size,
        data=config.data,
    )
    return (alone,)


def _entry(config: "RunConfig", index: int, settings: EnvironmentSettings) -> EnvironmentEntry:
    return EnvironmentEntry(
        name=settings.name,
        environment=settings.environment,
        kwargs=settings.kwargs,
        weight=settings.weight,
        group_size=settings.group_size or config.generator.group_size,
        max_trajectories=settings.max_trajectories,
        data=_data(config.data, index, settings),
        place=f"environments.{index}.",
    )


def _data(data: DataSettings, index: int, settings: EnvironmentSettings) -> DataSettings:
    """The run's `data` with the settings of the entry, and without its rewards if the entry has its
    own."""
    values = data.model_dump(exclude_unset=True)
    if settings.reward is not None or "rewards" in settings.data:
        for name in ("reward", "reward_kwargs", "rewards"):
            values.pop(name, None)
    values |= settings.data
    if settings.reward is not None:
        values |= {"reward": settings.reward, "reward_kwargs": settings.reward_kwargs or {}}
    elif settings.reward_kwargs is not None:
        values["reward_kwargs"] = settings.reward_kwargs
    place = ("environments", index, "data")
    return some_of(DataSettings, values, place, settings.data, _OF_THE_RUN)


_PromptSetting: TypeAlias = tuple[str, str]
"""The name of a setting, and its value in readable form."""

# What a prompt's tokens are made of: of the run, of an entry, and of one of its sources.
_MEASURED = ("max_prompt_length", "chat_template", "system_prompt")
_MEASURED_OF_ENTRY = ("prompt_key", "prompt_template", "image_key", "video_key")
_MEASURED_OF_SOURCE = ("prompt_key", "prompt_template")


class SourceRows(Struct, frozen=True):
    """The rows of one source; `setting` is the setting that names it."""

    setting: str
    path: str
    num_rows: int
    sha256: str


def rows_of(config: "RunConfig") -> tuple[SourceRows, ...]:
    """The rows of all sources that are data sets. Reads all of their files. Raises ConfigError if
    one cannot be read."""
    return tuple(
        SourceRows(
            name,
            source.path,
            *fingerprint(name, source.path, subset=source.subset, split=source.split),
        )
        for entry in config.entries
        for name in (f"{entry.place}data.source",)
        for source in entry.data.sources
        if has_rows(source.path)
    )


def reading_of(config: "RunConfig") -> str:
    """A digest of those settings that determine how rows become prompts."""
    settings = [
        entry.data.model_dump(mode="json", exclude={"first_prompt_index"})
        for entry in config.entries
    ]
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def first_difference(then: "RunConfig", now: "RunConfig") -> tuple[str, str, str] | None:
    """The first setting that gives the two configurations different prompts, with its values; None
    if there is none."""
    pairs = zip(_settings_of(then), _settings_of(now), strict=False)
    return next(((new[0], old[1], new[1]) for old, new in pairs if old[1] != new[1]), None)


def _settings_of(config: "RunConfig") -> Iterator[_PromptSetting]:
    """The lists of two configurations are comparable up to the first difference."""
    entries = config.entries
    yield "run.seed", str(config.run.seed)
    yield "environments", str(len(entries))
    if len(entries) > 1:
        yield from _mixture(config)
    for entry in entries:
        yield from _sources(entry)
        if _is_finite(entry.data):
            curriculum = entry.data.curriculum
            yield f"{entry.place}data.shuffle", _text(entry.data.shuffle)
            yield f"{entry.place}data.curriculum", _text(curriculum and curriculum.model_dump())
    if any(_is_finite(entry.data) for entry in entries):
        yield from _filter(config)


def _mixture(config: "RunConfig") -> Iterator[_PromptSetting]:
    """Settings that decide which entry plays a prompt."""
    batch = config.learner.groups_per_step
    yield "learner.groups_per_step", str(batch)
    for entry in config.entries:
        limit = batch if entry.max_groups is None else min(entry.max_groups, batch)
        yield f"{entry.place}weight", str(entry.weight)
        yield f"{entry.place}max_trajectories / group_size", str(limit)


def _sources(entry: EnvironmentEntry) -> Iterator[_PromptSetting]:
    """The data sets and streams of an entry, and how they are mixed."""
    sources, name = entry.data.sources, f"{entry.place}data.source"
    paths = (source.path for source in sources)
    yield name, ", ".join(os.path.abspath(path) if Path(path).exists() else path for path in paths)
    is_mixed = any(source.weight is not None for source in sources)
    for i, source in enumerate(sources):
        weight = 1.0 if source.weight is None else source.weight
        is_alone = isinstance(entry.data.source, str)
        yield f"{name}.{i}.weight", str(weight) if is_mixed else "null"
        yield f"{name}.{i}.subset", _text(source.subset)
        yield f"{name}.{i}.split", _text(source.split)
        yield f"{name}_kwargs" if is_alone else f"{name}.{i}.kwargs", _text(source.kwargs)


def _is_finite(data: DataSettings) -> bool:
    """Whether one of its sources may be a data set, whose rows are read in an order."""
    return any(has_rows(source.path) or is_user_code(source.path) for source in data.sources)


def _filter(config: "RunConfig") -> Iterator[_PromptSetting]:
    """Settings that decide which rows are read; other kinds of truncation keep all of them."""
    is_filter = config.data.truncation == "filter"
    yield "data.truncation", "filter" if is_filter else "another than filter"
    if not is_filter:
        return
    for name in _MEASURED:
        yield f"data.{name}", str(getattr(config.data, name))
    for entry in config.entries:
        for name in _MEASURED_OF_ENTRY:
            yield f"{entry.place}data.{name}", str(getattr(entry.data, name))
        for i, source in enumerate(entry.data.sources):
            for name in _MEASURED_OF_SOURCE:
                yield f"{entry.place}data.source.{i}.{name}", str(getattr(source, name))


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)
