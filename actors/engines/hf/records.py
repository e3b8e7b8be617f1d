"""What the running rows have sampled so far, as columns, so that a step does not loop over rows.

Invariant: row i of every column belongs to the i-th running request. Shapes: n running rows, M
tokens of the longest completion so far (columns grow), L decoder layers, K experts of a token.

A token keeps the experts of the pass that its log-probability, or the next token's, comes from;
passes that only refill a cache record nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from actors.engines.completions import keeps_mask
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
    """One request's records: an array for each token sampled so far."""

    keeps_mask: bool
    num_top: int
    kept: list[NDArray[Any]] = field(default_factory=list)
    top_ids: list[NDArray[Any]] = field(default_factory=list)
    top_logprobs: list[NDArray[Any]] = field(default_factory=list)
    experts: list[Experts] | None = None
    """[P, L, K] of the prompt, then [1, L, K] of each token; None if none are recorded."""


_COLUMNS = np.dtype(
    [
        ("count", "i8"),
        ("prompt_length", "i8"),
        ("limit", "i8"),
        ("offset", "i8"),
        ("minimum", "i8"),
        ("stop_set", "i8"),
        ("top_k", "i8"),
        ("top_p", "f4"),
        ("temperature", "f4"),
    ]
)
_TOKEN = np.dtype([("id", "i4"), ("logprob", "f4"), ("version", "i4")])
_FIRST_CAPACITY = 64


class Records:
    """The records of the running rows; new rows are added at the end."""

    def __init__(self, num_slots: int) -> None:
        self._columns = np.zeros(num_slots, _COLUMNS)
        self._tokens = np.zeros((num_slots, _FIRST_CAPACITY), _TOKEN)
        self._rows: list[_Row] = []

    def open(
        self,
        prompt_length: int,
        limit: int,
        sampling: SamplingParams,
        stop_set: int,
        offset: int,
        experts: Experts | None,
    ) -> None:
        """Add a row at the end, whose completion may have `limit` tokens. `offset` is the distance
        between positions in the position embedding and in the row; `experts` are the prompt's, if
        known."""
        place = (0, prompt_length, limit, offset, sampling.min_new_tokens, stop_set)
        truncation = (sampling.top_k, sampling.top_p, sampling.temperature)
        self._columns[len(self._rows)] = (*place, *truncation)
        own = [experts] if experts is not None and sampling.keep_routed_experts else None
        self._rows.append(_Row(keeps_mask(sampling), sampling.num_top_logprobs, experts=own))

    def append(self, first: int, sampled: Sampled, policy_version: int) -> None:
        """Appends one token to the rows first, first + 1, ..."""
        token_ids = sampled.token_ids.cpu().numpy()
        rows = np.arange(first, first + len(token_ids))
        counts = self._columns["count"][rows]
        self._reserve(int(counts.max()) + 1)
        self._tokens["id"][rows, counts] = token_ids
        self._tokens["logprob"][rows, counts] = sampled.logprobs.cpu().numpy()
        self._tokens["version"][rows, counts] = policy_version
        self._columns["count"][rows] += 1
        if sampled.kept is not None:
            owners, kept_ids = sampled.kept.cpu().numpy().T
            ends = np.searchsorted(owners, np.arange(1, len(token_ids)))
            kept = np.split(kept_ids.astype(np.int32), ends)
            for row, ids in zip(self._rows[first:], kept, strict=True):
                if row.keeps_mask:
                    row.kept.append(ids)
        if sampled.top is not None:
            logprobs, top_ids = (column.cpu().numpy() for column in sampled.top)
            for row, values, ids in zip(self._rows[first:], logprobs, top_ids, strict=True):
                if row.num_top:
                    is_possible = np.isfinite(values[: row.num_top])
                    row.top_ids.append(ids[: row.num_top][is_possible])
                    row.top_logprobs.append(values[: row.num_top][is_possible])

    def append_experts(self, experts: Sequence[Experts]) -> None:
        """Append the experts of the one token that each row gave the model."""
        for row, own in zip(self._rows, experts, strict=True):
            if row.experts is not None:
                row.experts.append(own)

    @property
    def columns(self) -> NDArray[np.void]:
        """Lengths, sampling parameters and stop sets [n], by the names of `_COLUMNS`."""
        return self._columns[: len(self._rows)]

    @property
    def keeps_mask(self) -> bool:
        return any(row.keeps_mask for row in self._rows)

    @property
    def num_top(self) -> int:
        """The largest number that a row asks for."""
        return max((row.num_top for row in self._rows), default=0)

    @property
    def keep_experts(self) -> bool:
        return any(row.experts is not None for row in self._rows)

    @property
    def last_token_ids(self) -> NDArray[np.int32]:
        columns = self.columns
        last: NDArray[np.int32] = self._tokens["id"][np.arange(len(columns)), columns["count"] - 1]
        return last

    @property
    def positions(self) -> NDArray[np.int64]:
        """The position of each row's last token [n]."""
        lengths: NDArray[np.int64] = self.columns["prompt_length"] + self.columns["count"]
        return lengths - 1

    def token_ids(self, row: int) -> NDArray[np.int32]:
        sampled: NDArray[np.int32] = self._tokens["id"][row, : self._columns["count"][row]]
        return sampled

    def completion(self, row: int, finish_reason: FinishReason) -> Completion:
        own, tokens = self._rows[row], self._tokens[row, : self._columns["count"][row]]
        num_tokens = int(self._columns["prompt_length"][row]) + len(tokens)
        experts = None
        if own.experts is not None:
            experts = RoutedExperts.of(np.concatenate(own.experts), num_tokens)
        return Completion(
            token_ids=tokens["id"].copy(),
            logprobs=tokens["logprob"].copy(),
            policy_versions=tokens["version"].copy(),
            finish_reason=finish_reason,
            sampling_mask=TokenSets.of(own.kept) if own.keeps_mask else None,
            top_logprobs=TopLogprobs.of(own.top_ids, own.top_logprobs) if own.num_top else None,
            routed_experts=experts,
        )

    def compact(self, moves: Compaction) -> None:
        moves.apply(self._rows)
        targets, sources = moves.targets, moves.sources
        self._columns[targets] = self._columns[sources]
        longest = int(self._columns["count"][targets].max(initial=0))
        self._tokens[targets, :longest] = self._tokens[sources, :longest]

    def _reserve(self, length: int) -> None:
        capacity = self._tokens.shape[1]
        if length > capacity:
            self._tokens = np.pad(self._tokens, ((0, 0), (0, capacity)))


class ExpertWatch:
    """Watches the model's routers: which experts the tokens of the last pass were given to."""

    def __init__(self, model: PreTrainedModel) -> None:
        """
        Raises:
            ConfigError: the model has no routers, or unknown ones.
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
