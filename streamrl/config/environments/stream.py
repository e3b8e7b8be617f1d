"""What says which prompt each index of a run is: settings, and the rows of its sources.

Invariant: two configurations with the same settings here, and the same rows, have the same prompt
at each index. A setting that cannot move a prompt is not among them, so a run may go on with
another value of it.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from msgspec import Struct

from streamrl.config.data import DataSettings
from streamrl.config.environments.entries import EnvironmentEntry
from streamrl.data_files import fingerprint, has_rows
from streamrl.user_code import is_user_code

if TYPE_CHECKING:
    from streamrl.config.run_config import RunConfig

Setting: TypeAlias = tuple[str, str]
"""Its name, and its value as a person reads it."""

# What a prompt's tokens are made of: of the run, of an entry, and of one of its sources.
_MEASURED = ("max_prompt_length", "chat_template", "system_prompt")
_MEASURED_OF_ENTRY = ("prompt_key", "prompt_template", "image_key", "video_key")
_MEASURED_OF_SOURCE = ("prompt_key", "prompt_template")


class SourceRows(Struct, frozen=True):
    """The rows of one source, which `setting` names."""

    setting: str
    path: str
    num_rows: int
    sha256: str


def rows_of(config: "RunConfig") -> tuple[SourceRows, ...]:
    """Of the sources that are sets of rows. Reads all of their files.

    Raises:
        ConfigError: one cannot be read.
    """
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


def first_difference(then: "RunConfig", now: "RunConfig") -> tuple[str, str, str] | None:
    """The first setting by which the two have other prompts, and its values; None if none is."""
    pairs = zip(_settings(then), _settings(now), strict=False)
    return next(((new[0], old[1], new[1]) for old, new in pairs if old[1] != new[1]), None)


def _settings(config: "RunConfig") -> Iterator[Setting]:
    """Those of two configurations stand beside each other up to the first that differs."""
    entries = config.entries
    yield "run.seed", str(config.run.seed)
    yield "environments", str(len(entries))
    if len(entries) > 1:
        yield from _mixture(config)
    for entry in entries:
        yield from _sources(entry)
        if _is_finite(entry.data):
            yield from _order(entry)
    if any(_is_finite(entry.data) for entry in entries):
        yield from _filter(config)


def _mixture(config: "RunConfig") -> Iterator[Setting]:
    """Which entry plays a prompt."""
    batch = config.learner.groups_per_step
    yield "learner.groups_per_step", str(batch)
    for entry in config.entries:
        limit = batch if entry.max_groups is None else min(entry.max_groups, batch)
        yield f"{entry.place}weight", str(entry.weight)
        yield f"{entry.place}max_trajectories / group_size", str(limit)


def _sources(entry: EnvironmentEntry) -> Iterator[Setting]:
    """The sets and streams of an entry, and how they are mixed."""
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
    """Whether one of its sources may be a set, which is read in an order."""
    return any(has_rows(source.path) or is_user_code(source.path) for source in data.sources)


def _order(entry: EnvironmentEntry) -> Iterator[Setting]:
    curriculum = entry.data.curriculum
    yield f"{entry.place}data.shuffle", _text(entry.data.shuffle)
    yield f"{entry.place}data.curriculum", _text(curriculum and curriculum.model_dump())


def _filter(config: "RunConfig") -> Iterator[Setting]:
    """Which rows are read; a truncation of another kind leaves all of them."""
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
