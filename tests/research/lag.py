"""How old the groups of a step are, where an ablation sets that (`--lag`)."""

from collections.abc import Sequence
from enum import StrEnum

import numpy as np

LAG_FILE = "lag"
"""In the folder of a run whose lag was set: the value of the option."""


class Lag(StrEnum):
    """In versions; the mean is the same for both."""

    EVEN = "even"
    """Every group as old."""
    UNEVEN = "uneven"
    """Each group by itself, uniform from 0 to twice the mean."""

    def most(self, mean: int) -> int:
        """Of any group."""
        return mean if self is Lag.EVEN else 2 * mean

    def of_groups(self, num_groups: int, mean: int, rng: np.random.Generator) -> Sequence[int]:
        """Of each group of a step."""
        if self is Lag.EVEN:
            return (mean,) * num_groups
        return tuple(rng.integers(0, 2 * mean, num_groups, endpoint=True).tolist())
