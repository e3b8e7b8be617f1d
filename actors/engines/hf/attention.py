"""Attention for one new token per row over slots: two matrix products on views, no copies.

transformers' sdpa repeats keys and values for grouped heads and copies strided ones; a decode step
over slots needs neither. Prefills use sdpa. Registered with transformers as `NAME`.
Shapes: n rows, Q query heads, H key-value heads, L positions, D head width.
"""

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

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
    kv_heads = key.shape[1]
    grouped = (query * (scaling or width**-0.5)).view(rows, kv_heads, heads // kv_heads, width)
    scores = torch.matmul(grouped, key.transpose(2, 3))
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
    return torch.matmul(weights, value).view(rows, 1, heads, value.shape[-1]), None


AttentionInterface.register(NAME, slot_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
