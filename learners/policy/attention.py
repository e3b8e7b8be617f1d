"""Attention over packed trajectories: linear layers compute every token once and no padding.

A packed forward pass has batch size 1 and N tokens of S trajectories. On a GPU in half precision
torch's variable-length kernel attends within each trajectory. Elsewhere trajectories of similar
length (within a factor of two) share one padded scaled_dot_product_attention call; less than half
of its tokens are padding. Registered with transformers under `NAME`.

Invariant: a token attends to tokens of its own trajectory only, itself and earlier ones.
Shapes: N tokens, Q query heads, H key-value heads, D head width, B trajectories of a bucket, L
their longest.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from learners.parallel.sequence_attention import over_slices

NAME = "streamrl_packed"


@dataclass(frozen=True, eq=False)
class Packing:
    """The bounds of the trajectories: `lengths` of consecutive stretches of the N tokens."""

    lengths: tuple[int, ...]
    device: torch.device

    @cached_property
    def ends(self) -> torch.Tensor:
        """[S + 1] int32 cumulative lengths, as variable-length kernels want them."""
        lengths = torch.tensor((0, *self.lengths), dtype=torch.int32)
        return lengths.cumsum(0, dtype=torch.int32).to(self.device)

    @cached_property
    def longest(self) -> int:
        return max(self.lengths)

    @cached_property
    def positions(self) -> torch.Tensor:
        """[N] position of each token in its trajectory."""
        return torch.cat([torch.arange(length) for length in self.lengths]).to(self.device)

    @cached_property
    def buckets(self) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
        """Per bucket: token indices [B, L], padded with the trajectory's last one, and the flat
        indices in [B * L] that are no padding."""
        starts = self.ends[:-1].tolist()
        by_size: dict[int, list[int]] = {}
        for i, length in enumerate(self.lengths):
            by_size.setdefault((length - 1).bit_length(), []).append(i)
        buckets = []
        for members in by_size.values():
            lengths = torch.tensor([self.lengths[i] for i in members])
            offsets = torch.arange(int(lengths.max()))
            inside = offsets < lengths[:, None]
            clipped = torch.minimum(offsets, lengths[:, None] - 1)
            indices = torch.tensor([starts[i] for i in members])[:, None] + clipped
            real = inside.flatten().nonzero()[:, 0]
            buckets.append((indices.to(self.device), real.to(self.device)))
        return tuple(buckets)

    @cached_property
    def order(self) -> torch.Tensor:
        """[N] index of each token in the concatenated outputs of the buckets."""
        token_of = torch.cat([indices.flatten()[real] for indices, real in self.buckets])
        return token_of.argsort()


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packing: Packing,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each trajectory: output [1, N, Q, D] for query [1, Q, N, D], key and
    value [1, H, N, D]."""
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    has_kernel = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
    attend = _variable_length if has_kernel else _bucketed
    return attend(q, k, v, packing, scaling)[None], None


def _bucketed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packing: Packing,
    scaling: float | None,
) -> torch.Tensor:
    """[N, Q, D] from [N, Q, D] and twice [N, H, D]."""
    outputs = []
    for indices, real in packing.buckets:
        # Padding follows a trajectory's own tokens, where causal attention does not look.
        q, k, v = (tensor[indices].transpose(1, 2) for tensor in (query, key, value))
        is_grouped = q.shape[1] != k.shape[1]
        attended = scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scaling, enable_gqa=is_grouped
        )
        outputs.append(attended.transpose(1, 2).flatten(0, 1)[real])
    return torch.cat(outputs)[packing.order]


def _variable_length(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packing: Packing,
    scaling: float | None,
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    groups = query.shape[1] // key.shape[1]
    attended: torch.Tensor = varlen_attn(  # type: ignore[assignment]
        query.contiguous(),
        key.repeat_interleave(groups, dim=1),
        value.repeat_interleave(groups, dim=1),
        packing.ends,
        packing.ends,
        packing.longest,
        packing.longest,
        scale=scaling,
        window_size=(-1, 0),
    )
    return attended


AttentionInterface.register(NAME, over_slices(packed_attention))
AttentionMaskInterface.register(NAME, lambda **kwargs: None)
