"""Who trains what: the groups of a batch, divided among the ranks by their headers.

Invariant: a group belongs to one rank, which alone fetches its payload; the plan is a function of
the headers and the number of ranks, so every rank makes the same one.
"""

from collections.abc import Sequence
from heapq import heapreplace

from streamrl.types import GroupHeader


def owners(num_tokens: Sequence[int], num_ranks: int) -> list[int]:
    """The rank of each group by its tokens: those with most first, to the rank with the fewest."""
    # A rank's key is its tokens, with its number in the lowest bits.
    num_bits = num_ranks.bit_length()
    mask = (1 << num_bits) - 1
    heap = list(range(num_ranks))
    ranks = [0] * len(num_tokens)
    for i in sorted(range(len(num_tokens)), key=num_tokens.__getitem__, reverse=True):
        ranks[i] = heap[0] & mask
        heapreplace(heap, heap[0] + (num_tokens[i] << num_bits))
    return ranks


def owners_of(headers: Sequence[GroupHeader], num_ranks: int) -> list[int]:
    """The rank of each group."""
    return owners([sum(header.lengths) for header in headers], num_ranks)


def share(headers: Sequence[GroupHeader], num_ranks: int, rank: int) -> tuple[GroupHeader, ...]:
    """The headers of this rank's groups, in the order of the batch."""
    ranks = owners_of(headers, num_ranks)
    return tuple(header for header, owner in zip(headers, ranks, strict=True) if owner == rank)
