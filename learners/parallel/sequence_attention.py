"""Attention of a sequence-parallel block: heads exchanged for tokens, and back.

Each of the S ranks of a block holds 1/S of the tokens of a micro-batch with all heads. Before the
attention call an all-to-all gives it all tokens with 1/S of the heads; after it another one turns
the output back. Key-value heads that S does not divide are repeated until it does.

Invariant: a query head meets the key-value head that the model pairs it with; what a head computes
is what one rank alone computes. Every rank of the block makes the same calls in the same order.
Called through transformers' attention interface, by `learners.policy.attention`.
Shapes: N tokens of the micro-batch, n = ceil(N / S) of a rank (the last ones may be padding), Q
query heads, H key-value heads, D head width.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

Attention = Callable[..., tuple[torch.Tensor, None]]


@dataclass(frozen=True, eq=False)
class SequenceBlock:
    """The ranks that hold one micro-batch's tokens together, and this rank among them."""

    group: dist.ProcessGroup
    rank: int
    size: int


@dataclass(frozen=True, eq=False)
class HeadExchange:
    """For the `num_tokens` N of one micro-batch."""

    block: SequenceBlock
    num_tokens: int

    def to_heads(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[1, heads / S, N, D] each, from [1, heads, n, D]."""
        size = self.block.size
        rows = [tensor[0].transpose(0, 1).unflatten(1, (size, -1)) for tensor in tensors]
        widths = [row[0, 0].numel() for row in rows]
        sent = torch.cat([row.flatten(2) for row in rows], dim=2).transpose(0, 1)
        received = self._exchange(sent).flatten(0, 1)[: self.num_tokens]
        parts = received.split(widths, dim=1)
        return tuple(
            part.unflatten(1, row.shape[2:]).transpose(0, 1)[None]
            for part, row in zip(parts, rows, strict=True)
        )

    def to_tokens(self, output: torch.Tensor) -> torch.Tensor:
        """[1, n, Q, D] from [1, N, Q / S, D]."""
        size, (heads, width) = self.block.size, output.shape[2:]
        num_padded = -(-self.num_tokens // size) * size
        padded = torch.nn.functional.pad(output[0], (0, 0, 0, 0, 0, num_padded - self.num_tokens))
        received = self._exchange(padded.unflatten(0, (size, -1)).flatten(2))
        return received.transpose(0, 1).reshape(1, num_padded // size, size * heads, width)

    def own_heads(self, per_head: torch.Tensor) -> torch.Tensor:
        """[Q / S] of a parameter [Q] with one entry per query head."""
        return per_head.chunk(self.block.size)[self.block.rank]

    def _exchange(self, sent: torch.Tensor) -> torch.Tensor:
        exchanged: torch.Tensor = _AllToAll.apply(sent, self.block.group)  # type: ignore[no-untyped-call]
        return exchanged


def over_slices(attend: Attention) -> Attention:
    """`attend` over whole trajectories, also where the decoder holds a slice of the tokens and
    passes its `exchange`."""

    def attention(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        exchange: HeadExchange | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        if exchange is None:
            return attend(module, query, key, value, attention_mask, **kwargs)
        num_heads = math.lcm(key.shape[1], exchange.block.size)
        key, value = (t.repeat_interleave(num_heads // t.shape[1], dim=1) for t in (key, value))
        query, key, value = exchange.to_heads(query, key, value)
        if (sinks := kwargs.get("s_aux")) is not None:
            kwargs = {**kwargs, "s_aux": exchange.own_heads(sinks)}
        output, _ = attend(module, query, key, value, attention_mask, **kwargs)
        return exchange.to_tokens(output), None

    return attention


class _AllToAll(torch.autograd.Function):
    """Row i of [S, ...] goes to rank i, which puts it into the row of its sender; the gradient
    goes back the same way."""

    @staticmethod
    def forward(ctx: Any, sent: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _all_to_all(sent, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_to_all(gradient, ctx.group), None


def _all_to_all(sent: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    received = torch.empty_like(sent, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, sent.contiguous(), group=group)
    return received
