"""Several streams of prompts mixed by weight.

    prompt index -> block, place    a block is so many prompts that each stream is due one at least
    block -> which stream at each place    as many of each as its weight is due, in a seeded order
    stream, its own prompts so far -> the stream's own prompt index

Invariant: which prompt an index reads is a pure function of (seed, index). After every block the
share of each stream is within one prompt of its weight, and a stream's own indices have no gap, so
each goes through its own epochs.
"""

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from streamrl.interfaces import Prompt, PromptSource

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
