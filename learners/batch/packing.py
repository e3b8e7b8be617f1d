"""Packing: which of a rank's trajectories share a micro-batch.

Invariant: each trajectory is in exactly one micro-batch, no micro-batch of several trajectories
exceeds the limit, and every rank gets the same number of them (with fewer, a rank would leave the
others' collectives waiting).

A trajectory longer than the limit gets a micro-batch of its own. Leaving it out would bias the
trained lengths against the sampled ones.

`pack` puts the longest first into the bin with most room. Karmarkar-Karp, which verl and ROLL use,
balances without knowing the limit, and exceeds it when bins are nearly full; longest-first keeps
the limit, balances nearly as well, and needs only a heap.

`beside_each_other`: balancing spreads a group's siblings over all micro-batches. Here they are laid
side by side, since in one micro-batch their prompt is computed once, and this row is cut into the
same number of parts. The cut is used only if its fullest micro-batch has fewer tokens to compute
than the fullest balanced one, so a rank that others wait for never gets slower.
Shapes: S trajectories of the batch.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapreplace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from learners.batch.micro_batch import MOST
from streamrl.errors import ConfigError
from streamrl.types import GroupHeader

Integers: TypeAlias = NDArray[np.int64]


def pack(lengths: Integers, owners: Integers, rank: int, max_tokens: int) -> list[list[int]]:
    """Indices into `lengths`, as [micro-batch][trajectory], of this rank's trajectories.

    Uses the fewest micro-batches that longest-first needs on any rank, and balances their tokens.
    The fullest come first, so that ranks compute similar ones at the same time. A rank may have
    empty ones.

    Args:
        lengths: [S] tokens of every rank's trajectories.
        owners: [S] the rank that trains each.

    Raises:
        ConfigError: there is no trajectory at all.
    """
    if not len(lengths):
        raise ConfigError("a batch without trajectories cannot be packed")
    members = [np.flatnonzero(owners == r) for r in range(max(rank, owners.max()) + 1)]
    own = members[rank][longest_first(lengths[members[rank]])]
    shares = [sorted(lengths[of_rank].tolist(), reverse=True) for of_rank in members]

    def has_room(num_bins: int) -> bool:
        return all(_fill(share, max_tokens, num_bins) for share in shares)

    # Mostly the first or second number suffices; if no two trajectories fit into one bin, trying
    # every number would take quadratic time.
    fewest, step = max(_num_needed(lengths[of_rank], max_tokens) for of_rank in members), 1
    while not has_room(fewest + step - 1):
        step *= 2
    num_bins = bisect_left(range(fewest + step - 1), True, lo=fewest + step // 2, key=has_room)
    return [own[places].tolist() for places in _fill(shares[rank], max_tokens, num_bins) or ()]


def longest_first(lengths: Integers) -> Integers:
    """Indices by falling length, ties in order, so the result is the same on every CPU."""
    return (-lengths).argsort(kind="stable")


def _num_needed(lengths: Integers, max_tokens: int) -> int:
    """The least number of micro-batches: one per long trajectory, and as many as the others
    fill."""
    is_long = lengths > max_tokens
    return int(is_long.sum() - (-lengths[~is_long].sum() // max_tokens))


def _fill(lengths: Sequence[int], max_tokens: int, num_bins: int) -> list[list[int]] | None:
    """The indices in each bin, fullest bin first; None if one does not fit."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    heap = [(0, number) for number in range(num_bins)]
    for index, length in enumerate(lengths):
        tokens, number = heap[0]
        if tokens and tokens + length > max_tokens:
            return None
        bins[number].append(index)
        heapreplace(heap, (tokens + length, number))
    return [bins[number] for _, number in sorted(heap, reverse=True)]


Bins: TypeAlias = list[list[int]]


@dataclass(frozen=True, eq=False)
class Beginnings:
    """The prompts of a batch's trajectories, to find those that begin alike."""

    leaders: Integers
    """[S] the first trajectory with the same prompt."""
    lengths: Integers
    """[S] tokens of the prompt."""

    def select(self, chosen: Sequence[int]) -> "Beginnings":
        """The beginnings of these trajectories; a leader need not be among them."""
        return Beginnings(self.leaders[chosen], self.lengths[chosen])


def beside_each_other(
    bins: Bins, lengths: Integers, beginnings: Beginnings, max_tokens: int
) -> Bins:
    """Micro-batches of the same trajectories with more siblings together, if that saves tokens;
    otherwise the same ones.

    A trajectory that is longer than the limit stays alone.

    Args:
        bins: trajectories as [micro-batch][trajectory], the fullest first.
        lengths: [S] tokens of each trajectory.
        max_tokens: the most to compute in a micro-batch.
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
    """[S] the bin of each trajectory: where its middle falls if all bins are equally full."""
    ends = tokens.cumsum()
    places: Integers = (2 * ends - tokens) * num_bins // (2 * ends[-1])
    return places


def _computed(bins: Integers, lengths: Integers, beginnings: Beginnings, num_bins: int) -> Integers:
    """[num_bins] tokens to compute in each bin, [S] being the bin of each trajectory."""
    left = _left(bins, lengths, beginnings)
    each, all_of = np.bincount(bins, left, num_bins), np.bincount(bins, lengths, num_bins)
    return np.where(each > MOST * all_of, all_of, each).astype(np.int64)


def _left(bins: Integers, lengths: Integers, beginnings: Beginnings) -> Integers:
    """[S] tokens to compute of each: without the prompt, if one before it in its bin has that
    prompt."""
    keys = bins * (beginnings.leaders.max() + 1) + beginnings.leaders
    _, first = np.unique(keys, return_index=True)
    left = lengths - beginnings.lengths
    left[first] = lengths[first]
    return left


def owners(num_tokens: Sequence[int], num_ranks: int) -> Integers:
    """The rank that trains each group: groups with most tokens first, each to the rank with fewest
    so far. Only that rank fetches the group's payload; every rank computes the same assignment."""
    tokens = np.asarray(num_tokens, np.int64)
    ranks = np.empty_like(tokens)
    heap = [(0, rank) for rank in range(num_ranks)]
    for index in longest_first(tokens).tolist():
        total, ranks[index] = heap[0]
        heapreplace(heap, (total + num_tokens[index], int(ranks[index])))
    return ranks


def owners_of(headers: Sequence[GroupHeader], num_ranks: int) -> Integers:
    return owners([sum(header.lengths) for header in headers], num_ranks)


def share(headers: Sequence[GroupHeader], num_ranks: int, rank: int) -> tuple[GroupHeader, ...]:
    """The headers of this rank's groups, in the order of the batch."""
    ranks = owners_of(headers, num_ranks)
    return tuple(header for header, owner in zip(headers, ranks, strict=True) if owner == rank)
