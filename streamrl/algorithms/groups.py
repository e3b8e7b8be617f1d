"""Statistics over the groups that trajectories belong to.

Invariant: every statistic is a tensor [S], each trajectory's row that of its group, computed
without a loop over groups; two passes for variances. Letter: G groups.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Groups:
    """Build with `of`."""

    ids: Tensor
    """[G] distinct group ids, ascending."""
    index: Tensor
    """[S] which of `ids` a trajectory has."""
    sizes: Tensor
    """[G]"""

    @classmethod
    def of(cls, groups: Tensor) -> "Groups":
        """From group ids [S], any integers."""
        ids, index, sizes = torch.unique(groups, return_inverse=True, return_counts=True)
        return cls(ids, index, sizes)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def alone(self) -> Tensor:
        """[S] bool, whether a trajectory has no sibling."""
        return (self.sizes == 1)[self.index]

    def mean(self, scores: Tensor, weights: Tensor | None = None) -> Tensor:
        """[S], weighted by `weights` [S]."""
        weights = torch.ones_like(scores) if weights is None else weights
        return (self._sum(weights * scores) / self._sum(weights).clamp(min=1))[self.index]

    def mean_by_log_weights(self, scores: Tensor, log_weights: Tensor) -> Tensor:
        """[S], weighted by exp(`log_weights` [S]), of which each group uses the differences."""
        largest = log_weights.new_full((len(self),), -torch.inf)
        largest.scatter_reduce_(0, self.index, log_weights, "amax")
        return self.mean(scores, (log_weights - largest[self.index]).exp())

    def std(self, scores: Tensor) -> Tensor:
        """[S] with ddof 1; 0 in a group of one."""
        squares = self._sum((scores - self.mean(scores)).square())
        return (squares / (self.sizes - 1).clamp(min=1)).sqrt()[self.index]

    def _sum(self, scores: Tensor) -> Tensor:
        """[S] -> [G]"""
        return scores.new_zeros(len(self)).index_add_(0, self.index, scores)

    def lead(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Of groups of two or more: how far the best is ahead of the second [G], and who it is."""
        ascending = scores.argsort(stable=True)
        order = ascending[self.index[ascending].argsort(stable=True)]
        last = self.sizes.cumsum(0) - 1
        best, second = order[last], order[last - 1]
        return scores[best] - scores[second], best
