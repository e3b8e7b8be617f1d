"""Who trains what: the groups of a batch, divided among the ranks by their headers.

Invariant: a group belongs to one rank, which alone fetches its payload; the plan is a function of
the headers and the number of ranks, so every rank makes the same one.
"""

from collections.abc import Sequence
from heapq import heapreplace

import numpy as np

from learners.packing.bins import Integers, longest_first
from streamrl.types import GroupHeader

_MANY_RANKS = 32


def owners(num_tokens: Sequence[int], num_ranks: int) -> Integers:
    """The rank of each group by its tokens: those with most first, to the rank with the fewest."""
    tokens = np.asarray(num_tokens, np.int64)
    order = longest_first(tokens)
    # A rank's key is its tokens, with its number in the lowest bits.
    num_bits = num_ranks.bit_length()
    deal = _one_by_one if num_ranks < _MANY_RANKS else _by_turns
    ranks = np.empty_like(tokens)
    ranks[order] = deal(tokens[order] << num_bits, num_ranks) & ((1 << num_bits) - 1)
    return ranks


def _one_by_one(tokens: Integers, num_ranks: int) -> Integers:
    """The key of the rank that gets each group, before it gets it."""
    heap = list(range(num_ranks))
    return np.array([heapreplace(heap, heap[0] + num) for num in tokens.tolist()], np.int64)


def _by_turns(tokens: Integers, num_ranks: int) -> Integers:
    """The same in turns, which deal one group to each rank that has no more tokens than the
    emptiest will have: hardly worse balanced, and in less time for many ranks."""
    keys, dealt, begin = np.arange(num_ranks), np.empty_like(tokens), 0
    while begin < len(tokens):
        end = begin + int(keys.searchsorted(keys[0] + tokens[begin], "right"))
        turn = tokens[begin:end]
        emptiest = keys[: len(turn)]
        dealt[begin:end] = emptiest
        emptiest += turn
        keys.sort()
        begin = end
    return dealt


def owners_of(headers: Sequence[GroupHeader], num_ranks: int) -> Integers:
    """The rank of each group."""
    return owners([sum(header.lengths) for header in headers], num_ranks)


def share(headers: Sequence[GroupHeader], num_ranks: int, rank: int) -> tuple[GroupHeader, ...]:
    """The headers of this rank's groups, in the order of the batch."""
    ranks = owners_of(headers, num_ranks)
    return tuple(header for header, owner in zip(headers, ranks, strict=True) if owner == rank)
