"""Sets of prompt indices as runs of consecutive ones.

A run's prompts are finished roughly in the order in which they began, so however many are open,
they are few runs. `Books` carries them; `buffers.ledger.entries` keeps them up to date.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TypeAlias

IndexRanges: TypeAlias = tuple[tuple[int, int], ...]
"""Disjoint, ascending, never adjacent: (first, behind the last)."""


def ranges_of(prompt_indices: Iterable[int]) -> IndexRanges:
    """The runs of these prompts, in whatever order and however often they come."""
    return IndexRangeSet(prompt_indices).frozen()


def members(runs: IndexRanges) -> Iterator[int]:
    return chain.from_iterable(range(*run) for run in runs)


class IndexRangeSet:
    """A set that changes; each change costs as much as there are runs, not members."""

    def __init__(self, prompt_indices: Iterable[int] = ()) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        for prompt_index in sorted(prompt_indices):
            self.add(prompt_index)

    def frozen(self) -> IndexRanges:
        return tuple(zip(self._starts, self._stops, strict=True))

    def add(self, prompt_index: int) -> None:
        """May be there already."""
        place = bisect_right(self._starts, prompt_index)
        if self._holds(place, prompt_index):
            return
        joins_left = place > 0 and self._stops[place - 1] == prompt_index
        joins_right = place < len(self._starts) and self._starts[place] == prompt_index + 1
        if joins_left and joins_right:
            self._stops[place - 1] = self._stops.pop(place)
            del self._starts[place]
        elif joins_left:
            self._stops[place - 1] = prompt_index + 1
        elif joins_right:
            self._starts[place] = prompt_index
        else:
            self._starts.insert(place, prompt_index)
            self._stops.insert(place, prompt_index + 1)

    def discard(self, prompt_index: int) -> None:
        """May be gone already."""
        place = bisect_right(self._starts, prompt_index)
        if not self._holds(place, prompt_index):
            return
        start, stop = self._starts[place - 1], self._stops[place - 1]
        rest = [(s, e) for s, e in ((start, prompt_index), (prompt_index + 1, stop)) if s < e]
        self._starts[place - 1 : place] = [start for start, _ in rest]
        self._stops[place - 1 : place] = [stop for _, stop in rest]

    def _holds(self, place: int, prompt_index: int) -> bool:
        """Whether the run before `place`, the last that starts in time, reaches `prompt_index`."""
        return place > 0 and prompt_index < self._stops[place - 1]
