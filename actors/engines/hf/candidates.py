"""What the running requests record of the tokens that they might have had instead: what truncation
left, and the likeliest ones.

Invariant: the record of row i belongs to the i-th running request, as in `records.py`; rows that
ask for nothing have none. Shapes: n rows, M kept tokens of all of them.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actors.engines.hf.compaction import Compaction
from actors.engines.hf.sampling import Sampled
from streamrl.types import SamplingParams, TokenSets, TopLogprobs


@dataclass(frozen=True, eq=False)
class _Row:
    """Of one request: an array for each token sampled so far."""

    keeps_mask: bool
    num_top: int
    kept: list[NDArray[Any]] = field(default_factory=list)
    top_ids: list[NDArray[Any]] = field(default_factory=list)
    top_logprobs: list[NDArray[Any]] = field(default_factory=list)


class CandidateRecords:
    """Rows open at the end."""

    def __init__(self) -> None:
        self._rows: list[_Row] = []

    @property
    def keeps_mask(self) -> bool:
        return any(row.keeps_mask for row in self._rows)

    @property
    def num_top(self) -> int:
        """The most that a row asks for."""
        return max((row.num_top for row in self._rows), default=0)

    def open(self, sampling: SamplingParams) -> None:
        # A greedy token has its log-probability over the whole vocabulary.
        keeps_mask = sampling.keep_sampling_mask and sampling.temperature > 0
        self._rows.append(_Row(keeps_mask, sampling.num_top_logprobs))

    def append(self, first: int, sampled: Sampled) -> None:
        """One token of the rows first, first + 1, ..."""
        if sampled.kept is not None:
            owners, token_ids = sampled.kept.cpu().numpy().T
            for i, ids in enumerate(_by_owner(owners, token_ids, len(sampled.token_ids))):
                if self._rows[first + i].keeps_mask:
                    self._rows[first + i].kept.append(ids)
        if sampled.top is not None:
            logprobs, token_ids = (column.cpu().numpy() for column in sampled.top)
            for row, values, ids in zip(self._rows[first:], logprobs, token_ids, strict=True):
                if row.num_top:
                    is_possible = np.isfinite(values[: row.num_top])
                    row.top_ids.append(ids[: row.num_top][is_possible])
                    row.top_logprobs.append(values[: row.num_top][is_possible])

    def sets(self, row: int) -> tuple[TokenSets | None, TopLogprobs | None]:
        """The mask and the likeliest tokens, each if it was asked for."""
        own = self._rows[row]
        mask = TokenSets.of(own.kept) if own.keeps_mask else None
        top = TopLogprobs.of(own.top_ids, own.top_logprobs) if own.num_top else None
        return mask, top

    def compact(self, moves: Compaction) -> None:
        moves.apply(self._rows)


def _by_owner(
    owners: NDArray[np.int64], token_ids: NDArray[np.int64], num_rows: int
) -> list[NDArray[np.int32]]:
    ends = np.searchsorted(owners, np.arange(1, num_rows))
    return np.split(token_ids.astype(np.int32), ends)
