"""Packing: which of a rank's trajectories share a micro-batch.

Invariant: each trajectory is in exactly one micro-batch, no micro-batch of several trajectories
exceeds the limit, and every rank gets the same number of them (with fewer, a rank would leave the
others' collectives waiting).

A trajectory that is longer than the limit has a micro-batch of its own. It is not left out, since
what is trained would then have other lengths than what was sampled.

Longest first into the bin with most room. Karmarkar-Karp, which verl and ROLL use, balances without
knowing the limit, and exceeds it where the bins are nearly full; this keeps the limit, comes close
in balance, and takes a heap's time. Which rank has which trajectories, `learners.parallel.plan`
says.
"""

from collections.abc import Sequence
from heapq import heapreplace

from streamrl.errors import ConfigError


def pack(shares: Sequence[Sequence[int]], max_tokens: int) -> list[list[list[int]]]:
    """Indices into each rank's lengths, as [rank][micro-batch][trajectory].

    Uses as few micro-batches as longest-first needs on every rank, and balances their tokens. Those
    with most tokens come first, so that the ranks compute alike ones at the same time. A rank may
    have empty ones.

    Raises:
        ConfigError: there is no trajectory at all.
    """
    if not any(shares):
        raise ConfigError("a batch without trajectories cannot be packed")
    orders = [sorted(range(len(s)), key=s.__getitem__, reverse=True) for s in shares]
    num_bins = max(_num_needed(share, max_tokens) for share in shares)
    while True:
        pairs = zip(shares, orders, strict=True)
        filled = [_fill(share, order, max_tokens, num_bins) for share, order in pairs]
        bins = [of_rank for of_rank in filled if of_rank is not None]
        if len(bins) == len(shares):
            return bins
        num_bins += 1


def _num_needed(lengths: Sequence[int], max_tokens: int) -> int:
    """Micro-batches at least: those of long trajectories, and as many as the others fill."""
    others = lengths
    if max(lengths, default=0) > max_tokens:
        others = [length for length in lengths if length <= max_tokens]
    return len(lengths) - len(others) - (-sum(others) // max_tokens)


def _fill(
    lengths: Sequence[int], order: Sequence[int], max_tokens: int, num_bins: int
) -> list[list[int]] | None:
    """The indices in each bin, the fullest bin first; None if one finds no room."""
    first = order[:num_bins]
    bins = [[index] for index in first] + [[] for _ in range(num_bins - len(first))]
    # A bin's key is its tokens, with its number in the lowest bits: the smallest has most room.
    num_bits = num_bins.bit_length()
    mask = (1 << num_bits) - 1
    keys = [(lengths[index] << num_bits) | b for b, index in enumerate(first)]
    heap = [*range(len(first), num_bins), *reversed(keys)]
    most = (max_tokens << num_bits) | mask
    for index in order[num_bins:]:
        key = heap[0] + (lengths[index] << num_bits)
        if key > most:
            return None
        bins[key & mask].append(index)
        heapreplace(heap, key)
    return [bins[key & mask] for key in sorted(heap, reverse=True)]
