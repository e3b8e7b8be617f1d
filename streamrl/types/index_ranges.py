"""Sets of prompt indices as ranges of consecutive ones.

Prompts are finished roughly in the order in which they were granted, so the open ones are few
ranges, however many they are.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TypeAlias

from streamrl.types.ranges import PromptIndex

IndexRanges: TypeAlias = tuple[tuple[PromptIndex, PromptIndex], ...]
"""Disjoint, ascending, never adjacent: (first, behind the last)."""


def ranges_of(prompt_indices: Iterable[int]) -> IndexRanges:
    """The ranges of these prompts, in whatever order and however often they come."""
    return IndexRangeSet(prompt_indices).frozen()


def members(ranges: IndexRanges) -> Iterator[int]:
    return chain.from_iterable(range(*run) for run in ranges)


class IndexRangeSet:
    """A set that changes; each change costs as much as there are ranges, not members."""

    def __init__(self, prompt_indices: Iterable[int] = ()) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        for prompt_index in sorted(prompt_indices):
            self.add(prompt_index)

    def frozen(self) -> IndexRanges:
        return tuple(zip(self._starts, self._stops, strict=True))

    def add(self, prompt_index: int) -> None:
        """May be there already."""
        position = bisect_right(self._starts, prompt_index)
        if self._holds(position, prompt_index):
            return
        first = last = position
        start, stop = prompt_index, prompt_index + 1
        if position > 0 and self._stops[position - 1] == start:
            first, start = position - 1, self._starts[position - 1]
        if position < len(self._starts) and self._starts[position] == stop:
            last, stop = position + 1, self._stops[position]
        self._starts[first:last] = [start]
        self._stops[first:last] = [stop]

    def discard(self, prompt_index: int) -> None:
        """May be gone already."""
        position = bisect_right(self._starts, prompt_index)
        if not self._holds(position, prompt_index):
            return
        start, stop = self._starts[position - 1], self._stops[position - 1]
        rest = [(s, e) for s, e in ((start, prompt_index), (prompt_index + 1, stop)) if s < e]
        self._starts[position - 1 : position] = [start for start, _ in rest]
        self._stops[position - 1 : position] = [stop for _, stop in rest]

    def _holds(self, position: int, prompt_index: int) -> bool:
        """Whether the range before `position`, the last that may, contains `prompt_index`."""
        return position > 0 and prompt_index < self._stops[position - 1]
