"""Variable-length attention on a GPU: one kernel call over all trajectories, no padding.

flash-attn where it is installed (extra `flash`), else torch's own kernel. Both take half precision
alone.

Called by: attention.py, where the model asks for no more than scale and window.
Shapes: N tokens, Q query heads, H key-value heads, D head width, S trajectories.
"""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

HALF = (torch.bfloat16, torch.float16)


def variable_length(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends: torch.Tensor,
    longest: int,
    *,
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    """Causal attention within each trajectory: [N, Q, D] from [N, Q, D] and twice [N, H, D].

    Args:
        ends: [S + 1] int32 cumulative lengths, on the tensors' device; the longest is `longest`.
        window: how many tokens a token attends to, itself included; None for all.
    """
    past = -1 if window is None else window - 1
    if (flash := _flash_attention()) is not None:
        attended: torch.Tensor = flash(
            query,
            key,
            value,
            ends,
            ends,
            longest,
            longest,
            softmax_scale=scale,
            causal=True,
            window_size=(past, 0),
        )
        return attended
    return _torch_attention(query, key, value, ends, longest, scale, past)


def _torch_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends: torch.Tensor,
    longest: int,
    scale: float | None,
    past: int,
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    groups = query.shape[1] // key.shape[1]
    attended: torch.Tensor = varlen_attn(  # type: ignore[assignment]
        query.contiguous(),
        key.repeat_interleave(groups, dim=1),
        value.repeat_interleave(groups, dim=1),
        ends,
        ends,
        longest,
        longest,
        scale=scale,
        window_size=(past, 0),
    )
    return attended


@cache
def _flash_attention() -> Any:
    """flash-attn's function; None if it is not installed."""
    if find_spec("flash_attn") is None:
        return None
    return import_module("flash_attn").flash_attn_varlen_func
