"""Sequence parallelism: the S ranks of a block share the tokens of one micro-batch.

`TokenSlice`: rank i embeds and transforms the i-th stretch of the packed tokens. It computes
log-probabilities, entropies and values of the response tokens that its stretch predicts, and the
columns are put together again, so that the objective sees whole trajectories on every rank.
Gradients summed over the block are those of one rank: the objective is computed S times with equal
results, and each rank passes back the gradient of its own rows alone.

`HeadExchange`: before an attention call an all-to-all gives each rank all tokens with 1/S of the
heads; after it another one turns the output back. Key-value heads that S does not divide are
repeated until it does. A query head meets the key-value head that the model pairs it with, so what
it computes is what one rank alone computes. Every rank of the block makes the same calls in the
same order.
Shapes: N tokens of the micro-batch, n = ceil(N / S) of a rank, the last of which may be padding, R
response tokens, r of them predicted by this rank's tokens, Q query heads, D head width.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import pad
from transformers import PreTrainedModel

from learners.batch.micro_batch import MicroBatch, Observed, Packing, SharedPrompts
from learners.parallel.mesh import Mesh
from learners.parallel.ranks import Ranks
from streamrl.errors import ConfigError
from streamrl.placement.limits import facts_of, require_shared_tokens
from streamrl.types import UNRECORDED

Attention = Callable[..., tuple[torch.Tensor, None]]


@dataclass(frozen=True, eq=False)
class HeadExchange:
    """For the `num_tokens` N of one micro-batch, which the ranks of the block hold together."""

    block: Ranks
    num_tokens: int

    def to_heads(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[1, heads / S, N, D] each, from [1, heads, n, D]."""
        size = self.block.count
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
        size, (heads, width) = self.block.count, output.shape[2:]
        num_padded = -(-self.num_tokens // size) * size
        padded = pad(output[0], (0, 0, 0, 0, 0, num_padded - self.num_tokens))
        received = self._exchange(padded.unflatten(0, (size, -1)).flatten(2))
        return received.transpose(0, 1).reshape(1, num_padded // size, size * heads, width)

    def _exchange(self, sent: torch.Tensor) -> torch.Tensor:
        exchanged: torch.Tensor = _AllToAll.apply(sent, self.block.group)  # type: ignore[no-untyped-call]
        return exchanged


def over_slices(attend: Attention) -> Attention:
    """`attend`, also where the decoder holds a slice of the tokens and passes its `exchange`."""

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
        num_heads = math.lcm(key.shape[1], exchange.block.count)
        key, value = (t.repeat_interleave(num_heads // t.shape[1], dim=1) for t in (key, value))
        query, key, value = exchange.to_heads(query, key, value)
        if (sinks := kwargs.get("s_aux")) is not None:
            own = sinks.chunk(exchange.block.count)[exchange.block.index]
            kwargs = {**kwargs, "s_aux": own}
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


def sequence_block(model: PreTrainedModel, mesh: Mesh, *, is_packed: bool = True) -> Ranks | None:
    """The block of this rank; None if it has the tokens for itself. ConfigError if the ranks cannot
    share the tokens of this model."""
    size = mesh.size("sequence")
    if size == 1:
        return None
    require_shareable(model, size, mesh.size("tensor"))
    if not is_packed:
        raise ConfigError(
            f"learner.mesh.sequence: was {size}, which shares the tokens of one row, and "
            f"{model.config.model_type} runs each trajectory as a row of its own: set it to 1"
        )
    return Ranks.of(mesh.group("sequence"))


def require_shareable(model: PreTrainedModel, size: int, num_tensor: int = 1) -> None:
    """Raise ConfigError if `size` x `num_tensor` ranks cannot share the heads of this model, or if
    it carries state along tokens."""
    facts = facts_of(model.config.get_text_config())
    has_state = getattr(model, "_is_stateful", False)
    require_shared_tokens(facts, size, num_tensor, has_state=has_state)


@dataclass(frozen=True, eq=False)
class TokenSlice:
    """What this rank computes of a micro-batch: all of it without a block."""

    token_ids: torch.Tensor
    """[1, n] int64; padding is token 0."""
    positions: torch.Tensor
    """[1, n] position of each token in its trajectory."""
    predictors: torch.Tensor
    """[r] positions in n whose hidden states predict this rank's response tokens."""
    targets: torch.Tensor
    """[r] int64, those tokens."""
    packing: Packing
    """Of all ranks' tokens."""
    exchange: HeadExchange | None
    """For the attention calls."""
    experts: torch.Tensor | None = None
    """[n, L, K] that the tokens are given to."""
    first_row: int = 0
    """Of R, which of the micro-batch's response tokens is the first of r."""
    num_rows: int = 0
    """R"""

    @classmethod
    def of(
        cls,
        micro_batch: MicroBatch,
        block: Ranks | None,
        shared: SharedPrompts | None = None,
        experts: torch.Tensor | None = None,
    ) -> "TokenSlice":
        """This rank's slice, in order of ranks; without a block all tokens, or what is `shared`,
        which is nothing with one. `experts` are [N, L, K] of the micro-batch's tokens."""
        token_ids, packing = micro_batch.token_ids, micro_batch.packing
        predictors, targets = micro_batch.predictors, micro_batch.targets
        if shared is not None:
            token_ids, packing = token_ids[:, shared.tokens], shared.packing
            predictors = shared.predictors
            experts = None if experts is None else experts[shared.tokens]
        positions = packing.positions[None]
        if block is None:
            return cls(token_ids, positions, predictors, targets, packing, None, experts)
        num_tokens = token_ids.shape[1]
        size = -(-num_tokens // block.count)
        start = block.index * size
        padding = (0, size * block.count - num_tokens)
        own = _among(predictors, start, size)
        return cls(
            token_ids=pad(token_ids, padding)[:, start : start + size],
            positions=pad(positions, padding)[:, start : start + size],
            predictors=predictors[own] - start,
            targets=targets[own],
            packing=packing,
            exchange=HeadExchange(block, num_tokens),
            experts=None
            if experts is None
            else pad(experts, (0, 0, 0, 0, *padding), value=UNRECORDED)[start : start + size],
            first_row=own.start,
            num_rows=len(predictors),
        )

    def observed(
        self, observed: Observed, shared: SharedPrompts | None
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Of what the micro-batch observed, [o] positions in n of this rank's predictors, [o] the
        tokens, and which of O is the first of o."""
        predictors, targets = observed.predictors, observed.targets
        if shared is not None:
            # Nothing behind a prompt is shared.
            return torch.searchsorted(shared.tokens, predictors), targets, 0
        if self.exchange is None:
            return predictors, targets, 0
        size = self.token_ids.shape[1]
        start = self.exchange.block.index * size
        own = _among(predictors, start, size)
        return predictors[own] - start, targets[own], own.start

    @property
    def rows(self) -> tuple[int, int]:
        """Of R, the first of this rank's response tokens, and the one behind its last."""
        return self.first_row, self.first_row + len(self.targets)

    def gather(
        self, column: torch.Tensor | None, first: int | None = None, num_rows: int | None = None
    ) -> torch.Tensor | None:
        """[R] of the whole micro-batch from this rank's [r]; None stays None. Of a column that has
        other rows than these, `first` and `num_rows` say which this rank has, and how many all."""
        if self.exchange is None or column is None:
            return column
        first = self.first_row if first is None else first
        num_rows = self.num_rows if num_rows is None else num_rows
        group = self.exchange.block.group
        gathered: torch.Tensor = _Gather.apply(column, first, num_rows, group)  # type: ignore[no-untyped-call]
        return gathered


def _among(rising: torch.Tensor, start: int, size: int) -> slice:
    """Which of the rising numbers are the `size` ones from `start` on."""
    bounds = torch.tensor([start, start + size], device=rising.device)
    return slice(*torch.searchsorted(rising, bounds).tolist())


class _Gather(torch.autograd.Function):
    """Rows of all ranks; backward takes this rank's, since every rank has the same gradient."""

    @staticmethod
    def forward(
        ctx: Any, column: torch.Tensor, first: int, num_rows: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.rows = slice(first, first + len(column))
        gathered = column.new_zeros(num_rows)
        gathered[ctx.rows] = column
        dist.all_reduce(gathered, group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return gradient[ctx.rows], None, None, None
