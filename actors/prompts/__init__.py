"""The prompts of a run as one stream, over all its environments and all sources of each.

Invariant: which environment plays a prompt, and which of its own prompts it reads, is a pure
function of (seed, prompt index).

The stream is cut into batches of `learner.groups_per_step` prompts. In each batch an environment
plays at most `max_groups` prompts; its own prompts are numbered without gaps, so it reads every row
of its data.

A new source is a class with `__getitem__(prompt_index) -> Prompt` and a branch in `_open`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from actors.prompts.order import NUM_BATCHES, Epochs, FirstPrompts, Mixture
from actors.prompts.rows import (
    ConcatenatedPrompts,
    PromptRows,
    RowColumns,
    RowPrompts,
    open_user_source,
)
from actors.prompts.tasks import (
    HELD_OUT_RUN_SEED,
    TASKS,
    MadePrompts,
    check_scorer,
    held_out_task,
    levels,
    reasoning_gym_prompts,
    trained_task,
)
from streamrl.config import RunConfig
from streamrl.config.data import DataSettings, SourceSettings
from streamrl.config.environments import EnvironmentEntry
from streamrl.data_files import SUFFIXES, has_rows, open_rows
from streamrl.errors import ConfigError, did_you_mean
from streamrl.interfaces import Prompt, PromptSource
from streamrl.user_code import is_user_code

if TYPE_CHECKING:
    from actors.rendering.renderer import ChatRenderer

Fitting: TypeAlias = Callable[[PromptRows, int], NDArray[np.int64]]
"""(prompts of a set, number of the set) -> numbers of those that fit into
`data.max_prompt_length`."""


@dataclass(frozen=True)
class Stream:
    """The prompts of a run; each prompt names its entry."""

    entries: Sequence[EnvironmentEntry]
    sources: Sequence[PromptSource]
    """The prompts of each entry."""
    place: Callable[[int], tuple[int, int]]
    """The number of the entry that plays a prompt, and the prompt's index among that entry's."""

    def __getitem__(self, prompt_index: int) -> Prompt:
        entry, own_index = self.place(prompt_index)
        return replace(self.sources[entry][own_index], environment=self.entries[entry].name)

    def entry_at(self, prompt_index: int) -> EnvironmentEntry:
        return self.entries[self.place(prompt_index)[0]]


@dataclass(frozen=True)
class HeldOutStream(Stream):
    """The held-out prompts of all entries, one entry after the other."""

    sources: Sequence[ConcatenatedPrompts]

    def __len__(self) -> int:
        return sum(map(len, self.sources))


def open_stream(
    config: RunConfig, renderer: "ChatRenderer", *, are_checked: bool = False
) -> Stream:
    """The training stream; `renderer` measures the prompts if `data.truncation` is `filter`.

    Raises:
        ConfigError: the prompts of an entry cannot be opened, or it would play none of them.
    """
    entries, seed, mixture = config.entries, config.run.seed, shares(config)
    # Imports transformers, which a check of the configuration avoids.
    from actors.prompts.fitting import fitting_rows

    sources = []
    for entry, first in zip(
        entries, mixture.num_before(config.data.first_prompt_index), strict=True
    ):
        fitting = partial(fitting_rows, config.model_copy(update={"data": entry.data}), renderer)
        sources.append(open_prompts(entry.data, seed, fitting, first, are_checked=are_checked))
    return Stream(entries, sources, mixture.place)


def shares(config: RunConfig) -> Mixture:
    """The assignment of prompts to entries.

    Raises:
        ConfigError: an entry would get no prompts.
    """
    entries = config.entries
    mixture = Mixture.of_environments(
        [entry.weight for entry in entries],
        [entry.max_groups for entry in entries],
        config.learner.groups_per_step,
        config.run.seed,
    )
    for i, (entry, num_played) in enumerate(zip(entries, mixture.due(NUM_BATCHES), strict=True)):
        if not num_played:
            raise ConfigError(
                f"environments.{i}.weight: was {entry.weight:g}, too little beside the others for "
                f"{entry.name} to play one prompt in {NUM_BATCHES * config.learner.groups_per_step}"
            )
    return mixture


def open_held_out_stream(config: RunConfig) -> HeldOutStream:
    """`data.num_eval_prompts` held-out prompts of each entry, or as many as it has.

    Raises:
        ConfigError: an entry has no held-out prompts.
    """
    sources = [open_held_out(entry.data) for entry in config.entries]
    return HeldOutStream(config.entries, sources, ConcatenatedPrompts(sources).place)


def open_prompts(
    data: DataSettings,
    seed: int,
    fitting: Fitting | None = None,
    first: int = 0,
    *,
    are_checked: bool = False,
) -> PromptSource:
    """The training stream of `data.source`.

    Args:
        fitting: chooses the prompts of a finite set under `data.truncation: filter`; without it,
            all are in the stream.
        first: the index at which the first epoch of a finite set begins.
        are_checked: whether every row of a file is already known to be a valid prompt.
    """
    sources = data.sources
    parts = [_open(data, "data.source", source, seed, are_checked) for source in sources]
    if all(source.weight is None for source in sources):
        return _stream(data, _joined(sources, parts), (seed,), fitting, 0, first)
    weights = [1.0 if source.weight is None else source.weight for source in sources]
    mixture = Mixture.of_sources(weights, seed)
    streams = [
        _stream(data, part, (seed, i), fitting, i, own_first)
        for i, (part, own_first) in enumerate(zip(parts, mixture.num_before(first), strict=True))
    ]
    if len(streams) == 1:
        return streams[0]

    def mixed(prompt_index: int) -> Prompt:
        stream, own_index = mixture.place(prompt_index)
        return streams[stream][own_index]

    return MadePrompts(mixed)


def open_held_out(data: DataSettings) -> ConcatenatedPrompts:
    """Held-out prompts, numbered from 0: at most `data.num_eval_prompts` of each source, the same
    for any `run.seed`; a file's begin with its first row. Generated prompts have seeds that
    training never uses, even if `data.eval_source` names the source.

    Raises:
        ConfigError: `data.source` is a file or a user's own, and no `data.eval_source` was given.
    """
    setting = "data.eval_source" if data.eval_sources else "data.source"
    for source in () if data.eval_sources else data.sources:
        if _has_rows(source.path) or is_user_code(source.path):
            raise ConfigError(
                "data.eval_source: is needed to evaluate, since data.source "
                f"{source.path} holds no prompts out"
            )
    parts = [_open(data, setting, source, None) for source in data.eval_sources or data.sources]
    limit = data.num_eval_prompts
    sets = [part if isinstance(part, PromptRows) else FirstPrompts(part, limit) for part in parts]
    return ConcatenatedPrompts(sets, limit)


def _joined(
    sources: tuple[SourceSettings, ...], parts: list[PromptRows | PromptSource]
) -> PromptRows | PromptSource:
    """One source, or several sets one after the other."""
    if len(parts) == 1:
        return parts[0]
    sets = []
    for source, part in zip(sources, parts, strict=True):
        if not isinstance(part, PromptRows):
            raise ConfigError(
                f"data.source: {source.path} has no end, so nothing can follow it; give the "
                "sources weights"
            )
        sets.append(part)
    return ConcatenatedPrompts(sets)


def _stream(
    data: DataSettings,
    part: PromptRows | PromptSource,
    seed: tuple[int, ...],
    fitting: Fitting | None,
    number: int,
    first: int,
) -> PromptSource:
    """A set, repeated in epochs; a stream as it is."""
    if not isinstance(part, PromptRows):
        return part
    kept = None
    if fitting is not None and data.truncation == "filter":
        kept = fitting(part, number)
    return Epochs(part, seed if data.shuffle else None, data.curriculum, kept, first)


def _open(
    data: DataSettings,
    setting: str,
    source: SourceSettings,
    run_seed: int | None,
    are_checked: bool = False,
) -> PromptRows | PromptSource:
    """Open a source; `run_seed` None: its held-out prompts."""
    path, kwargs = source.path, source.kwargs
    siblings = data.sources if setting == "data.source" else data.eval_sources
    default_name = _default_name(path) if len(siblings) > 1 else ""
    columns = RowColumns(data, setting, source, default_name)
    if _has_rows(path):
        rows = open_rows(setting, path, subset=source.subset, split=source.split)
        num_checked = 0 if are_checked else data.num_eval_prompts if run_seed is None else None
        return RowPrompts(rows, columns, path, num_checked)
    if is_user_code(path):
        seed = HELD_OUT_RUN_SEED if run_seed is None else run_seed
        return open_user_source(setting, path, kwargs, seed, columns)
    name = source.name or default_name
    stream = _open_task(data, setting, source, run_seed, name)

    def named(prompt_index: int) -> Prompt:
        prompt = stream[prompt_index]
        return replace(prompt, row={**prompt.row, data.data_source_key: name})

    return MadePrompts(named) if name else stream


def _open_task(
    data: DataSettings, setting: str, source: SourceSettings, run_seed: int | None, name: str
) -> PromptSource:
    path, kwargs = source.path, source.kwargs
    if path == "environment":
        return levels(run_seed)
    kind, _, own_name = path.partition(":")
    if kind == "reasoning_gym":
        rewards = (r for r in data.all_rewards if not r.data_source or name in r.data_source)
        if any(reward.reward == "task" for reward in rewards):
            check_scorer(own_name)
        return reasoning_gym_prompts(own_name, kwargs, run_seed)
    if path == "colors":
        raise ConfigError(
            f"{setting}: was 'colors'; it is in its recipe: `streamrl new FOLDER --recipe colors`"
        )
    if path not in TASKS:
        suffixes = ", ".join(SUFFIXES)
        raise ConfigError(
            f"{setting}: was {path!r}; a file ({suffixes}), datasets:NAME, "
            "reasoning_gym:NAME, PATH.py:NAME, environment or a task: "
            f"{did_you_mean(path, TASKS)}"
        )
    if run_seed is None:
        return held_out_task(path, kwargs)
    siblings = (s.kwargs for s in (*data.sources, *data.eval_sources) if s.path == path)
    others = [own for own in siblings if own != kwargs]
    held_out = [held_out_task(path, own) for own in (kwargs, *others)]
    return trained_task(path, kwargs, run_seed, held_out, data.num_eval_prompts)


def _default_name(path: str) -> str:
    """The default name of a source in a list: its file's name without suffixes, or the part after
    the colon."""
    return Path(path).name.partition(".")[0] if _has_rows(path) else path.rpartition(":")[2]


def _has_rows(path: str) -> bool:
    """Whether the source has rows. A task's name means the task even if a folder has that name;
    ./NAME is the folder."""
    return path not in TASKS and has_rows(path)
