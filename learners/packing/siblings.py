"""Siblings in one micro-batch: trajectories that begin alike, which then compute that once.

`learners.packing.bins` balances micro-batches without looking at what is in them, so the siblings
of a group are spread over all. Here they are laid side by side, and the row is cut into as many
parts.

Invariant: as many micro-batches, no trajectory in two, and none of several trajectories with more
tokens to compute than the limit. The cut is taken only where the fullest micro-batch has fewer left
than that of the balanced ones, so a rank that others wait for never gets slower.
Called by: `learners.batch`, for a network that shares prompts. Shapes: S trajectories of the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from learners.policy.packed.shared_prompts import MOST, leaders_of

Integers: TypeAlias = NDArray[np.int64]
Bins: TypeAlias = list[list[int]]


@dataclass(frozen=True, eq=False)
class Beginnings:
    """The prompts of a batch's trajectories."""

    leaders: Integers
    """[S] the first trajectory with the same prompt."""
    lengths: Integers
    """[S] tokens of the prompt."""

    @classmethod
    def of(cls, prompts: Sequence[NDArray[np.integer]]) -> "Beginnings":
        """Args:
        prompts: [S] the token ids of each.
        """
        return cls(leaders_of(prompts), np.array([*map(len, prompts)], np.int64))

    def select(self, chosen: Sequence[int]) -> "Beginnings":
        """Those of these trajectories; a leader need not be among them."""
        return Beginnings(self.leaders[chosen], self.lengths[chosen])


def beside_each_other(
    bins: Bins, lengths: Integers, beginnings: Beginnings, max_tokens: int
) -> Bins:
    """Micro-batches of the same trajectories in which more begin alike; else the same ones.

    A trajectory that is longer than the limit stays alone.

    Args:
        bins: trajectories as [micro-batch][trajectory], the fullest first.
        lengths: [S] tokens of each trajectory.
        max_tokens: to compute in a micro-batch.
    """
    num_alone = sum(len(bin) == 1 and bool(lengths[bin[0]] > max_tokens) for bin in bins)
    alone, others = bins[:num_alone], bins[num_alone:]
    if len(others) < 2 or not others[0]:
        return bins
    members = np.concatenate([np.array(bin, np.int64) for bin in others])
    balanced = np.arange(len(others)).repeat([*map(len, others)])
    order = beginnings.leaders[members].argsort(kind="stable")
    members, balanced = members[order], balanced[order]
    own, shared = lengths[members], beginnings.select(members.tolist())
    cut = _cut(_left(np.zeros_like(order), own, shared), len(others))
    computed = _computed(cut, own, shared, len(others))
    most = min(max_tokens, _computed(balanced, own, shared, len(others)).max() - 1)
    if computed.max() > most or not computed.all():
        return bins
    return alone + [
        members[cut == number].tolist() for number in (-computed).argsort(kind="stable")
    ]


def _cut(tokens: Integers, num_bins: int) -> Integers:
    """[S] the bin of each: that in which its middle is, were all bins equally full."""
    ends = tokens.cumsum()
    places: Integers = (2 * ends - tokens) * num_bins // (2 * ends[-1])
    return places


def _computed(bins: Integers, lengths: Integers, beginnings: Beginnings, num_bins: int) -> Integers:
    """[num_bins] tokens to compute in each bin, [S] being the bin of each trajectory."""
    left = _left(bins, lengths, beginnings)
    each, all_of = np.bincount(bins, left, num_bins), np.bincount(bins, lengths, num_bins)
    return np.where(each > MOST * all_of, all_of, each).astype(np.int64)


def _left(bins: Integers, lengths: Integers, beginnings: Beginnings) -> Integers:
    """[S] tokens to compute of each: without its prompt, if one before it in its bin has that."""
    keys = bins * (beginnings.leaders.max() + 1) + beginnings.leaders
    _, first = np.unique(keys, return_index=True)
    left = lengths - beginnings.lengths
    left[first] = lengths[first]
    return left
