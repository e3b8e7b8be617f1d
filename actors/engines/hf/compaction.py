"""Which rows move when some of them leave the running batch.

Invariant: running rows are the first ones, without a gap. Only rows behind the new end move, each
into the place of one that leaves, so no place is read after it was written.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Compaction(NamedTuple):
    """Row `sources[i]` moves to `targets[i]` [k]; `size` rows stay."""

    size: int
    targets: NDArray[np.int64]
    sources: NDArray[np.int64]

    @classmethod
    def of(cls, leaves: NDArray[np.bool_]) -> "Compaction":
        """For `leaves` [n], true where a running row leaves."""
        size = len(leaves) - int(np.count_nonzero(leaves))
        return cls(size, np.flatnonzero(leaves[:size]), size + np.flatnonzero(~leaves[size:]))

    def apply(self, rows: list[Any]) -> None:
        """Moves the entries of a list with one for each row."""
        for target, source in zip(self.targets.tolist(), self.sources.tolist(), strict=True):
            rows[target] = rows[source]
        del rows[self.size :]
