"""Flat response tokens and the sequences they belong to.

Every formula of this package takes tensors [R], the concatenated response tokens of all
trajectories, and a `Sequences` with the length of each. There is no padding and no mask.

Invariant: the lengths sum to R; empty sequences are allowed and reduce to 0.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor


def require_rows(count: int, **columns: Tensor | None) -> None:
    """Raise ValueError if a column that is not None has a shape other than (count,)."""
    for name, column in columns.items():
        if column is not None and column.shape != (count,):
            raise ValueError(f"{name}: has shape {tuple(column.shape)}; must be ({count},)")


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device, copied without waiting for the GPU's pending work. The caller must
    not change a host tensor afterwards, since it is the result itself if it is there already."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    # A copy from pageable memory would make the host wait for the GPU.
    return tensor.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True, eq=False)
class Sequences:
    """S consecutive segments of R tokens in all. Build with `from_lengths`."""

    lengths: Tensor
    """[S] int64, tokens per sequence."""
    num_tokens: int
    """R."""

    @classmethod
    def from_lengths(cls, lengths: Sequence[int] | Tensor) -> "Sequences":
        """Build from the number of tokens of each sequence."""
        tensor = torch.as_tensor(lengths, dtype=torch.int64)
        return cls(lengths=tensor, num_tokens=int(tensor.sum()))

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def longest(self) -> int:
        return int(self.lengths.max()) if len(self) else 0

    @cached_property
    def num_nonempty(self) -> int:
        return int((self.lengths > 0).sum())

    def to(self, device: torch.device) -> "Sequences":
        """These sequences on another device; self if they are there already."""
        if self.lengths.device == device:
            return self
        if device not in self._elsewhere:
            lengths = to_device(self.lengths, device)
            self._elsewhere[device] = Sequences(lengths=lengths, num_tokens=self.num_tokens)
        return self._elsewhere[device]

    @cached_property
    def _elsewhere(self) -> dict[torch.device, "Sequences"]:
        """The copies that `to` has made."""
        return {}

    def sum(self, values: Tensor) -> Tensor:
        """[R] -> [S]; accumulated in float64, so that long sequences lose no precision."""
        return self._reduce(values, "sum")

    def mean(self, values: Tensor) -> Tensor:
        """[R] -> [S]; 0 for an empty sequence."""
        total = self._reduce(values, "sum")
        return total / self.to(values.device).lengths.clamp(min=1)

    def max(self, values: Tensor) -> Tensor:
        """[R] -> [S]; 0 for an empty sequence."""
        return self._reduce(values, "max")

    def expand(self, per_sequence: Tensor) -> Tensor:
        """[S] -> [R], each value once per token of its sequence."""
        if len(per_sequence) != len(self):
            raise ValueError(
                f"per_sequence: has {len(per_sequence)} rows for {len(self)} sequences"
            )
        lengths = self.to(per_sequence.device).lengths
        return per_sequence.repeat_interleave(lengths, output_size=self.num_tokens)

    def chunks(self, max_tokens: int) -> Iterator[tuple[slice, slice]]:
        """Slices (of sequences, of tokens) with whole sequences and about `max_tokens` tokens."""
        if self.num_tokens <= max_tokens:
            yield slice(0, len(self)), slice(0, self.num_tokens)
            return
        ends = list(accumulate(self.lengths.tolist(), initial=0))
        first = 0
        for last in range(1, len(ends)):
            if last == len(self) or ends[last + 1] - ends[first] > max_tokens:
                yield slice(first, last), slice(ends[first], ends[last])
                first = last

    def __getitem__(self, rows: slice) -> "Sequences":
        lengths = self.lengths[rows]
        return Sequences(lengths=lengths, num_tokens=int(lengths.sum()))

    def _reduce(self, values: Tensor, how: Literal["sum", "max"]) -> Tensor:
        if values.shape != (self.num_tokens,):
            raise ValueError(
                f"values: has shape {tuple(values.shape)}; must be ({self.num_tokens},)"
            )
        dtype = torch.promote_types(values.dtype, torch.float32)
        if not len(self):
            return values.new_zeros(0, dtype=dtype)
        lengths = self.to(values.device).lengths
        reduced = torch.segment_reduce(values.double(), how, lengths=lengths, unsafe=True)
        return torch.where(lengths > 0, reduced, 0.0).to(dtype)


@dataclass(frozen=True, eq=False)
class Groups:
    """Statistics over the G groups of S trajectories, as tensors [S] in which each trajectory has
    the value of its group, without a loop over groups. Build with `of`."""

    ids: Tensor
    """[G] distinct group ids, ascending."""
    index: Tensor
    """[S] the index into `ids` of each trajectory's group."""
    sizes: Tensor
    """[G] trajectories per group."""

    @classmethod
    def of(cls, groups: Tensor) -> "Groups":
        """Build from group ids [S], any integers."""
        ids, index, sizes = torch.unique(groups, return_inverse=True, return_counts=True)
        return cls(ids, index, sizes)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def alone(self) -> Tensor:
        """[S] bool, whether a trajectory has no sibling."""
        return (self.sizes == 1)[self.index]

    def mean(self, scores: Tensor, weights: Tensor | None = None) -> Tensor:
        """[S] the group's mean, weighted by `weights` [S]; its smallest score if they sum to 0."""
        weights = torch.ones_like(scores) if weights is None else weights
        total, lowest = self._sum(weights), self._extreme(scores, "amin")
        # From the smallest score on, so that the mean of equal scores is exactly that score.
        above = self._sum(weights * (scores - lowest[self.index]))
        return (lowest + above / torch.where(total == 0, 1.0, total))[self.index]

    def mean_by_log_weights(self, scores: Tensor, log_weights: Tensor) -> Tensor:
        """[S] the group's mean, weighted by exp(`log_weights` [S]); only differences within a group
        matter, so nothing overflows."""
        largest = self._extreme(log_weights, "amax")
        return self.mean(scores, (log_weights - largest[self.index]).exp())

    def std(self, scores: Tensor) -> Tensor:
        """[S] the group's standard deviation (ddof 1); 0 in a group of one."""
        squares = self._sum((scores - self.mean(scores)).square())
        return (squares / (self.sizes - 1).clamp(min=1)).sqrt()[self.index]

    def _sum(self, scores: Tensor) -> Tensor:
        """[S] -> [G] sums."""
        return scores.new_zeros(len(self)).index_add_(0, self.index, scores)

    def _extreme(self, scores: Tensor, which: Literal["amin", "amax"]) -> Tensor:
        """[S] -> [G] the smallest or the largest of each group."""
        of_none = scores.new_zeros(len(self))
        return of_none.scatter_reduce_(0, self.index, scores, which, include_self=False)

    def lead(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """[G] the lead of the best over the second, and [G] the index in [S] of the best; every
        group needs at least two."""
        ascending = scores.argsort(stable=True)
        order = ascending[self.index[ascending].argsort(stable=True)]
        last = self.sizes.cumsum(0) - 1
        best, second = order[last], order[last - 1]
        return scores[best] - scores[second], best
