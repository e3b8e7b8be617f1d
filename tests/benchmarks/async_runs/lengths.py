"""Lengths of responses: their mean and tail, and whether two samples are distributed alike."""

import math
from collections.abc import Sequence

import numpy as np

_TERMS = 100


def ks_p_value(first: Sequence[int], second: Sequence[int]) -> float:
    """The p-value of the two-sample Kolmogorov-Smirnov test; 1.0 where a sample is empty.

    The asymptotic distribution with the correction of Stephens (1970, J. R. Stat. Soc. B 32),
    as Numerical Recipes gives it; ties, which lengths have, only make p larger.

    >>> ks_p_value([1, 2, 3, 4], [1, 2, 3, 4])
    1.0
    """
    if not len(first) or not len(second):
        return 1.0
    root = math.sqrt(len(first) * len(second) / (len(first) + len(second)))
    scaled = (root + 0.12 + 0.11 / root) * ks_distance(first, second)
    # The series does not converge near 0, where its sum is 1.
    if scaled < 0.2:
        return 1.0
    terms = ((-1) ** (k - 1) * math.exp(-2 * (k * scaled) ** 2) for k in range(1, _TERMS))
    return min(1.0, max(0.0, 2 * sum(terms)))


def ks_distance(first: Sequence[int], second: Sequence[int]) -> float:
    """The largest distance between the empirical distribution functions.

    >>> ks_distance([1, 2], [3, 4])
    1.0
    """
    values = np.union1d(first, second)
    below = [np.searchsorted(np.sort(s), values, side="right") / len(s) for s in (first, second)]
    return float(np.abs(below[0] - below[1]).max())


def mean(lengths: Sequence[float]) -> float | None:
    return round(float(np.mean(lengths)), 2) if len(lengths) else None


def p99(lengths: Sequence[float]) -> float | None:
    return round(float(np.quantile(lengths, 0.99)), 1) if len(lengths) else None
