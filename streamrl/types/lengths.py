"""Response lengths: counts by length, for each outcome of the responses' groups.

Invariant: counts only grow, so the difference between two histograms of one growing sequence is the
histogram of what came in between. A length is rounded to the middle of a bucket: exact below 16
tokens, then eight buckets for each power of two, so within 1/16 of the length. Sums are exact.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache

from msgspec import Struct

from streamrl.types.reasons import DropReason


@lru_cache(maxsize=2**16)
def rounded_length(length: int) -> int:
    """The middle of the bucket of `length`: four significant bits, then a one and zeros."""
    shift = max(0, length.bit_length() - 4)
    return (length >> shift << shift) + (1 << shift >> 1)


class LengthHistogram(Struct, frozen=True, array_like=True):
    """`counts` has the number of responses by length in tokens, `num_tokens` the exact sum of
    lengths."""

    counts: dict[int, int] = {}
    num_tokens: int = 0

    @classmethod
    def of(cls, lengths: Iterable[int] | Mapping[int, int]) -> "LengthHistogram":
        """From lengths, or from counts by length, unrounded; `rounded` bounds the number of
        counts."""
        counts = Counter(lengths)
        return cls(dict(counts), sum(length * count for length, count in counts.items()))

    def rounded(self) -> "LengthHistogram":
        counts: Counter[int] = Counter()
        for length, count in self.counts.items():
            counts[rounded_length(length)] += count
        return LengthHistogram(dict(counts), self.num_tokens)

    def __add__(self, other: "LengthHistogram") -> "LengthHistogram":
        counts = Counter(self.counts) + Counter(other.counts)
        return LengthHistogram(dict(counts), self.num_tokens + other.num_tokens)

    def __sub__(self, other: "LengthHistogram") -> "LengthHistogram":
        """`other` is contained in this one."""
        counts = Counter(self.counts) - Counter(other.counts)
        return LengthHistogram(dict(counts), self.num_tokens - other.num_tokens)

    @property
    def num_responses(self) -> int:
        return sum(self.counts.values())

    @property
    def mean(self) -> float:
        """0 if there is no response."""
        return self.num_tokens / max(1, self.num_responses)

    @property
    def longest(self) -> int:
        return max(self.counts, default=0)

    def quantile(self, fraction: float) -> int:
        """The smallest length that at least `fraction` of the responses do not exceed."""
        at_most = fraction * self.num_responses
        seen = 0
        for length in sorted(self.counts):
            seen += self.counts[length]
            if seen >= at_most:
                return length
        return 0


class ResponseLengths(Struct, frozen=True, array_like=True):
    """The lengths of all responses that were put into a buffer, and of those with an outcome.

    A response becomes `trained` when the learner advances, and stops being so if a learner attaches
    and its group waits again: sampled = trained + dropped + waiting. `dropped` has the responses of
    groups that reached the buffer, or that a generator released with their lengths; other leases
    that ended without a group have no known length. `discarded` are responses of siblings beyond
    `generator.group_size` that were not kept: the learner counts them, the buffer does not.
    """

    sampled: LengthHistogram = LengthHistogram()
    trained: LengthHistogram = LengthHistogram()
    dropped: dict[DropReason, LengthHistogram] = {}
    discarded: LengthHistogram = LengthHistogram()

    @property
    def all_dropped(self) -> LengthHistogram:
        return sum(self.dropped.values(), self.discarded)

    def dropped_because(self, reason: DropReason) -> LengthHistogram:
        return self.dropped.get(reason, LengthHistogram())

    def since(self, earlier: "ResponseLengths") -> "ResponseLengths":
        """What came after `earlier`, which this contains."""
        return ResponseLengths(
            self.sampled - earlier.sampled,
            self.trained - earlier.trained,
            {why: n - earlier.dropped_because(why) for why, n in self.dropped.items()},
            self.discarded - earlier.discarded,
        )

    def with_discarded(self, discarded: LengthHistogram) -> "ResponseLengths":
        """These, with responses added that were sampled but not put."""
        return ResponseLengths(self.sampled + discarded, self.trained, self.dropped, discarded)

    def contains(self, earlier: "ResponseLengths") -> bool:
        """Whether no count of `earlier` is larger than here."""
        pairs = (
            (self.sampled, earlier.sampled),
            (self.trained, earlier.trained),
            (self.all_dropped, earlier.all_dropped),
        )
        return all(Counter(now.counts) >= Counter(then.counts) for now, then in pairs)

    def rounded(self) -> "ResponseLengths":
        dropped = {reason: lengths.rounded() for reason, lengths in self.dropped.items()}
        return ResponseLengths(
            self.sampled.rounded(), self.trained.rounded(), dropped, self.discarded.rounded()
        )


def length_distance(one: LengthHistogram, other: LengthHistogram) -> float:
    """The Kolmogorov-Smirnov distance of two samples: max |CDF - CDF|, in [0, 1].

    0 if either is empty. Of rounded lengths it is that of their buckets, which is at most the
    distance of the lengths themselves.
    """
    if not one.counts or not other.counts:
        return 0.0
    share, num_one, num_other = 0.0, one.num_responses, other.num_responses
    distance = 0.0
    for length in sorted(one.counts.keys() | other.counts.keys()):
        share += one.counts.get(length, 0) / num_one - other.counts.get(length, 0) / num_other
        distance = max(distance, abs(share))
    return distance


def distance_p_value(distance: float, num_one: int, num_other: int) -> float:
    """The probability of a distance this large or larger between two samples of one distribution.

    The asymptotic Kolmogorov distribution, Q(x) = 2 sum over j >= 1 of (-1)^(j-1) exp(-2 j^2 x^2)
    at x = distance sqrt(n m / (n + m)) (Smirnov 1948, "Table for estimating the goodness of fit of
    empirical distributions"). Of lengths, which have ties, it is an upper bound, if each response
    is independent of the others.
    """
    if not num_one or not num_other:
        return 1.0
    x = distance * math.sqrt(num_one * num_other / (num_one + num_other))
    if x < 0.2:  # Q differs from 1 by less than 1e-10, and the series converges slowly.
        return 1.0
    terms = (math.exp(-2 * (j * x) ** 2) for j in range(1, 101))
    total = sum(term if j % 2 == 0 else -term for j, term in enumerate(terms))
    return min(1.0, max(0.0, 2 * total))
