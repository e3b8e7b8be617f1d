"""A batch by episodes: what credit is assigned to.

An episode whose context was rewritten is several trajectories, its segments, which follow one
another in the batch. What is recorded of an episode stands with each of them.

Invariant: the response tokens of an episode are consecutive, so the estimators of advantages take
episodes as they take trajectories; where no context was rewritten the two are the same.
Called by: `learners.objective`. Shapes: E episodes, S trajectories, R response tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from streamrl.algorithms.sequences import Sequences
from streamrl.types import GroupHeader


@dataclass(frozen=True, eq=False)
class Episodes:
    """Build with `of`."""

    first: torch.Tensor
    """[E] int64, the first trajectory of each."""
    of_trajectory: torch.Tensor
    """[S] int64, which episode a trajectory is of."""
    sequences: Sequences
    """The response tokens of each."""

    @classmethod
    def of(cls, headers: Sequence[GroupHeader], trajectories: Sequences) -> "Episodes":
        """Those of the groups with these headers, and with these response tokens."""
        starts = [is_start for header in headers for is_start in _starts(header)]
        is_first = torch.tensor(starts, dtype=torch.bool)
        first, indices = is_first.nonzero()[:, 0], is_first.cumsum(0) - 1
        lengths = torch.zeros(len(first), dtype=torch.int64)
        lengths.index_add_(0, indices, trajectories.lengths)
        return cls(first, indices, Sequences.from_lengths(lengths))

    def __len__(self) -> int:
        """E"""
        return len(self.first)

    def each(self, column: torch.Tensor) -> torch.Tensor:
        """[S, ...] -> [E, ...]: what stands with the first trajectory of each."""
        return column[self.first]

    def to_trajectories(self, column: torch.Tensor) -> torch.Tensor:
        """[E, ...] -> [S, ...]"""
        return column[self.of_trajectory]

    def members(self, chosen: torch.Tensor) -> list[int]:
        """The trajectories of these episodes, in this order."""
        ends = torch.cat([self.first[1:], torch.tensor([len(self.of_trajectory)])])
        spans = [range(int(self.first[e]), int(ends[e])) for e in chosen]
        return [i for span in spans for i in span]


def _starts(header: GroupHeader) -> list[bool]:
    """Of each trajectory, whether it is the first of its episode."""
    indices = header.episode_indices or tuple(range(len(header.lengths)))
    return [i == 0 or indices[i] != indices[i - 1] for i in range(len(indices))]
