"""The prompts of all environments of a run, in one stream.

Invariant: which environment plays a prompt, and which of its own prompts it reads, is a pure
function of (seed, prompt index).

The prompt stream is cut into batches of `learner.groups_per_step` prompts. In each an entry plays
at most `max_groups` prompts, and the prompts that it plays are numbered 0, 1, 2, ... without a gap,
so that it reads every row of its own data.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from actors.prompts import open_held_out, open_prompts
from actors.prompts.mixture import NUM_BATCHES, Mixture
from actors.prompts.rows import ConcatenatedPrompts
from streamrl.config import RunConfig
from streamrl.config.environments import EnvironmentEntry
from streamrl.errors import ConfigError
from streamrl.interfaces import Prompt, PromptSource

if TYPE_CHECKING:
    from actors.rendering.renderer import ChatRenderer


@dataclass(frozen=True)
class Stream:
    """The prompts of a run; each names its entry."""

    entries: Sequence[EnvironmentEntry]
    sources: Sequence[PromptSource]
    """The prompts of each entry."""
    place: Callable[[int], tuple[int, int]]
    """The number of the entry that plays a prompt, and which of its own prompts it is."""

    def __getitem__(self, prompt_index: int) -> Prompt:
        entry, own_index = self.place(prompt_index)
        return replace(self.sources[entry][own_index], environment=self.entries[entry].name)

    def entry_at(self, prompt_index: int) -> EnvironmentEntry:
        return self.entries[self.place(prompt_index)[0]]


@dataclass(frozen=True)
class HeldOutStream(Stream):
    """The held-out prompts of one entry after those of another."""

    sources: Sequence[ConcatenatedPrompts]

    def __len__(self) -> int:
        return sum(map(len, self.sources))


def open_stream(config: RunConfig, renderer: "ChatRenderer") -> Stream:
    """That of training.

    Args:
        renderer: measures the prompts where `data.truncation` is `filter`.

    Raises:
        ConfigError: the prompts of an entry cannot be opened, or it would play none of them.
    """
    entries, seed, mixture = config.entries, config.run.seed, shares(config)
    # It imports transformers, which a check of a configuration does without.
    from actors.prompts.fitting import fitting_rows

    sources = []
    for entry, first in zip(
        entries, mixture.num_before(config.data.first_prompt_index), strict=True
    ):
        own = config.model_copy(update={"data": entry.data})
        sources.append(open_prompts(entry.data, seed, partial(fitting_rows, own, renderer), first))
    return Stream(entries, sources, mixture.place)


def shares(config: RunConfig) -> Mixture:
    """Which entry plays which prompt.

    Raises:
        ConfigError: an entry would play none.
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
    """`data.num_eval_prompts` of each entry, or as many as it has.

    Raises:
        ConfigError: an entry has no held-out prompts.
    """
    sources = [open_held_out(entry.data) for entry in config.entries]
    return HeldOutStream(config.entries, sources, ConcatenatedPrompts(sources).place)
