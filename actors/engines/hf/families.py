"""Which cache a model decodes with: slots, or transformers' own where slots do not suffice.

A forward pass of one token shows what the model asks of its attention; the layers of the cache
that transformers makes for it show what it keeps. Called once, at an engine's start.

Attention for one new token per row over slots is on views, without copies: transformers' sdpa
repeats keys and values for grouped heads and copies strided ones; a decode step over slots needs
neither. Prefills use sdpa. Registered with transformers as `NAME`.
Shapes: n rows, Q query heads, H key-value heads, L positions, D head width.
"""

import inspect
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from streamrl.vision.tower import set_attention

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
    """Output [n, 1, Q, D] for query [n, Q, 1, D], key and value [n, H, L, D], an additive mask."""
    rows, heads, length, width = query.shape
    if length > 1:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    scale = scaling or width**-0.5
    grouped = query.view(rows, key.shape[1], heads // key.shape[1], width)
    attend = _fused if query.device.type == "cpu" and query.dtype != torch.float32 else _products
    return attend(grouped, key, value, attention_mask, scale).view(rows, 1, heads, -1), None


def _fused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """On CPUs in half precision, where a matrix product copies the views that it reads."""
    return scaled_dot_product_attention(query, key, value, mask, scale=scale)


def _products(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    scores = torch.matmul(query * scale, key.transpose(2, 3))
    if mask is not None:
        scores = scores + mask
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
    return torch.matmul(weights, value)


AttentionInterface.register(NAME, slot_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


_PROBE = "streamrl_probe"
_WORDS = {
    "DynamicSlidingWindowLayer": "sliding windows",
    "DynamicIndexedLayer": "an index of its keys",
    "LinearAttentionLayer": "layers with a state",
    "LinearAttentionAndFullAttentionLayer": "layers with a state",
    "LinearAttentionAndSlidingWindowAttentionLayer": "layers with a state",
    "sliding_window": "sliding windows",
    "softcap": "soft caps",
    "s_aux": "attention sinks",
}
_IN_THE_MASK = frozenset({"sliding_window"})
_HARMLESS = frozenset({"is_causal", "position_ids", "use_cache", "dropout"})
"""Arguments of attention that a decode step's mask and positions say as well."""


def cache_argument(model: PreTrainedModel) -> str:
    """The name under which the model's forward takes a cache."""
    names = inspect.signature(model.forward).parameters
    return "past_key_values" if "past_key_values" in names else "cache_params"


def why_not_slots(model: PreTrainedModel) -> str | None:
    """What of the model slots do not compute, or None; sets the attention it decodes with."""
    layers = DynamicCache(config=model.config).layers
    kinds = {type(layer).__name__ for layer in layers if type(layer) is not DynamicLayer}
    own = model.config.get_text_config()._attn_implementation
    num_calls, asked = _arguments(model)
    is_plain = num_calls == len(layers) == model.config.get_text_config().num_hidden_layers
    if not kinds and not asked and is_plain:
        set_attention(model, NAME)
        return None
    # transformers' sdpa leaves out what it does not know; eager attention is a family's own.
    set_attention(model, "eager" if asked - _IN_THE_MASK or not num_calls else own or "sdpa")
    words = {_WORDS.get(name, name) for name in kinds | asked}
    return ", ".join(sorted(words)) or "an attention of its own"


def _arguments(model: PreTrainedModel) -> tuple[int, frozenset[str]]:
    """How often a forward pass attends, and with which arguments beyond the usual ones."""
    asked: set[str] = set()
    num_calls = 0

    def probe(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        nonlocal num_calls
        num_calls += 1
        asked.update(
            name
            for name, value in kwargs.items()
            if name not in _HARMLESS | {"scaling", "attention_mask"}
            and (isinstance(value, torch.Tensor) or value)
        )
        return sdpa_attention_forward(*args, **kwargs)

    AttentionInterface.register(_PROBE, probe)
    AttentionMaskInterface.register(_PROBE, sdpa_mask)
    set_attention(model, _PROBE)
    with torch.inference_mode():
        model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), use_cache=False)
    return num_calls, frozenset(asked)
