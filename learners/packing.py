"""Packing: which trajectories share a micro-batch.

Invariant: each trajectory is in exactly one micro-batch, no micro-batch of several trajectories
exceeds the limit, and every rank gets the same number of them (with fewer, a rank would leave the
others' collectives waiting).

A trajectory that is longer than the limit has a micro-batch of its own. It is not left out, since
what is trained would then have other lengths than what was sampled.

Longest first into the cheapest bin with room. Karmarkar-Karp, which verl and ROLL use, balances
without knowing the limit, and exceeds it where the bins are nearly full; this keeps the limit,
comes close in balance, and handles as many trajectories at a time as there are bins.
Shapes: S trajectories, from the longest to the shortest; B bins.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

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
        ConfigError: there are fewer trajectories than ranks.
    """
    if not lengths or len(lengths) < num_ranks:
        raise ConfigError(f"{len(lengths)} trajectories cannot be shared by {num_ranks} ranks")
    ranked = _longest_first(lengths, cost)
    num_bins = num_ranks * -(-_num_needed(lengths, max_tokens) // num_ranks)
    while (bin_of := _fill(ranked, max_tokens, num_bins)) is None:
        num_bins += num_ranks
    bins, spent = _bins(ranked, bin_of, num_bins)
    return [[bins[b] for b in shared] for shared in _share(spent, num_ranks).tolist()]


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
    ranked = [_longest_first(share, cost) for share in shares]
    num_bins = max(_num_needed(share, max_tokens) for share in shares)
    while True:
        filled = [_fill(of_rank, max_tokens, num_bins) for of_rank in ranked]
        bin_of = [of_rank for of_rank in filled if of_rank is not None]
        if len(bin_of) == len(shares):
            break
        num_bins += 1
    pairs = zip(ranked, bin_of, strict=True)
    return [_bins(of_rank, its_bins, num_bins)[0] for of_rank, its_bins in pairs]


class _Ranked(NamedTuple):
    """[S] each: indices, lengths and costs."""

    order: Integers
    lengths: Integers
    costs: Costs


def _longest_first(lengths: Sequence[int], cost: Cost) -> _Ranked:
    given = np.asarray(lengths, dtype=np.int64)
    order = np.argsort(-given, kind="stable")
    return _Ranked(order, given[order], cost(given[order]))


def _num_needed(lengths: Sequence[int], max_tokens: int) -> int:
    """Micro-batches at least: those of long trajectories, and as many as the others fill."""
    num_alone = sum(length > max_tokens for length in lengths)
    others = sum(length for length in lengths if length <= max_tokens)
    return num_alone + -(-others // max_tokens)


def _bins(ranked: _Ranked, bin_of: Integers, num_bins: int) -> tuple[list[list[int]], Costs]:
    """The indices in each bin, longest first, and [B] its cost; the most expensive bin first."""
    members = ranked.order[np.argsort(bin_of, kind="stable")].tolist()
    ends = np.bincount(bin_of, minlength=num_bins).cumsum()
    starts = np.concatenate(([0], ends[:-1]))
    spent = np.zeros(num_bins)
    np.add.at(spent, bin_of, ranked.costs)
    turns = np.argsort(-spent, kind="stable")
    bounds = zip(starts[turns].tolist(), ends[turns].tolist(), strict=True)
    return [members[start:end] for start, end in bounds], spent[turns]


def _fill(ranked: _Ranked, max_tokens: int, num_bins: int) -> Integers | None:
    """[S] each trajectory's bin, the cheapest with room for it, or one of its own if it is longer
    than every bin; None if one finds no room."""
    _, lengths, costs = ranked
    start = int((lengths > max_tokens).sum())
    spent, room = np.zeros(num_bins), np.full(num_bins, max_tokens)
    spent[:start], room[:start] = costs[:start], 0
    bin_of = np.arange(len(lengths))
    while start < len(lengths):
        with_room = np.flatnonzero(room >= lengths[start])
        if not len(with_room):
            return None
        cheapest = with_room[np.argsort(spent[with_room], kind="stable")][: len(lengths) - start]
        before = spent[cheapest]
        after = before + costs[start : start + len(cheapest)]
        # One to a bin, until a bin that got one is cheaper than the next.
        is_overtaken = before[1:] > np.minimum.accumulate(after)[:-1]
        num_placed = int(is_overtaken.argmax()) + 1 if is_overtaken.any() else len(cheapest)
        chosen, end = cheapest[:num_placed], start + num_placed
        bin_of[start:end] = chosen
        spent[chosen] = after[:num_placed]
        room[chosen] -= lengths[start:end]
        start = end
    return bin_of


def _share(spent: Costs, num_ranks: int) -> Integers:
    """[rank, B / ranks] bins: in turns the most expensive that are left, one to each rank, the
    most expensive to the rank with least cost."""
    turns = np.arange(len(spent)).reshape(-1, num_ranks)
    shares = np.empty_like(turns)
    totals = np.zeros(num_ranks)
    for i, bins in enumerate(turns):
        ranks = np.argsort(totals, kind="stable")
        shares[i, ranks] = bins
        totals[ranks] += spent[bins]
    return shares.T
