"""The prompts of all environments of a run, in one stream.

Invariant: which environment plays a prompt, and which of its own prompts it reads, is a pure
function of (seed, prompt index).

`EnvironmentMixture`: the prompt stream is cut into batches of `learner.groups_per_step` prompts. A
batch has as many prompts of each entry as its weight says, rounded up or down, in an order of its
own.

In each batch an entry plays at most `max_groups` prompts, and the prompts that it plays
are numbered 0, 1, 2, ... without a gap, so that it reads every row of its own data.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from actors.prompts import num_held_out, open_held_out, open_prompts
from streamrl.config import RunConfig
from streamrl.config.environments import EnvironmentEntry
from streamrl.errors import ConfigError
from streamrl.interfaces import Prompt, PromptSource

_NUM_BATCHES = 1000
"""After so many the counts repeat; shares are exact to a prompt in all of them."""
_SPREAD = 619
"""Prime to the above: it puts batches beside each other whose roundings differ."""


class EnvironmentMixture:
    """Entries by weight.

    Args:
        limits: of each entry the most prompts that it plays in a batch; None: no limit.
    """

    def __init__(
        self,
        weights: Sequence[float],
        limits: Sequence[int | None],
        batch_size: int,
        seed: int,
    ) -> None:
        self._batch_size = batch_size
        self._seed = seed
        quotas = _quotas(np.array(weights, np.float64), limits, batch_size)
        self._counts = _counts(quotas, batch_size)
        self._before = np.vstack([np.zeros_like(self._counts[:1]), self._counts.cumsum(axis=0)])
        self._order = lru_cache(maxsize=16)(self._shuffled)

    @property
    def num_played(self) -> tuple[int, ...]:
        """Prompts of each entry in every `_NUM_BATCHES` batches."""
        return tuple(int(n) for n in self._before[-1])

    def place(self, prompt_index: int) -> tuple[int, int]:
        """The entry that plays the prompt, and which of its own prompts this is."""
        batch, within = divmod(prompt_index, self._batch_size)
        cycle, number = divmod(batch, _NUM_BATCHES)
        order = self._order(batch)
        entry = int(order[within])
        earlier = cycle * self._before[-1, entry] + self._before[number, entry]
        return entry, int(earlier + np.count_nonzero(order[:within] == entry))

    def _shuffled(self, batch: int) -> NDArray[np.int64]:
        """[batch_size] the entry of each prompt."""
        counts = self._counts[batch % _NUM_BATCHES]
        entries = np.repeat(np.arange(len(counts)), counts)
        return np.random.default_rng([self._seed, batch]).permutation(entries)


def _quotas(
    weights: NDArray[np.float64], limits: Sequence[int | None], batch_size: int
) -> NDArray[np.float64]:
    """[entries] mean prompts in a batch: by weight, and what a limit takes from one is shared
    among the others by weight."""
    most = np.array([batch_size if limit is None else limit for limit in limits], np.float64)
    is_full = np.zeros(len(weights), bool)
    while True:
        rest = batch_size - most[is_full].sum()
        quotas = np.where(is_full, most, rest * weights / max(weights[~is_full].sum(), 1e-300))
        above = ~is_full & (quotas > most)
        if not above.any():
            return quotas
        is_full |= above


def _counts(quotas: NDArray[np.float64], batch_size: int) -> NDArray[np.int64]:
    """[batches, entries] prompts: each quota rounded up or down, their sum the batch size.

    Entry i has the points of an evenly spaced grid that fall between the sums of the quotas before
    it and with it; each batch has a grid of its own offset.
    """
    edges = quotas.cumsum()[:-1]
    offsets = (np.arange(_NUM_BATCHES) * _SPREAD % _NUM_BATCHES + 0.5) / _NUM_BATCHES
    below = np.clip(np.ceil(edges[None, :] - offsets[:, None]), 0, batch_size).astype(np.int64)
    first = np.zeros((_NUM_BATCHES, 1), np.int64)
    last = np.full((_NUM_BATCHES, 1), batch_size, np.int64)
    return np.diff(np.hstack([first, below, last]), axis=1)


if TYPE_CHECKING:
    from actors.rendering.renderer import ChatRenderer


@dataclass(frozen=True)
class TrainingStream:
    """The prompts of training; each names its entry."""

    entries: Sequence[EnvironmentEntry]
    sources: Sequence[PromptSource]
    """The prompts of each entry."""
    mixture: EnvironmentMixture

    def __getitem__(self, prompt_index: int) -> Prompt:
        entry, own_index = self.mixture.place(prompt_index)
        return replace(self.sources[entry][own_index], environment=self.entries[entry].name)

    def entry_at(self, prompt_index: int) -> EnvironmentEntry:
        return self.entries[self.mixture.place(prompt_index)[0]]


@dataclass(frozen=True)
class HeldOutStream:
    """The held-out prompts of one entry after those of another."""

    entries: Sequence[EnvironmentEntry]
    sources: Sequence[PromptSource]
    sizes: Sequence[int]

    def __len__(self) -> int:
        return sum(self.sizes)

    def __getitem__(self, prompt_index: int) -> Prompt:
        entry, own_index = self._place(prompt_index)
        return replace(self.sources[entry][own_index], environment=self.entries[entry].name)

    def entry_at(self, prompt_index: int) -> EnvironmentEntry:
        return self.entries[self._place(prompt_index)[0]]

    def _place(self, prompt_index: int) -> tuple[int, int]:
        first = 0
        for entry, size in enumerate(self.sizes):
            if prompt_index < first + size:
                return entry, prompt_index - first
            first += size
        raise IndexError(f"there are {first} held-out prompts, and not one numbered {prompt_index}")


Stream = TrainingStream | HeldOutStream


def open_stream(config: RunConfig, renderer: "ChatRenderer") -> TrainingStream:
    """
    Args:
        renderer: measures the prompts where `data.truncation` is `filter`.

    Raises:
        ConfigError: the prompts of an entry cannot be opened, or it would play none of them.
    """
    entries, seed = config.entries, config.run.seed
    # It imports transformers, which a check of a configuration does without.
    from actors.prompts.fitting import fitting_rows

    sources = []
    for entry in entries:
        own = config.model_copy(update={"data": entry.data})
        sources.append(open_prompts(entry.data, seed, partial(fitting_rows, own, renderer)))
    return TrainingStream(entries, sources, shares(config))


def shares(config: RunConfig) -> EnvironmentMixture:
    """Which entry plays which prompt.

    Raises:
        ConfigError: an entry would play none.
    """
    entries = config.entries
    mixture = EnvironmentMixture(
        [entry.weight for entry in entries],
        [entry.max_groups for entry in entries],
        config.learner.groups_per_step,
        config.run.seed,
    )
    for i, (entry, num_played) in enumerate(zip(entries, mixture.num_played, strict=True)):
        if not num_played:
            raise ConfigError(
                f"environments.{i}.weight: was {entry.weight:g}, too little beside the others for "
                f"{entry.name} to play one prompt in {1000 * config.learner.groups_per_step}"
            )
    return mixture


def open_held_out_stream(config: RunConfig) -> HeldOutStream:
    """`data.num_eval_prompts` of each entry, or as many as it has.

    Raises:
        ConfigError: an entry has no held-out prompts.
    """
    entries = config.entries
    sources = [open_held_out(entry.data) for entry in entries]
    sizes = [
        num_held_out(entry.data, source) for entry, source in zip(entries, sources, strict=True)
    ]
    return HeldOutStream(entries, sources, sizes)
