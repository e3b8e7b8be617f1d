"""Packing: which trajectories share a micro-batch.

Invariant: each trajectory is in exactly one micro-batch, no micro-batch exceeds the limit, and
every rank gets the same number of them (with fewer, a rank would leave the others' collectives
waiting).

Longest first into the cheapest bin with room. Karmarkar-Karp, which verl and ROLL use, balances
without knowing the limit, and exceeds it where the bins are nearly full; this keeps the limit,
comes close in balance, and handles as many trajectories at a time as there are bins.
Shapes: S trajectories, from the longest to the shortest; B bins.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from streamrl.errors import ConfigError

Integers = NDArray[np.int64]
Costs = NDArray[np.float64]
Cost = Callable[[Integers], Costs]
"""Of trajectories, by their lengths."""


def tokens(lengths: Integers) -> Costs:
    """Cost in tokens; exact where linear layers dominate."""
    return lengths.astype(np.float64)


def flops(hidden_size: int) -> Cost:
    """Cost in floating-point operations of a layer, up to a factor: linear 12 h^2 per token (four
    attention and eight MLP matrices' worth), attention 2 h per pair of tokens."""
    return lambda lengths: 12.0 * hidden_size**2 * lengths + 2.0 * hidden_size * lengths**2


def pack(
    lengths: Sequence[int], max_tokens: int, *, num_ranks: int = 1, cost: Cost = tokens
) -> list[list[list[int]]]:
    """Indices into `lengths`, as [rank][micro-batch][trajectory].

    Uses as few micro-batches as longest-first needs, and balances their cost: those at one place
    of every rank, which the ranks compute at the same time, are the most alike. With several ranks
    a micro-batch may be empty.

    Raises:
        ConfigError: a trajectory alone exceeds `max_tokens`, or there are fewer trajectories than
            ranks.
    """
    if not lengths or len(lengths) < num_ranks:
        raise ConfigError(f"{len(lengths)} trajectories cannot be shared by {num_ranks} ranks")
    if max(lengths) > max_tokens:
        raise ConfigError(
            f"learner.max_tokens_per_micro_batch {max_tokens} cannot hold a trajectory of "
            f"{max(lengths)} tokens"
        )
    given = np.asarray(lengths, dtype=np.int64)
    order = np.argsort(-given, kind="stable")
    descending = given[order]
    costs = cost(descending)
    num_bins = num_ranks * -(-sum(lengths) // (max_tokens * num_ranks))
    while (bin_of := _fill(descending, costs, max_tokens, num_bins)) is None:
        num_bins += num_ranks
    members = order[np.argsort(bin_of, kind="stable")].tolist()
    ends = np.bincount(bin_of, minlength=num_bins).cumsum().tolist()
    bins = [members[start:end] for start, end in zip((0, *ends), ends, strict=False)]
    spent = np.zeros(num_bins)
    np.add.at(spent, bin_of, costs)
    return [[bins[b] for b in shared] for shared in _share(spent, num_ranks).tolist()]


def _fill(lengths: Integers, costs: Costs, max_tokens: int, num_bins: int) -> Integers | None:
    """[S] each trajectory's bin, the cheapest with room for it; None if one finds no room."""
    spent, room = np.zeros(num_bins), np.full(num_bins, max_tokens)
    bin_of = np.empty(len(lengths), dtype=np.int64)
    start = 0
    while start < len(lengths):
        with_room = np.flatnonzero(room >= lengths[start])
        if not len(with_room):
            return None
        ranked = with_room[np.argsort(spent[with_room], kind="stable")][: len(lengths) - start]
        before = spent[ranked]
        after = before + costs[start : start + len(ranked)]
        # One to a bin, until a bin that got one is cheaper than the next.
        is_overtaken = before[1:] > np.minimum.accumulate(after)[:-1]
        num_placed = int(is_overtaken.argmax()) + 1 if is_overtaken.any() else len(ranked)
        chosen, end = ranked[:num_placed], start + num_placed
        bin_of[start:end] = chosen
        spent[chosen] = after[:num_placed]
        room[chosen] -= lengths[start:end]
        start = end
    return bin_of


def _share(spent: Costs, num_ranks: int) -> Integers:
    """[rank, B / ranks] bins: in turns the most expensive that are left, one to each rank, the
    most expensive to the rank with least cost."""
    turns = np.argsort(-spent, kind="stable").reshape(-1, num_ranks)
    shares = np.empty_like(turns)
    totals = np.zeros(num_ranks)
    for i, bins in enumerate(turns):
        ranks = np.argsort(totals, kind="stable")
        shares[i, ranks] = bins
        totals[ranks] += spent[bins]
    return shares.T
