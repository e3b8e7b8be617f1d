"""Packing: which of a rank's trajectories share a micro-batch.

Invariant: each trajectory is in exactly one micro-batch, no micro-batch of several trajectories
exceeds the limit, and every rank gets the same number of them (with fewer, a rank would leave the
others' collectives waiting).

A trajectory that is longer than the limit has a micro-batch of its own. It is not left out, since
what is trained would then have other lengths than what was sampled.

`learners.packing.siblings` may then put siblings together, in as many micro-batches.

Longest first into the bin with most room. Karmarkar-Karp, which verl and ROLL use, balances without
knowing the limit, and exceeds it where the bins are nearly full; this keeps the limit, comes close
in balance, and takes a heap's time. A rank fills its own bins; of the others it needs to know how
many they take, which follows from their lengths without filling where there is room enough. Which
rank has which trajectories, `learners.parallel.plan` says.
"""

from collections.abc import Iterator, Sequence
from heapq import heapreplace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from streamrl.errors import ConfigError

Integers: TypeAlias = NDArray[np.int64]


def pack(lengths: Integers, owners: Integers, rank: int, max_tokens: int) -> list[list[int]]:
    """Indices into `lengths`, as [micro-batch][trajectory], of those that this rank owns.

    Uses as few micro-batches as longest-first needs on every rank, and balances their tokens. Those
    with most tokens come first, so that the ranks compute alike ones at the same time. A rank may
    have empty ones.

    Args:
        lengths: [S] tokens of every rank's trajectories.
        owners: [S] the rank of each.

    Raises:
        ConfigError: there is no trajectory at all.
    """
    if not len(lengths):
        raise ConfigError("a batch without trajectories cannot be packed")
    (own,) = (owners == rank).nonzero()
    own = own[longest_first(lengths[own])]
    indices, own_lengths = own.tolist(), lengths[own].tolist()
    num_bins = _num_needed(lengths, owners, max_tokens)
    while True:
        bins = _fill(own_lengths, max_tokens, num_bins)
        others = _doubtful(lengths, owners, rank, max_tokens, num_bins)
        if bins is not None and all(_fill(other, max_tokens, num_bins) for other in others):
            return [[indices[place] for place in members] for members in bins]
        num_bins += 1


def longest_first(lengths: Integers) -> Integers:
    """Indices in order of falling lengths, equal ones in order: the same ones on every CPU."""
    return (-lengths).argsort(kind="stable")


def _num_needed(lengths: Integers, owners: Integers, max_tokens: int) -> int:
    """Micro-batches at least: those of long trajectories, and as many as the others fill."""
    if lengths.max() <= max_tokens:
        return -(-int(np.bincount(owners, lengths).max()) // max_tokens)
    is_long = lengths > max_tokens
    tokens = np.bincount(owners, lengths * ~is_long)
    return int((np.bincount(owners, is_long) - (-tokens // max_tokens)).max())


def _doubtful(
    lengths: Integers, owners: Integers, rank: int, max_tokens: int, num_bins: int
) -> Iterator[list[int]]:
    """The lengths, longest first, of each other rank that might not find room in so many bins.

    The emptiest of B bins has at most a B-th of what came before. If that leaves room for each
    trajectory after the first B, all find some.
    """
    if num_bins == 1:
        return
    keys = np.sort(((owners << 32) - lengths)[owners != rank])
    owners = (keys >> 32) + 1
    lengths = (owners << 32) - keys
    counts = np.bincount(owners)
    firsts = np.repeat(np.cumsum(counts) - counts, counts)
    before = np.cumsum(lengths) - lengths
    before -= before[firsts]
    is_tight = before + num_bins * lengths > num_bins * max_tokens
    is_tight &= np.arange(len(lengths)) - firsts >= num_bins
    for other in np.unique(owners[is_tight | (lengths > max_tokens)]):
        yield lengths[owners == other].tolist()


def _fill(lengths: Sequence[int], max_tokens: int, num_bins: int) -> list[list[int]] | None:
    """The indices in each bin, the fullest bin first; None if one finds no room."""
    bins = [[index] for index in range(min(num_bins, len(lengths)))]
    bins += [[] for _ in range(num_bins - len(bins))]
    # A bin's key is its tokens, with its number in the lowest bits: the smallest has most room.
    num_bits = num_bins.bit_length()
    mask = (1 << num_bits) - 1
    keys = [(length << num_bits) | b for b, length in enumerate(lengths[:num_bins])]
    heap = [*range(len(keys), num_bins), *reversed(keys)]
    most = (max_tokens << num_bits) | mask
    for index in range(num_bins, len(lengths)):
        key = heap[0] + (lengths[index] << num_bits)
        if key > most:
            return None
        bins[key & mask].append(index)
        heapreplace(heap, key)
    return [bins[key & mask] for key in sorted(heap, reverse=True)]
