"""Sets of sequence numbers as runs of consecutive ones.

A run's sequences are finished roughly in the order in which they began, so however many are open,
they are few runs. `Books` carries them; `buffers.account` keeps them up to date.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TypeAlias

Runs: TypeAlias = tuple[tuple[int, int], ...]
"""Disjoint, ascending, never adjacent: (first, behind the last)."""


def runs_of(sequences: Iterable[int]) -> Runs:
    """The runs of these sequences, in whatever order and however often they come."""
    return RunSet(sequences).frozen()


def members(runs: Runs) -> Iterator[int]:
    return chain.from_iterable(range(*run) for run in runs)


class RunSet:
    """A set that changes; each change costs as much as there are runs, not members."""

    def __init__(self, sequences: Iterable[int] = ()) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        for sequence in sorted(sequences):
            self.add(sequence)

    def frozen(self) -> Runs:
        return tuple(zip(self._starts, self._stops, strict=True))

    def add(self, sequence: int) -> None:
        """May be there already."""
        place = bisect_right(self._starts, sequence)
        if self._holds(place, sequence):
            return
        joins_left = place > 0 and self._stops[place - 1] == sequence
        joins_right = place < len(self._starts) and self._starts[place] == sequence + 1
        if joins_left and joins_right:
            self._stops[place - 1] = self._stops.pop(place)
            del self._starts[place]
        elif joins_left:
            self._stops[place - 1] = sequence + 1
        elif joins_right:
            self._starts[place] = sequence
        else:
            self._starts.insert(place, sequence)
            self._stops.insert(place, sequence + 1)

    def discard(self, sequence: int) -> None:
        """May be gone already."""
        place = bisect_right(self._starts, sequence)
        if not self._holds(place, sequence):
            return
        start, stop = self._starts[place - 1], self._stops[place - 1]
        rest = [(s, e) for s, e in ((start, sequence), (sequence + 1, stop)) if s < e]
        self._starts[place - 1 : place] = [start for start, _ in rest]
        self._stops[place - 1 : place] = [stop for _, stop in rest]

    def _holds(self, place: int, sequence: int) -> bool:
        """Whether the run before `place`, the last that starts in time, reaches `sequence`."""
        return place > 0 and sequence < self._stops[place - 1]
