"""The two caches of the running batch, `SlotCache` and `ModelCache`, and the choice between them.

Shapes: n running rows, P prefilled rows, Q query heads, H key-value heads, L positions, D head
width.
"""

import copy
import inspect
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from streamrl.errors import ConfigError
from streamrl.vision.tower import set_attention

log = logging.getLogger(__name__)


class Compaction(NamedTuple):
    """Which rows move when some leave: `sources[i]` to `targets[i]` [k]; `size` rows remain.

    Running rows come first, without gaps. Only rows beyond the new end move, each into the place of
    a leaving one, so no place is read after it was written.
    """

    size: int
    targets: NDArray[np.int64]
    sources: NDArray[np.int64]

    @classmethod
    def of(cls, leaves: NDArray[np.bool_]) -> "Compaction":
        """The compaction for `leaves` [n], true for each running row that leaves."""
        size = len(leaves) - int(np.count_nonzero(leaves))
        return cls(size, np.flatnonzero(leaves[:size]), size + np.flatnonzero(~leaves[size:]))

    def apply(self, rows: list[Any]) -> None:
        """Move the entries of a list that has one per row."""
        for target, source in zip(self.targets.tolist(), self.sources.tolist(), strict=True):
            rows[target] = rows[source]
        del rows[self.size :]


class Prefill(NamedTuple):
    """A prefill's `inputs` for the model; `last` [P] is the index of each prompt's last kept
    logits."""

    inputs: dict[str, Any]
    last: torch.Tensor


# Slots grow by so many positions: short ones are read faster, and copying them now and then costs
# less than one step's attention.
_GROWTH = 32
# The fewest positions that attention reads: on a CPU, softmax over less than a register, and a
# product over fewer than 25 positions of width 16, go number by number.
_NARROWEST = 32


class SlotLayer(CacheLayerMixin):
    """One layer's keys and values [slots, H, L, D]; L grows as needed."""

    def __init__(self, owner: "SlotCache") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._owner = owner
        self._keys = self._values = torch.empty(0)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        slots, capacity = self._owner.num_slots, self._owner.capacity
        self._keys, self._values = (
            states.new_zeros(slots, states.shape[1], capacity, states.shape[3])
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def grow(self, capacity: int) -> None:
        if self.is_initialized:
            more = (0, 0, 0, capacity - self._keys.shape[2])
            self._keys, self._values = pad(self._keys, more), pad(self._values, more)

    def join(self, first: int, keys: torch.Tensor, values: torch.Tensor, of: torch.Tensor) -> None:
        """Rows from `first` on get the prefilled rows `of` of keys and values [P, H, length, D];
        `of` names each of them at least once, in order."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        rows, length = slice(first, first + len(of)), keys.shape[2]
        for whole, news in ((self._keys, keys), (self._values, values)):
            whole[rows, :, :length] = news if len(of) == len(news) else news.index_select(0, of)

    def move(self, sources: torch.Tensor, targets: torch.Tensor, length: int) -> None:
        """Copy the first `length` positions of the rows `sources` [k] to `targets` [k]."""
        for whole in (self._keys, self._values):
            whole[targets, :, :length] = whole[sources, :, :length]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one position of every running row [n, H, 1, D]; returns all positions up to the
        longest row's."""
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
    """The cache of a decoding forward pass: one slot per sequence.

    Rows 0..n-1 are running, so attention reads views and gathers nothing. A mask excludes stale
    values beyond a row's length.
    """

    joins_lengths = True
    """Whether prompts of different lengths may share a prefill."""

    def __init__(
        self, num_layers: int, num_slots: int, argument: str, device: torch.device
    ) -> None:
        self.num_slots = num_slots
        self.capacity = _GROWTH
        self.longest = 0
        self._argument = argument
        self._device = device
        self._rows = torch.arange(num_slots, device=device)
        self._positions = self._rows
        self._indices: dict[int, torch.Tensor] = {}
        self._slots = [SlotLayer(self) for _ in range(num_layers)]
        super().__init__(layers=list(self._slots))

    def point_at(self, positions: torch.Tensor, dtype: torch.dtype) -> dict[str, Any]:
        """Inputs of the pass that writes these positions [n], with an additive mask [n, 1, 1, L],
        or None if all rows are equally long."""
        self._positions, self._indices = positions, {}
        shortest, longest = torch.stack(torch.aminmax(positions)).tolist()
        self.longest = max(longest + 1, _NARROWEST)
        self.reserve(self.longest)
        if shortest + 1 == self.longest:
            return {"attention_mask": None, self._argument: self}
        reach = torch.arange(self.longest, device=positions.device)
        mask = torch.zeros(len(positions), self.longest, dtype=dtype, device=positions.device)
        mask.masked_fill_(reach > positions[:, None], -torch.inf)
        return {"attention_mask": mask[:, None, None], self._argument: self}

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
        """The inputs of a forward pass over these prompts, with a cache that it fills. Padding is
        on the right, where causal attention does not read it."""
        longest = max(map(len, prompts))
        rows = [[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts]
        ends = torch.tensor([len(prompt) - 1 for prompt in prompts], device=self._device)
        kept, last = torch.unique(ends, return_inverse=True)
        token_ids = torch.tensor(rows, device=self._device)
        inputs = {"input_ids": token_ids, "logits_to_keep": kept, self._argument: DynamicCache()}
        return Prefill(inputs, last)

    def join(self, first: int, inputs: dict[str, Any], of: torch.Tensor) -> None:
        """Slots first, first + 1, ... continue the rows `of` [k] of a filled prefill."""
        prefilled = inputs[self._argument]
        self.reserve(prefilled.get_seq_length())
        for slot, layer in zip(self._slots, prefilled.layers, strict=True):
            slot.join(first, layer.keys, layer.values, of)

    def compact(self, moves: Compaction, length: int) -> None:
        """Free the slots of rows that leave, moving others of at most `length` positions into
        them."""
        if len(moves.sources):
            sources = torch.from_numpy(moves.sources).to(self._device)
            targets = torch.from_numpy(moves.targets).to(self._device)
            for layer in self._slots:
                layer.move(sources, targets, length)

    def clear(self) -> None:
        """Nothing to do before rows join again: whoever joins a slot overwrites it."""


Rows = tuple[DynamicCache, torch.Tensor]
"""A cache, and the indices [k] of rows in it."""


class ModelCache:
    """Does the same as `SlotCache`, for transformers' caches whose layers have windows or states.

    All rows have `_length` past positions; shorter rows are padded on the left, where the mask
    hides it. Rows that leave are dropped, and lengths cut, before the next pass.
    """

    def __init__(self, model: PreTrainedModel, argument: str, device: torch.device) -> None:
        self._config = model.config
        self._argument = argument
        self._device = device
        layers = DynamicCache(config=model.config).layers
        self._has_keys = any(isinstance(layer, CacheLayerMixin) for layer in layers)
        # A recurrent state would absorb the padding.
        self.joins_lengths = not any(
            isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers
        )
        self.clear()

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Prefill:
        """As `SlotCache.prefill`. Padding is on the left, under a mask; prompts of one length have
        neither."""
        longest, device = max(map(len, prompts)), self._device
        rows = [[*[0] * (longest - len(prompt)), *prompt] for prompt in prompts]
        inputs: dict[str, Any] = {"input_ids": torch.tensor(rows, device=device)}
        padding = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)
        if padding.any():
            positions = torch.arange(longest, device=device) - padding[:, None]
            inputs["attention_mask"] = (positions >= 0).long()
            inputs["position_ids"] = positions.clamp_min(0)
        inputs[self._argument] = DynamicCache(config=self._config)
        return Prefill(inputs, torch.full((len(prompts),), -1, device=device))

    def join(self, first: int, inputs: dict[str, Any], of: torch.Tensor) -> None:
        """Rows first, first + 1, ... continue the rows `of` [k] of a filled prefill."""
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
    """A layer made of these rows of other layers, `length` positions long."""
    layer = copy.copy(parts[0][0])
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        for name in ("conv_states", "recurrent_states"):
            states = [(getattr(part, name), rows) for part, rows in parts]
            held = {
                i: None if first is None else torch.cat([state[i][rows] for state, rows in states])
                for i, first in states[0][0].items()
            }
            setattr(layer, name, held)
    if isinstance(layer, CacheLayerMixin) and layer.is_initialized:
        width = length
        if isinstance(layer, DynamicSlidingWindowLayer):
            width = min(length, layer.sliding_window - 1)
            layer.cumulative_length = length
        layer.keys = torch.cat([_fit(part.keys[rows], width) for part, rows in parts])
        layer.values = torch.cat([_fit(part.values[rows], width) for part, rows in parts])
    return layer


def _fit(held: torch.Tensor, length: int) -> torch.Tensor:
    """The last `length` positions [P, H, L, D], padded with zeros in front."""
    num_held = held.shape[2]
    if num_held >= length:
        return held[:, :, num_held - length :]
    return pad(held, (0, 0, length - num_held, 0))


NAME = "streamrl_slots"


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output [n, 1, Q, D] for query [n, Q, 1, D], key and value [n, H, L, D], an additive mask.

    Works on views; transformers' sdpa, which prefills use, repeats keys and values for grouped
    heads and copies strided ones.
    """
    rows, heads, length, width = query.shape
    if length > 1:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    scale = scaling or width**-0.5
    grouped = query.view(rows, key.shape[1], heads // key.shape[1], width)
    if query.device.type == "cpu" and query.dtype != torch.float32:
        # A matrix product would copy these views.
        attended = scaled_dot_product_attention(grouped, key, value, attention_mask, scale=scale)
    else:
        scores = torch.matmul(grouped * scale, key.transpose(2, 3))
        if attention_mask is not None:
            scores = scores + attention_mask
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
        attended = torch.matmul(weights, value)
    return attended.view(rows, 1, heads, -1), None


AttentionInterface.register(NAME, slot_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


_PROBE = "streamrl_probe"
_LAYERS = {
    "DynamicSlidingWindowLayer": "sliding windows",
    "DummyLayer": "layers without keys of their own",
    "LinearAttentionLayer": "layers with a state",
    "LinearAttentionAndFullAttentionLayer": "layers with a state",
    "LinearAttentionAndSlidingWindowAttentionLayer": "layers with a state",
}
"""Layer classes that can be rearranged exactly; an index of keys, for example, cannot."""
_WORDS = {
    **_LAYERS,
    "sliding_window": "sliding windows",
    "softcap": "soft caps",
    "s_aux": "attention sinks",
}
_IN_THE_MASK = frozenset({"sliding_window"})
_HARMLESS = frozenset({"is_causal", "position_ids", "use_cache", "dropout"})
"""Arguments of attention that a decode step's mask and positions already express."""


# From 5.24 on transformers says `cache` for the other two; a model's own code may still say them.
_CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")


def cache_argument(model: PreTrainedModel) -> str:
    """The name under which the model's forward takes a cache.

    Raises:
        ConfigError: it takes none.
    """
    names = inspect.signature(model.forward).parameters
    for name in _CACHE_ARGUMENTS:
        if name in names:
            return name
    raise ConfigError(
        f"generator.engine: hf cannot decode {model.config.model_type}, which takes no cache of "
        "transformers: use vllm"
    )


def cache_of(
    model: PreTrainedModel, num_slots: int, device: torch.device
) -> SlotCache | ModelCache:
    """A `SlotCache`, unless the model needs what slots do not compute; sets the attention to decode
    with.

    A forward pass over one token shows what the model asks of its attention, and the layers of the
    cache that transformers makes show what it keeps.

    Raises:
        ConfigError: it keeps something that cannot be rearranged as requests join and leave.
    """
    config, argument = model.config.get_text_config(), cache_argument(model)
    layers = DynamicCache(config=model.config).layers
    kinds = {type(layer).__name__ for layer in layers if type(layer) is not DynamicLayer}
    if unknown := kinds - _LAYERS.keys():
        raise ConfigError(
            f"generator.engine: hf cannot decode {model.config.model_type}, which has layers of "
            f"its own in its cache ({', '.join(sorted(unknown))}): use vllm"
        )
    own = config._attn_implementation
    num_calls, asked = _arguments(model)
    if not kinds and not asked and num_calls == len(layers) == config.num_hidden_layers:
        set_attention(model, NAME)
        return SlotCache(config.num_hidden_layers, num_slots, argument, device)
    # transformers' sdpa ignores arguments it does not know; eager attention is each family's own.
    set_attention(model, "eager" if asked - _IN_THE_MASK or not num_calls else own or "sdpa")
    words = {_WORDS.get(name, name) for name in kinds | asked}
    log.warning(
        "generator.engine hf decodes %s through transformers' own cache, slower: it has %s",
        model.config.model_type,
        ", ".join(sorted(words)) or "an attention of its own",
    )
    return ModelCache(model, argument, device)


def _arguments(model: PreTrainedModel) -> tuple[int, frozenset[str]]:
    """How often a forward pass calls attention, and with which unusual arguments."""
    asked: set[str] = set()
    num_calls = 0

    def probe(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        nonlocal num_calls
        num_calls += 1
        asked.update(
            name
            for name, value in kwargs.items()
            if name not in _HARMLESS | {"scaling"} and (isinstance(value, torch.Tensor) or value)
        )
        # A single token attends to itself, whatever else is asked for.
        return sdpa_attention_forward(module, query, key, value, attention_mask)

    AttentionInterface.register(_PROBE, probe)
    AttentionMaskInterface.register(_PROBE, sdpa_mask)
    set_attention(model, _PROBE)
    with torch.inference_mode():
        model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), use_cache=False)
    return num_calls, frozenset(asked)
