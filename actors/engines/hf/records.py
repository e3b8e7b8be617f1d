"""The tokens sampled so far by the running rows, as columns, so that a step has no loop over rows.

Invariant: row i of every column belongs to the i-th running request. Shapes: n running rows, M
tokens of the longest completion so far (columns grow), L decoder layers, K experts of a token.

So it is with the record of the tokens that they might have had instead, what truncation left and
the likeliest ones; rows that ask for nothing have none.

`ExpertWatch`: which experts the running rows' tokens were given to, as the model's routers say in
each pass. A token keeps the experts of the pass that its log-probability, or that of the token
behind it, is of; passes that only fill a cache again record nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from actors.engines.hf.cache import Compaction
from actors.engines.hf.sampling import Sampled
from streamrl.algorithms.routing import choosing, layer_of, routers
from streamrl.types import (
    Completion,
    FinishReason,
    RoutedExperts,
    SamplingParams,
    TokenSets,
    TopLogprobs,
)

Experts = NDArray[np.int16]


@dataclass(frozen=True, eq=False)
class _Row:
    """Of one request: an array for each token sampled so far."""

    keeps_mask: bool
    num_top: int
    kept: list[NDArray[Any]] = field(default_factory=list)
    top_ids: list[NDArray[Any]] = field(default_factory=list)
    top_logprobs: list[NDArray[Any]] = field(default_factory=list)
    experts: list[Experts] | None = None
    """[P, L, K] of its prompt, then [1, L, K] of each token; None if it asks for no record."""


class RowRecords:
    """What rows ask for beside the columns: rows open at the end."""

    def __init__(self) -> None:
        self._rows: list[_Row] = []

    @property
    def keeps_mask(self) -> bool:
        return any(row.keeps_mask for row in self._rows)

    @property
    def num_top(self) -> int:
        """The most that a row asks for."""
        return max((row.num_top for row in self._rows), default=0)

    @property
    def keep_experts(self) -> bool:
        return any(row.experts is not None for row in self._rows)

    def open(self, sampling: SamplingParams, prompt: Experts | None) -> None:
        """Adds a last row, with the experts of its prompt, if they are known."""
        # A greedy token has its log-probability over the whole vocabulary.
        keeps_mask = sampling.keep_sampling_mask and sampling.temperature > 0
        experts = [prompt] if prompt is not None and sampling.keep_routed_experts else None
        self._rows.append(_Row(keeps_mask, sampling.num_top_logprobs, experts=experts))

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

    def append_experts(self, experts: Sequence[Experts]) -> None:
        """Of the one token that each row gave the model."""
        for row, own in zip(self._rows, experts, strict=True):
            if row.experts is not None:
                row.experts.append(own)

    def experts(self, row: int, num_tokens: int) -> RoutedExperts | None:
        """Of the row's prompt and completion, `num_tokens` in all."""
        own = self._rows[row].experts
        return None if own is None else RoutedExperts.of(np.concatenate(own), num_tokens)

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


_FIRST_CAPACITY = 64


class Records:
    """Token ids, log-probabilities and versions [slots, M]; lengths and sampling [slots]."""

    def __init__(self, num_slots: int) -> None:
        self.size = 0
        self.rows = RowRecords()
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
        self,
        prompt_length: int,
        limit: int,
        sampling: SamplingParams,
        stop_set: int,
        offset: int,
        experts: Experts | None,
    ) -> None:
        """Adds a last row whose completion may have `limit` tokens; `offset` is the distance of
        their positions in the position embedding from those in the row."""
        row = self.size
        self.offsets[row] = offset
        self.counts[row], self.prompt_lengths[row], self.limits[row] = 0, prompt_length, limit
        self.minimums[row], self.stop_set[row] = sampling.min_new_tokens, stop_set
        self.temperature[row] = sampling.temperature
        self.top_k[row], self.top_p[row] = sampling.top_k, sampling.top_p
        self.rows.open(sampling, experts)
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
        self.rows.append(first, sampled)

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
        sampling_mask, top_logprobs = self.rows.sets(row)
        return Completion(
            token_ids=self._token_ids[row, :count].copy(),
            logprobs=self._logprobs[row, :count].copy(),
            policy_versions=self._versions[row, :count].copy(),
            finish_reason=finish_reason,
            sampling_mask=sampling_mask,
            top_logprobs=top_logprobs,
            routed_experts=self.rows.experts(row, int(self.prompt_lengths[row] + count)),
        )

    def compact(self, moves: Compaction) -> None:
        """Removes the rows that leave."""
        self.size, targets, sources = moves
        self.rows.compact(moves)
        for column in self._columns:
            column[targets] = column[sources]
        longest = int(self.counts[targets].max(initial=0))
        for matrix in (self._token_ids, self._logprobs, self._versions):
            matrix[targets, :longest] = matrix[sources, :longest]

    def _reserve(self, length: int) -> None:
        capacity = self._token_ids.shape[1]
        if length > capacity:
            more = ((0, 0), (0, capacity))
            self._token_ids = np.pad(self._token_ids, more)
            self._logprobs = np.pad(self._logprobs, more)
            self._versions = np.pad(self._versions, more)


class ExpertWatch:
    """Of one model, whose routers tell it what they take."""

    def __init__(self, model: PreTrainedModel) -> None:
        """
        Raises:
            ConfigError: the model has no routers, or ones that are not known.
        """
        self._num_layers: int = model.config.get_text_config().num_hidden_layers
        self._last: dict[int, torch.Tensor] = {}
        for name, router in routers(model, "algorithm.router_replay: was not off").items():
            choosing(router, partial(self._keep, layer_of(name)[1]))

    def _keep(self, layer: int, experts: torch.Tensor) -> torch.Tensor:
        self._last[layer] = experts
        return experts

    def of_rows(self, lengths: Sequence[int], *, is_left_padded: bool) -> list[Experts]:
        """[length, L, K] of each row of the last pass, without its padding."""
        width = {experts.shape[-1] for experts in self._last.values()}.pop()
        num_tokens = len(next(iter(self._last.values())))
        experts = np.zeros((num_tokens, self._num_layers, width), np.int16)
        for layer, taken in self._last.items():
            experts[:, layer] = taken.cpu().numpy()
        rows = experts.reshape(len(lengths), -1, *experts.shape[1:])
        if is_left_padded:
            return [row[len(row) - n :] for row, n in zip(rows, lengths, strict=True)]
        return [row[:n] for row, n in zip(rows, lengths, strict=True)]
