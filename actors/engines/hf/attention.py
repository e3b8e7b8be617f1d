"""Attention for one new token per row over slots, on views, without copies.

transformers' sdpa repeats keys and values for grouped heads and copies strided ones; a decode step
over slots needs neither. Prefills use sdpa. Registered with transformers as `NAME`.
Shapes: n rows, Q query heads, H key-value heads, L positions, D head width.
"""

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
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
