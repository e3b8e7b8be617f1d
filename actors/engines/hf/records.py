"""The tokens sampled so far by the running rows, as columns, so that a step has no loop over rows.

Invariant: row i of every column belongs to the i-th running request. Shapes: n running rows, M
tokens of the longest completion so far (columns grow).
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from actors.engines.hf.candidates import CandidateRecords
from actors.engines.hf.compaction import Compaction
from actors.engines.hf.sampling import Sampled
from streamrl.types import Completion, FinishReason, SamplingParams

_FIRST_CAPACITY = 64


class Records:
    """Token ids, log-probabilities and versions [slots, M]; lengths and sampling [slots]."""

    def __init__(self, num_slots: int) -> None:
        self.size = 0
        self.candidates = CandidateRecords()
        self.counts = np.zeros(num_slots, dtype=np.int64)
        self.prompt_lengths = np.zeros(num_slots, dtype=np.int64)
        self.limits = np.zeros(num_slots, dtype=np.int64)
        self.offsets = np.zeros(num_slots, dtype=np.int64)
        self.minimums = np.zeros(num_slots, dtype=np.int64)
        self.temperature = np.zeros(num_slots, dtype=np.float32)
        self.top_k = np.zeros(num_slots, dtype=np.int64)
        self.top_p = np.zeros(num_slots, dtype=np.float32)
        self.stop_set = np.zeros(num_slots, dtype=np.int64)
        self._columns = (
            self.counts,
            self.prompt_lengths,
            self.limits,
            self.offsets,
            self.minimums,
            self.temperature,
            self.top_k,
            self.top_p,
            self.stop_set,
        )
        shape = (num_slots, _FIRST_CAPACITY)
        self._token_ids = np.zeros(shape, dtype=np.int32)
        self._logprobs = np.zeros(shape, dtype=np.float32)
        self._versions = np.zeros(shape, dtype=np.int32)

    def open(
        self, prompt_length: int, limit: int, sampling: SamplingParams, stop_set: int, offset: int
    ) -> None:
        """Adds a last row whose completion may have `limit` tokens; `offset` is the distance of
        their positions in the position embedding from those in the row."""
        row = self.size
        self.offsets[row] = offset
        self.counts[row], self.prompt_lengths[row], self.limits[row] = 0, prompt_length, limit
        self.minimums[row], self.stop_set[row] = sampling.min_new_tokens, stop_set
        self.temperature[row] = sampling.temperature
        self.top_k[row], self.top_p[row] = sampling.top_k, sampling.top_p
        self.candidates.open(sampling)
        self.size += 1

    def append(self, first: int, sampled: Sampled, policy_version: int) -> None:
        """Appends one token to the rows first, first + 1, ..."""
        token_ids = sampled.token_ids.cpu().numpy()
        stop = first + len(token_ids)
        counts = self.counts[first:stop]
        self._reserve(int(counts.max()) + 1)
        rows = np.arange(first, stop)
        self._token_ids[rows, counts] = token_ids
        self._logprobs[rows, counts] = sampled.logprobs.cpu().numpy()
        self._versions[rows, counts] = policy_version
        counts += 1
        self.candidates.append(first, sampled)

    @property
    def last_token_ids(self) -> NDArray[np.int32]:
        rows = np.arange(self.size)
        last: NDArray[np.int32] = self._token_ids[rows, self.counts[: self.size] - 1]
        return last

    @property
    def positions(self) -> NDArray[np.int64]:
        """The position of each row's last token [n]."""
        lengths: NDArray[np.int64] = self.prompt_lengths[: self.size] + self.counts[: self.size]
        return lengths - 1

    @property
    def embedded_positions(self) -> NDArray[np.int64]:
        """The same in the position embedding [n]."""
        embedded: NDArray[np.int64] = self.positions + self.offsets[: self.size]
        return embedded

    @property
    def is_full(self) -> NDArray[np.bool_]:
        full: NDArray[np.bool_] = self.counts[: self.size] >= self.limits[: self.size]
        return full

    def token_ids(self, row: int) -> NDArray[np.int32]:
        sampled: NDArray[np.int32] = self._token_ids[row, : self.counts[row]]
        return sampled

    def completion(self, row: int, finish_reason: FinishReason) -> Completion:
        count = self.counts[row]
        sampling_mask, top_logprobs = self.candidates.sets(row)
        return Completion(
            token_ids=self._token_ids[row, :count].copy(),
            logprobs=self._logprobs[row, :count].copy(),
            policy_versions=self._versions[row, :count].copy(),
            finish_reason=finish_reason,
            sampling_mask=sampling_mask,
            top_logprobs=top_logprobs,
        )

    def compact(self, moves: Compaction) -> None:
        """Removes the rows that leave."""
        self.size, targets, sources = moves
        self.candidates.compact(moves)
        for column in self._columns:
            column[targets] = column[sources]
        longest = int(self.counts[targets].max(initial=0))
        for matrix in (self._token_ids, self._logprobs, self._versions):
            matrix[targets, :longest] = matrix[sources, :longest]

    def _reserve(self, length: int) -> None:
        capacity = self._token_ids.shape[1]
        if length > capacity:
            self._token_ids = _wider(self._token_ids, 2 * capacity)
            self._logprobs = _wider(self._logprobs, 2 * capacity)
            self._versions = _wider(self._versions, 2 * capacity)


def _wider(old: NDArray[Any], capacity: int) -> NDArray[Any]:
    wider = np.zeros((len(old), capacity), dtype=old.dtype)
    wider[:, : old.shape[1]] = old
    return wider
