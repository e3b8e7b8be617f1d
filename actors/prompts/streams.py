"""What is put around a stream of prompts: epochs, and a mixture of several.

`Epochs`: a finite set of prompts as a stream without an end. The order is a pure function of (seed,
prompt index): each epoch is a permutation of its own, so no prompt comes twice within an epoch and
a resumed run goes on where it stopped.

`Mixture`: several streams of prompts mixed by weight.

    prompt index -> block, place    a block is so many prompts that each stream is due one at least
    block -> which stream at each place    as many of each as its weight is due, in a seeded order
    stream, its own prompts so far -> the stream's own prompt index

Which prompt an index reads is a pure function of (seed, index). After every block the
share of each stream is within one prompt of its weight, and a stream's own indices have no gap, so
each goes through its own epochs.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from actors.prompts.rows import PromptRows, column
from streamrl.config.data import CurriculumSettings
from streamrl.data_files import shown
from streamrl.errors import ConfigError
from streamrl.interfaces import Prompt, PromptSource


class NamedPrompts:
    """A stream whose rows say which source they are of."""

    def __init__(self, prompts: PromptSource, key: str, name: str) -> None:
        self._prompts, self._named = prompts, {key: name}

    def __getitem__(self, prompt_index: int) -> Prompt:
        prompt = self._prompts[prompt_index]
        return replace(prompt, row={**prompt.row, **self._named})


class FirstPrompts:
    """The first prompts of a stream, as a set."""

    def __init__(self, prompts: PromptSource, count: int) -> None:
        self._prompts, self._count = prompts, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> Prompt:
        return self._prompts[number]

    def __iter__(self) -> Iterator[Prompt]:
        return map(self.__getitem__, range(len(self)))


class Epochs:
    """The prompts of a set, or those of `kept`, in the order of each epoch.

    Args:
        seed: of the order, in one or several parts; None keeps that of the set.
        kept: the numbers of the prompts that are used, ascending; None uses all.

    Raises:
        ConfigError: a row has no number in the column of the curriculum.
    """

    def __init__(
        self,
        prompts: PromptRows,
        seed: Sequence[int] | None,
        curriculum: CurriculumSettings | None = None,
        kept: NDArray[np.int64] | None = None,
    ) -> None:
        self._prompts = prompts
        self._seed = seed
        self._kept = kept
        self._curriculum = curriculum
        self._sorted = None if curriculum is None else _by_difficulty(prompts, curriculum, kept)
        self._order = lru_cache(maxsize=2)(self._permutation)

    def __len__(self) -> int:
        return len(self._prompts) if self._kept is None else len(self._kept)

    def __getitem__(self, prompt_index: int) -> Prompt:
        epoch, place = divmod(prompt_index, len(self))
        order = self._order(epoch)
        number = place if order is None else int(order[place])
        return self._prompts[number if self._kept is None else int(self._kept[number])]

    def _permutation(self, epoch: int) -> NDArray[np.int64] | None:
        """Of this epoch; None for the set's own order."""
        numbers = np.random.default_rng([*(self._seed or (0,)), epoch])
        settings = self._curriculum
        if settings is not None and self._sorted is not None and epoch < settings.num_epochs:
            moved = numbers.random(len(self)) * settings.window * len(self)
            return self._sorted[np.argsort(np.arange(len(self)) + moved, kind="stable")]
        return None if self._seed is None else numbers.permutation(len(self))


def _by_difficulty(
    prompts: PromptRows, settings: CurriculumSettings, kept: NDArray[np.int64] | None
) -> NDArray[np.int64]:
    """The places of the prompts that are used, sorted."""
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


_MIXTURE = 2**32 - 1
_SHORTEST = 64


class Mixture:
    """Streams with weights > 0."""

    def __init__(
        self, streams: Sequence[PromptSource], weights: Sequence[float], seed: int
    ) -> None:
        self._streams = streams
        self._seed = seed
        exact = [Fraction(weight) for weight in weights]
        total = sum(exact)
        self._bounds = [part / total for part in itertools.accumulate(exact, initial=Fraction(0))]
        self.block_size = max(_SHORTEST, math.ceil(total / min(exact)))
        self._block = lru_cache(maxsize=4)(self._places)

    def __getitem__(self, prompt_index: int) -> Prompt:
        stream, own_index = self.place(prompt_index)
        return self._streams[stream][own_index]

    def place(self, prompt_index: int) -> tuple[int, int]:
        """The stream that this index reads, and the index in that stream."""
        block, place = divmod(prompt_index, self.block_size)
        streams, own_indices = self._block(block)
        return int(streams[place]), int(own_indices[place])

    def _places(self, block: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """[block_size] the stream at each place of a block, and its own index there."""
        before, after = self._due(block), self._due(block + 1)
        counts = [last - first for first, last in zip(before, after, strict=True)]
        ordered = np.repeat(np.arange(len(counts)), counts)
        streams = np.random.default_rng([self._seed, _MIXTURE, block]).permutation(ordered)
        own_indices = np.empty_like(streams)
        for stream, first in enumerate(before):
            is_its = streams == stream
            own_indices[is_its] = first + np.arange(is_its.sum())
        return streams, own_indices

    def _due(self, num_blocks: int) -> list[int]:
        """Prompts of each stream in so many blocks.

        A bound of the cumulated weights is rounded down, so the counts add up; a block is long
        enough that none of them ever falls.
        """
        num_prompts = num_blocks * self.block_size
        ends = [math.floor(num_prompts * bound) for bound in self._bounds]
        return [end - start for start, end in itertools.pairwise(ends)]
