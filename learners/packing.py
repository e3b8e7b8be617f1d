"""Packing: which trajectories share a micro-batch.

Invariant: each trajectory is in exactly one micro-batch, no micro-batch of several trajectories
exceeds the limit, and every rank gets the same number of them (with fewer, a rank would leave the
others' collectives waiting).

A trajectory that is longer than the limit has a micro-batch of its own. It is not left out, since
what is trained would then have other lengths than what was sampled.

Longest first into the cheapest bin with room. Karmarkar-Karp, which verl and ROLL use, balances
without knowing the limit and exceeds it about one time in twenty; this keeps the limit and comes
close in balance.
"""

import heapq
from collections.abc import Callable, Sequence

from streamrl.errors import ConfigError

Cost = Callable[[int], float]


def tokens(length: int) -> float:
    """Cost in tokens; exact where linear layers dominate."""
    return float(length)


def flops(hidden_size: int) -> Cost:
    """Cost in floating-point operations of a layer, up to a factor: linear 12 h^2 per token (four
    attention and eight MLP matrices' worth), attention 2 h per pair of tokens."""
    return lambda length: 12.0 * hidden_size**2 * length + 2.0 * hidden_size * length**2


def pack(
    lengths: Sequence[int], max_tokens: int, *, num_ranks: int = 1, cost: Cost = tokens
) -> list[list[list[int]]]:
    """Indices into `lengths`, as [rank][micro-batch][trajectory].

    Uses as few micro-batches as longest-first needs, and balances their cost. With several ranks a
    micro-batch may be empty.

    Raises:
        ConfigError: there are fewer trajectories than ranks.
    """
    if not lengths or len(lengths) < num_ranks:
        raise ConfigError(f"{len(lengths)} trajectories cannot be shared by {num_ranks} ranks")
    order = _longest_first(lengths)
    num_bins = num_ranks * -(-_num_needed(lengths, max_tokens) // num_ranks)
    while (bins := _fill(order, lengths, max_tokens, num_bins, cost)) is None:
        num_bins += num_ranks
    return _share(bins, lengths, num_ranks, cost)


def pack_shares(
    shares: Sequence[Sequence[int]], max_tokens: int, *, cost: Cost = tokens
) -> list[list[list[int]]]:
    """As `pack`, for ranks that have their trajectories already: indices into each one's lengths.

    Raises:
        ConfigError: there is none at all.
    """
    lengths = [length for share in shares for length in share]
    if not lengths:
        raise ConfigError("a batch without trajectories cannot be packed")
    orders = [_longest_first(share) for share in shares]
    num_bins = max(_num_needed(share, max_tokens) for share in shares)
    while True:
        filled = [
            _fill(order, share, max_tokens, num_bins, cost)
            for order, share in zip(orders, shares, strict=True)
        ]
        bins = [of_rank for of_rank in filled if of_rank is not None]
        if len(bins) == len(shares):
            break
        num_bins += 1
    return [_share(b, share, 1, cost)[0] for b, share in zip(bins, shares, strict=True)]


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))


def _num_needed(lengths: Sequence[int], max_tokens: int) -> int:
    """Micro-batches at least: those of long trajectories, and as many as the others fill."""
    num_alone = sum(length > max_tokens for length in lengths)
    others = sum(length for length in lengths if length <= max_tokens)
    return num_alone + -(-others // max_tokens)


def _fill(
    order: Sequence[int], lengths: Sequence[int], max_tokens: int, num_bins: int, cost: Cost
) -> list[list[int]] | None:
    """Longest first into the cheapest bin with room, or into one of its own if it is longer than
    every bin; None if one finds no room."""
    alone = [[i] for i in order if lengths[i] > max_tokens]
    num_shared = num_bins - len(alone)
    bins: list[list[int]] = [[] for _ in range(num_shared)]
    room = [max_tokens] * num_shared
    cheapest = [(0.0, b) for b in range(num_shared)]
    for i in order[len(alone) :]:
        full = []
        while cheapest and room[cheapest[0][1]] < lengths[i]:
            full.append(heapq.heappop(cheapest))
        if not cheapest:
            return None
        spent, b = heapq.heappop(cheapest)
        bins[b].append(i)
        room[b] -= lengths[i]
        for entry in ((spent + cost(lengths[i]), b), *full):
            heapq.heappush(cheapest, entry)
    return [*alone, *bins]


def _share(
    bins: list[list[int]], lengths: Sequence[int], num_ranks: int, cost: Cost
) -> list[list[list[int]]]:
    """The same number of bins to every rank: most expensive first, to the rank with least cost."""
    spent = [sum(cost(lengths[i]) for i in b) for b in bins]
    order = sorted(range(len(bins)), key=lambda b: -spent[b])
    per_rank = len(bins) // num_ranks
    shares: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    totals = [0.0] * num_ranks
    for b in order:
        open_ranks = [r for r in range(num_ranks) if len(shares[r]) < per_rank]
        rank = min(open_ranks, key=lambda r: totals[r])
        shares[rank].append(bins[b])
        totals[rank] += spent[b]
    return shares
