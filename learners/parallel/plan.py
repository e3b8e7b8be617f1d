"""Who trains what: the groups of a batch, divided among the ranks by their headers.

Invariant: a group belongs to one rank, which alone fetches its payload; the plan is a function of
the headers and the number of ranks, so every rank makes the same one.
"""

import heapq
from collections.abc import Sequence

from streamrl.types import GroupHeader


def owners(headers: Sequence[GroupHeader], num_ranks: int) -> tuple[int, ...]:
    """The rank of each group: those with most tokens first, to the rank with the fewest."""
    order = sorted(range(len(headers)), key=lambda i: -sum(headers[i].lengths))
    load = [(0, rank) for rank in range(num_ranks)]
    rank_of: dict[int, int] = {}
    for i in order:
        num_tokens, rank = load[0]
        heapq.heapreplace(load, (num_tokens + sum(headers[i].lengths), rank))
        rank_of[i] = rank
    return tuple(rank_of[i] for i in range(len(headers)))


def share(headers: Sequence[GroupHeader], num_ranks: int, rank: int) -> tuple[GroupHeader, ...]:
    """The headers of this rank's groups, in the order of the batch."""
    ranks = owners(headers, num_ranks)
    return tuple(header for header, owner in zip(headers, ranks, strict=True) if owner == rank)
