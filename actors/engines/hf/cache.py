"""Keys and values of the running batch: one slot per sequence, the running ones first.

Invariant: rows 0..n-1 are running, so attention reads views and gathers nothing. Rows at the end
move into the slots of those that leave. The mask excludes stale values beyond a row's length.
Shapes: n running rows, P prefilled rows, H key-value heads, L positions, D head width.

`Compaction`: which rows move when some of them leave the running batch. Running rows are the first
ones, without a gap. Only rows behind the new end move, each into the place of one that leaves, so
no place is read after it was written.

A prefill takes several prompts at once: P prompts, L tokens of the longest.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer


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


class Prefill(NamedTuple):
    """`inputs` of the model; `last` [P] is the index of each prompt's last kept logits."""

    inputs: dict[str, Any]
    last: torch.Tensor


def right_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> Prefill:
    """Padding on the right, where causal attention does not read it."""
    longest = max(map(len, prompts))
    rows = [[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts]
    ends = torch.tensor([len(prompt) - 1 for prompt in prompts], device=device)
    kept, last = torch.unique(ends, return_inverse=True)
    token_ids = torch.tensor(rows, device=device)
    return Prefill({"input_ids": token_ids, "logits_to_keep": kept}, last)


def left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> Prefill:
    """Padding on the left, under a mask; prompts of one length have neither."""
    longest = max(map(len, prompts))
    rows = [[*[0] * (longest - len(prompt)), *prompt] for prompt in prompts]
    inputs: dict[str, Any] = {"input_ids": torch.tensor(rows, device=device)}
    padding = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)
    if padding.any():
        positions = torch.arange(longest, device=device) - padding[:, None]
        inputs["attention_mask"] = (positions >= 0).long()
        inputs["position_ids"] = positions.clamp_min(0)
    return Prefill(inputs, torch.full((len(prompts),), -1, device=device))


# Short slots are read faster, and copying all of them every so many positions costs less than one
# step's attention.
_GROWTH = 32
# Positions that attention reads, at least: a CPU's softmax takes fewer numbers than fill a register
# one by one, and so does a product of fewer than 25 positions of width 16.
_NARROWEST = 32


class SlotLayer(CacheLayerMixin):
    """One layer's keys and values [slots, H, L, D], grown as positions are reached."""

    def __init__(self, owner: "SlotCache") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._owner = owner
        self._keys = self._values = torch.empty(0)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        _, heads, _, width = key_states.shape
        owner = self._owner
        self._keys = key_states.new_zeros(owner.num_slots, heads, owner.capacity, width)
        _, heads, _, width = value_states.shape
        self._values = value_states.new_zeros(owner.num_slots, heads, owner.capacity, width)
        self.is_initialized = True

    def grow(self, capacity: int) -> None:
        if self.is_initialized:
            self._keys = _longer(self._keys, capacity)
            self._values = _longer(self._values, capacity)

    def join(self, first: int, keys: torch.Tensor, values: torch.Tensor, of: torch.Tensor) -> None:
        """Rows first.. get the prefilled rows `of` of keys and values [P, H, length, D], which
        `of` has in their order and each of them once or more."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        rows, length = slice(first, first + len(of)), keys.shape[2]
        for whole, news in ((self._keys, keys), (self._values, values)):
            whole[rows, :, :length] = news if len(of) == len(news) else news.index_select(0, of)

    def move(self, sources: torch.Tensor, targets: torch.Tensor, length: int) -> None:
        """The first `length` positions of the rows `sources` [k] go to `targets` [k]."""
        for whole in (self._keys, self._values):
            whole[targets, :, :length] = whole[sources, :, :length]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes one position of every running row [n, H, 1, D]; returns all up to the longest."""
        owner = self._owner
        running = len(key_states)
        for whole, news in ((self._keys, key_states), (self._values, value_states)):
            width = whole.shape[-1]
            whole.view(-1, width).index_copy_(
                0, owner.indices(whole.shape[1]), news.reshape(-1, width)
            )
        return self._keys[:running, :, : owner.longest], self._values[:running, :, : owner.longest]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._owner.longest, 0

    def get_seq_length(self) -> int:
        return self._owner.longest - 1

    def get_max_length(self) -> int:
        return -1


class SlotCache(Cache):
    """The `past_key_values` of a decoding forward pass."""

    joins_lengths = True
    """Whether prompts of several lengths share a prefill."""

    def __init__(self, num_layers: int, num_slots: int, device: torch.device) -> None:
        self.num_slots = num_slots
        self.capacity = _GROWTH
        self.longest = 0
        self._device = device
        self._rows = torch.arange(num_slots, device=device)
        self._positions = self._rows
        self._indices: dict[int, torch.Tensor] = {}
        self._slots = [SlotLayer(self) for _ in range(num_layers)]
        super().__init__(layers=list(self._slots))

    def point_at(self, positions: torch.Tensor, dtype: torch.dtype) -> dict[str, Any]:
        """Inputs of the pass that writes these positions [n], with an additive mask
        [n, 1, 1, L], or None where all rows are that long."""
        self._positions, self._indices = positions, {}
        shortest, longest = torch.stack(torch.aminmax(positions)).tolist()
        self.longest = max(longest + 1, _NARROWEST)
        self.reserve(self.longest)
        if shortest + 1 == self.longest:
            return {"attention_mask": None, "past_key_values": self}
        reach = torch.arange(self.longest, device=positions.device)
        mask = torch.zeros(len(positions), self.longest, dtype=dtype, device=positions.device)
        mask.masked_fill_(reach > positions[:, None], -torch.inf)
        return {"attention_mask": mask[:, None, None], "past_key_values": self}

    def indices(self, heads: int) -> torch.Tensor:
        """The index of each running row's and head's new position [n * H] in a flat layer."""
        if heads not in self._indices:
            rows = self._rows[: len(self._positions), None]
            all_heads = torch.arange(heads, device=rows.device)
            starts = (rows * heads + all_heads) * self.capacity
            self._indices[heads] = (starts + self._positions[:, None]).view(-1)
        return self._indices[heads]

    def reserve(self, length: int) -> None:
        if length > self.capacity:
            self.capacity = -(-length // _GROWTH) * _GROWTH
            for layer in self._slots:
                layer.grow(self.capacity)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Prefill:
        """What a forward pass takes of these prompts, together with a cache that it fills."""
        inputs, last = right_padded(prompts, self._device)
        return Prefill({**inputs, "past_key_values": DynamicCache()}, last)

    def join(self, first: int, inputs: dict[str, Any], of: torch.Tensor) -> None:
        """Slots first, first + 1, ... continue the rows `of` [k] of what a prefill has filled."""
        prefilled = inputs["past_key_values"]
        self.reserve(prefilled.get_seq_length())
        for slot, layer in zip(self._slots, prefilled.layers, strict=True):
            assert isinstance(layer, DynamicLayer), "full attention has no other layers"
            assert layer.keys is not None, "a prefill fills every layer"
            assert layer.values is not None, "a prefill fills every layer"
            slot.join(first, layer.keys, layer.values, of)

    def compact(self, moves: Compaction, length: int) -> None:
        """Rows that leave free their slots for those that move, of at most so many positions."""
        if len(moves.sources):
            sources = torch.from_numpy(moves.sources).to(self._device)
            targets = torch.from_numpy(moves.targets).to(self._device)
            for layer in self._slots:
                layer.move(sources, targets, length)

    def clear(self) -> None:
        """Before rows join again: a slot is overwritten by whoever joins it."""


def _longer(old: torch.Tensor, capacity: int) -> torch.Tensor:
    slots, heads, length, width = old.shape
    longer = old.new_zeros(slots, heads, capacity, width)
    longer[:, :, :length] = old
    return longer
