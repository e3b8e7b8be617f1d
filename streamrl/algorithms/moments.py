"""Mean and variance that can be merged across shards, and whitening.

Invariant: merging the moments of shards gives the moments of the whole without cancellation
(pairwise update of Chan, Golub and LeVeque, 1979). All in float64.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Moments:
    """Count, mean and sum of squared deviations of some numbers, each a float64 scalar."""

    count: Tensor
    mean: Tensor
    squares: Tensor

    @classmethod
    def of(cls, values: Tensor, counts: Tensor | None = None) -> "Moments":
        """The moments of `values` [N], each counted `counts` [N] times, in two passes."""
        wide = values.double()
        if counts is None:
            count = wide.new_full((), len(wide))
            mean = wide.sum() / count.clamp(min=1)
            deviation = wide - mean
            return cls(count, mean, torch.dot(deviation, deviation))
        count = counts.double().sum()
        mean = torch.dot(wide, counts.double()) / count.clamp(min=1)
        deviation = wide - mean
        return cls(count, mean, torch.dot(deviation.square_(), counts.double()))

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> "Moments":
        """Inverse of `to_tensor`."""
        return cls(*tensor.unbind())

    def to_tensor(self) -> Tensor:
        """[3] float64, to be sent through a collective."""
        return torch.stack([self.count, self.mean, self.squares])

    def merge(self, other: "Moments") -> "Moments":
        count = self.count + other.count
        share = other.count / count.clamp(min=1)
        delta = other.mean - self.mean
        squares = self.squares + other.squares + delta.square() * self.count * share
        return Moments(count, self.mean + delta * share, squares)

    def variance(self, ddof: int) -> Tensor:
        """The variance; 0 if there are at most `ddof` numbers."""
        return torch.where(self.count > ddof, self.squares / (self.count - ddof).clamp(min=1), 0.0)

    @property
    def effective_sample_size(self) -> Tensor:
        """mean^2 / mean square, in [0, 1]: the share of equal weights with the same spread."""
        mean_square = self.mean.square() + self.variance(ddof=0)
        return torch.where(mean_square > 0, self.mean.square() / mean_square, 0.0)


def whiten(values: Tensor) -> Tensor:
    """Standardize [R] to mean 0 and variance 1, as TRL and verl do.

    Raises:
        ValueError: the batch has fewer than two tokens, so it has no variance.
    """
    moments = Moments.of(values)
    if moments.count < 2:
        raise ValueError(f"whitening needs at least 2 tokens, the batch has {int(moments.count)}")
    centered = values.double() - moments.mean
    return (centered * torch.rsqrt(moments.variance(ddof=1) + 1e-8)).to(values.dtype)
