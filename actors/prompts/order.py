"""The order of prompts in a stream: epochs (and curriculum) of a set, and several parts mixed by
weight.

Invariant: the order is a pure function of (seed, prompt index), so a resumed run continues where it
stopped, and no prompt comes twice within an epoch.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from actors.prompts.rows import PromptRows, column
from streamrl.config.data import CurriculumSettings
from streamrl.data_files import shown
from streamrl.errors import ConfigError
from streamrl.interfaces import Prompt, PromptSource

Due: TypeAlias = Callable[[int], Sequence[int]]
"""(number of blocks) -> how many indices each part has in that many first blocks."""

_SHORTEST = 64
NUM_BATCHES = 1000
"""After this many batches the counts of environments repeat; over all of them shares are exact to
one prompt."""
_SPREAD = 619
"""Coprime to the above, so that adjacent batches round differently."""
_OF_SOURCES = 2**32 - 1


class Epochs:
    """A finite set of prompts, or those of `kept`, as a stream without an end.

    Each epoch has its own permutation; with a curriculum the first epochs go by difficulty. If a
    run continues with other rows, a new epoch begins with them; earlier prompts that are still open
    read the new rows, too, in a separate order.

    Args:
        seed: the seed of the order, in one or several parts; None keeps the set's own order.
        kept: the numbers of the prompts that are used, ascending; None uses all.
        first: the index at which the first epoch begins.

    Raises:
        ConfigError: a row has no number in the curriculum's column.
    """

    def __init__(
        self,
        prompts: PromptRows,
        seed: Sequence[int] | None,
        curriculum: CurriculumSettings | None = None,
        kept: NDArray[np.int64] | None = None,
        first: int = 0,
    ) -> None:
        self._prompts = prompts
        self._seed = seed
        self._first = first
        self._kept = kept
        self._curriculum = curriculum
        self._sorted = None if curriculum is None else _by_difficulty(prompts, curriculum, kept)
        self._order = lru_cache(maxsize=2)(self._permutation)

    def __len__(self) -> int:
        return len(self._prompts) if self._kept is None else len(self._kept)

    def __getitem__(self, prompt_index: int) -> Prompt:
        epoch, place = divmod(prompt_index - self._first, len(self))
        order = self._order(epoch)
        number = place if order is None else int(order[place])
        return self._prompts[number if self._kept is None else int(self._kept[number])]

    def _permutation(self, epoch: int) -> NDArray[np.int64] | None:
        """The permutation of this epoch; None for the set's own order."""
        numbers = np.random.default_rng([*(self._seed or (0,)), epoch % 2**32])
        settings = self._curriculum
        if settings is not None and self._sorted is not None and 0 <= epoch < settings.num_epochs:
            moved = numbers.random(len(self)) * settings.window * len(self)
            return self._sorted[np.argsort(np.arange(len(self)) + moved, kind="stable")]
        return None if self._seed is None else numbers.permutation(len(self))


def _by_difficulty(
    prompts: PromptRows, settings: CurriculumSettings, kept: NDArray[np.int64] | None
) -> NDArray[np.int64]:
    """The indices of the used prompts, sorted by difficulty."""
    values = np.array([_difficulty(prompt, settings.column) for prompt in prompts])
    chosen = values if kept is None else values[kept]
    return np.argsort(chosen if settings.order == "ascending" else -chosen, kind="stable")


def _difficulty(prompt: Prompt, key: str) -> float:
    value = column(prompt, key)
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = np.nan
    if not np.isfinite(number):
        raise ConfigError(
            f"data.curriculum.column: {prompt.origin or 'a prompt'} has {key} {shown(value)}; it "
            "must be a number"
        )
    return number


class Mixture:
    """Maps an index of a stream to one of several parts (the sources or environments of a run) and
    an index within that part; the latter have no gaps.

    A block of indices contains as many of each part as are due, in a seeded order. Sources are
    within one prompt of their weights after every block. For environments a block is a batch, which
    contains each environment's share rounded up or down, within its limit; weights are met over
    NUM_BATCHES.

    Args:
        due: how many indices each part has in the first n blocks; they always add up to the blocks'
        size.
        key: the seed of the order within blocks.
    """

    def __init__(self, block_size: int, due: Due, key: Sequence[int]) -> None:
        self.block_size = block_size
        self.due = due
        self._key = key
        self._block = lru_cache(maxsize=16)(self._places)

    @classmethod
    def of_sources(cls, weights: Sequence[float], seed: int) -> "Mixture":
        """Weights > 0."""
        exact = [Fraction(weight) for weight in weights]
        total = sum(exact)
        bounds = [part / total for part in itertools.accumulate(exact, initial=Fraction(0))]
        block_size = max(_SHORTEST, math.ceil(total / min(exact)))

        def due(num_blocks: int) -> Sequence[int]:
            # Cumulated weights are rounded down, so the counts add up; a block is long enough that
            # no count ever falls.
            ends = [math.floor(num_blocks * block_size * bound) for bound in bounds]
            return [end - start for start, end in itertools.pairwise(ends)]

        return cls(block_size, due, (seed, _OF_SOURCES))

    @classmethod
    def of_environments(
        cls, weights: Sequence[float], limits: Sequence[int | None], batch_size: int, seed: int
    ) -> "Mixture":
        """`limits`: the most prompts per batch that each entry plays; None: no limit."""
        quotas = _quotas(np.array(weights, np.float64), limits, batch_size)
        counts = _counts(quotas, batch_size)
        before = np.vstack([np.zeros_like(counts[:1]), counts.cumsum(axis=0)])

        def due(num_batches: int) -> Sequence[int]:
            cycle, number = divmod(num_batches, NUM_BATCHES)
            counted: list[int] = (cycle * before[-1] + before[number]).tolist()
            return counted

        return cls(batch_size, due, (seed,))

    def place(self, index: int) -> tuple[int, int]:
        """The part that has this index, and the index within the part."""
        block, place = divmod(index, self.block_size)
        parts, own_indices = self._block(block)
        return int(parts[place]), int(own_indices[place])

    def num_before(self, index: int) -> Sequence[int]:
        """How many of the lower indices each part has."""
        block, place = divmod(index, self.block_size)
        due, (parts, _) = self.due(block), self._block(block)
        return [before + int((parts[:place] == part).sum()) for part, before in enumerate(due)]

    def _places(self, block: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """[block_size] the part at each place of a block, and the index within that part."""
        before, after = self.due(block), self.due(block + 1)
        counts = [last - first for first, last in zip(before, after, strict=True)]
        ordered = np.repeat(np.arange(len(counts)), counts)
        parts = np.random.default_rng([*self._key, block]).permutation(ordered)
        own_indices = np.empty_like(parts)
        for part, first in enumerate(before):
            is_its = parts == part
            own_indices[is_its] = first + np.arange(is_its.sum())
        return parts, own_indices


def _quotas(
    weights: NDArray[np.float64], limits: Sequence[int | None], batch_size: int
) -> NDArray[np.float64]:
    """[entries] mean prompts per batch by weight; what a limit takes from one entry is shared among
    the others by weight."""
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

    Entry i gets the points of an evenly spaced grid that fall between the sum of the quotas before
    it and that sum plus its own quota; each batch shifts the grid differently.
    """
    edges = quotas.cumsum()[:-1]
    offsets = (np.arange(NUM_BATCHES) * _SPREAD % NUM_BATCHES + 0.5) / NUM_BATCHES
    below = np.clip(np.ceil(edges[None, :] - offsets[:, None]), 0, batch_size).astype(np.int64)
    first = np.zeros((NUM_BATCHES, 1), np.int64)
    last = np.full((NUM_BATCHES, 1), batch_size, np.int64)
    return np.diff(np.hstack([first, below, last]), axis=1)


class FirstPrompts(PromptRows):
    """The first prompts of a stream, as a finite set."""

    def __init__(self, prompts: PromptSource, count: int) -> None:
        self._prompts, self._count = prompts, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> Prompt:
        return self._prompts[number]
