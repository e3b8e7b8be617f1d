"""The running rows in the caches that transformers has for a model: windows, states, indices.

Invariant: all rows have `_length` past positions; shorter rows are padded on the left, where the
mask hides them. Rows that leave are dropped, and lengths cut, before the next pass.
Shapes: n running rows, H key-value heads, L positions, D head width.
"""

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicCache,
    DynamicIndexedLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

from actors.engines.hf.cache import Compaction, Prefill, left_padded

Rows = tuple[DynamicCache, torch.Tensor]
"""A cache, and the indices [k] of rows in it."""


class ModelCache:
    """Implements what `SlotCache` does, for any layers that transformers has a cache for."""

    def __init__(self, model: PreTrainedModel, argument: str, device: torch.device) -> None:
        self._config = model.config
        self._argument = argument
        self._takes = frozenset(inspect.signature(model.forward).parameters)
        self._device = device
        layers = DynamicCache(config=model.config).layers
        self._has_keys = any(isinstance(layer, CacheLayerMixin) for layer in layers)
        # A state would take up the padding.
        self.joins_lengths = not any(
            isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers
        )
        self.clear()

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Prefill:
        inputs, last = left_padded(prompts, self._device)
        return Prefill({**inputs, self._argument: DynamicCache(config=self._config)}, last)

    def join(self, first: int, inputs: dict[str, Any], of: torch.Tensor) -> None:
        """Rows first, first + 1, ... continue the rows `of` [k] of what a prefill has filled."""
        length = inputs["input_ids"].shape[1]
        parts = [(inputs[self._argument], of)]
        if self._order:
            parts.insert(0, (self._cache, self._index()))
        self._arrange(parts, max(length, self._length), first + len(of))

    def compact(self, moves: Compaction, length: int) -> None:
        moves.apply(self._order)

    def clear(self) -> None:
        self._cache = DynamicCache(config=self._config)
        self._order: list[int] = []
        self._length = self._num_held = 0

    def point_at(self, positions: torch.Tensor, dtype: torch.dtype) -> dict[str, Any]:
        """Inputs of the pass that writes these positions [n]."""
        length = int(positions.max())
        if length != self._length or self._order != list(range(self._num_held)):
            self._arrange([(self._cache, self._index())], length, len(self._order))
        self._length += 1
        inputs: dict[str, Any] = {self._argument: self._cache}
        if self._has_keys:
            reach = torch.arange(length + 1, device=self._device)
            inputs["attention_mask"] = (reach >= (length - positions)[:, None]).long()
        return inputs

    def _index(self) -> torch.Tensor:
        return torch.tensor(self._order, device=self._device)

    def _arrange(self, parts: list[Rows], length: int, num_rows: int) -> None:
        arranged = DynamicCache(config=self._config)
        arranged.layers = [
            _joined([(cache.layers[i], rows) for cache, rows in parts], length)
            for i in range(len(parts[0][0].layers))
        ]
        self._cache, self._length = arranged, length
        self._order, self._num_held = list(range(num_rows)), num_rows


def _joined(parts: list[tuple[Any, torch.Tensor]], length: int) -> Any:
    """A layer with these rows of other layers, `length` positions long."""
    layer = copy.copy(parts[0][0])
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        for name in ("conv_states", "recurrent_states"):
            states = [getattr(part, name) for part, _ in parts]
            setattr(layer, name, {i: _rows_of(states, i, parts) for i in states[0]})
    if isinstance(layer, CacheLayerMixin) and layer.is_initialized:
        width = length
        if isinstance(layer, DynamicSlidingWindowLayer):
            width = min(length, layer.sliding_window - 1)
            layer.cumulative_length = length
        layer.keys = torch.cat([_fit(part.keys[rows], width, 2) for part, rows in parts])
        layer.values = torch.cat([_fit(part.values[rows], width, 2) for part, rows in parts])
    if isinstance(layer, DynamicIndexedLayer) and layer.is_indexer_initialized:
        layer.indexer_keys = torch.cat(
            [_fit(part.indexer_keys[rows], length, 1) for part, rows in parts]
        )
    return layer


def _rows_of(
    states: list[dict[int, Any]], i: int, parts: list[tuple[Any, torch.Tensor]]
) -> torch.Tensor | None:
    if states[0][i] is None:
        return None
    return torch.cat([state[i][rows] for state, (_, rows) in zip(states, parts, strict=True)])


def _fit(held: torch.Tensor, length: int, axis: int) -> torch.Tensor:
    """The last `length` positions of the axis, filled up with zeros in front."""
    num_held = held.shape[axis]
    if num_held >= length:
        return held.narrow(axis, num_held - length, length)
    return pad(held, (0, 0) * (held.ndim - 1 - axis) + (length - num_held, 0))
