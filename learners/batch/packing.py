"""Packing: which of a rank's trajectories share a micro-batch.

Invariant: each trajectory is in exactly one micro-batch, no micro-batch of several trajectories
exceeds the limit, and every rank gets the same number of them (with fewer, a rank would leave the
others' collectives waiting).

A trajectory that is longer than the limit has a micro-batch of its own. It is not left out, since
what is trained would then have other lengths than what was sampled.

Longest first into the bin with most room. Karmarkar-Karp, which verl and ROLL use, balances without
knowing the limit, and exceeds it where the bins are nearly full; this keeps the limit, comes close
in balance, and takes a heap's time. A rank fills its own bins; of the others it needs to know how
many they take, which follows from their lengths without filling where there is room enough. Which
rank has which trajectories, `share` says.

`beside_each_other`: siblings, which are trajectories that begin alike, in one micro-batch compute
that once. Balanced micro-batches have the siblings of a group spread over all of them. Here they
are laid side by side, and the row is cut into as many parts.

Invariant: as many micro-batches, no trajectory in two, and none of several trajectories with more
tokens to compute than the limit. The cut is taken only where the fullest micro-batch has fewer left
than that of the balanced ones, so a rank that others wait for never gets slower.
Shapes: S trajectories of the batch.

`owners`: the groups of a batch, divided among the ranks by their headers. A group belongs to one
rank, which alone fetches its payload; the plan is a function of the headers and the number of
ranks, so every rank makes the same one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapreplace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from learners.batch.micro_batch import MOST, leaders_of
from streamrl.errors import ConfigError
from streamrl.types import GroupHeader

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


Bins: TypeAlias = list[list[int]]


@dataclass(frozen=True, eq=False)
class Beginnings:
    """The prompts of a batch's trajectories."""

    leaders: Integers
    """[S] the first trajectory with the same prompt."""
    lengths: Integers
    """[S] tokens of the prompt."""

    @classmethod
    def of(cls, prompts: Sequence[bytes], lengths: Sequence[int]) -> "Beginnings":
        """Args:
        prompts: [S] the content of each.
        lengths: [S] tokens of it.
        """
        return cls(leaders_of(prompts), np.array(lengths, np.int64))

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
