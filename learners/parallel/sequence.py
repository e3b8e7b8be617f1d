"""Sequence parallelism: the S ranks of a block share the tokens of one micro-batch.

Rank i embeds and transforms the i-th stretch of the packed tokens; around attention the ranks
exchange heads for tokens (`sequence_attention`). It computes log-probabilities, entropies and
values of the response tokens that its stretch predicts, and the columns are put together again, so
that the objective sees whole trajectories on every rank.

Invariant: gradients summed over the block are those of one rank: the objective is computed S times
with equal results, and each rank passes back the gradient of its own rows alone.
Shapes: N tokens of the micro-batch, n = ceil(N / S) of a rank, R response tokens, r of them
predicted by this rank's tokens.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import pad
from transformers import PreTrainedModel

from learners.micro_batch import MicroBatch
from learners.parallel.mesh import Mesh
from learners.parallel.sequence_attention import HeadExchange, SequenceBlock
from learners.policy.packed.shared_prompts import SharedPrompts
from learners.policy.packed.stretches import Packing
from streamrl.errors import ConfigError

_ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention"})
_ROPES_OF_THE_ROW = frozenset({"longrope", "dynamic"})
"""Position embeddings that depend on the longest trajectory of a row, not on the token's place."""


def sequence_block(
    model: PreTrainedModel, mesh: Mesh, *, is_packed: bool = True
) -> SequenceBlock | None:
    """The block of this rank; None if it has the tokens for itself.

    Raises:
        ConfigError: the ranks cannot share the tokens of this model.
    """
    size = mesh.size("sequence")
    if size == 1:
        return None
    require_shareable(model, size, mesh.size("tensor"))
    if not is_packed:
        raise ConfigError(
            f"learner.mesh.sequence {size} shares the tokens of one row, and "
            f"{model.config.model_type} runs each trajectory as a row of its own: set it to 1"
        )
    return SequenceBlock(mesh.group("sequence"), mesh.index("sequence"), size)


def require_shareable(model: PreTrainedModel, size: int, num_tensor: int = 1) -> None:
    """Refuse a model whose heads `size` x `num_tensor` ranks cannot share, or that carries state
    along tokens.

    Raises:
        ConfigError: as it says.
    """
    config: Any = model.config.get_text_config()
    name, layers = config.model_type, getattr(config, "layer_types", None) or ()
    others = sorted(set(layers) - _ATTENTION_LAYERS)
    if others or getattr(model, "_is_stateful", False):
        raise ConfigError(
            f"learner.mesh.sequence {size} exchanges attention heads for tokens, and {name} has "
            f"layers that are no attention ({', '.join(others) or 'recurrent ones'}): set it to 1"
        )
    ropes = getattr(config, "rope_parameters", None) or {}
    dicts = [rope for rope in (ropes, *ropes.values()) if isinstance(rope, dict)]
    types = {str(rope.get("rope_type")) for rope in dicts}
    if row := sorted(types & _ROPES_OF_THE_ROW):
        raise ConfigError(
            f"learner.mesh.sequence {size} cuts trajectories, and the {row[0]} position embedding "
            f"of {name} depends on their whole length: set it to 1"
        )
    if config.num_attention_heads % (size * num_tensor):
        ranks = f"{size} x tensor {num_tensor}" if num_tensor > 1 else f"{size}"
        raise ConfigError(
            f"learner.mesh.sequence {ranks} does not divide the {config.num_attention_heads} "
            f"attention heads of {name}"
        )


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
    first_row: int = 0
    """Of R, which of the micro-batch's response tokens is the first of r."""
    num_rows: int = 0
    """R"""

    @classmethod
    def of(
        cls,
        micro_batch: MicroBatch,
        block: SequenceBlock | None,
        shared: SharedPrompts | None = None,
    ) -> "TokenSlice":
        """This rank's slice, in order of ranks; without a block all tokens, or what is `shared`."""
        token_ids, packing = micro_batch.token_ids, micro_batch.packing
        predictors, targets = micro_batch.predictors, micro_batch.targets
        if block is None:
            if shared is not None:
                token_ids, packing = token_ids[:, shared.tokens], shared.packing
                predictors = shared.predictors
            return cls(token_ids, packing.positions[None], predictors, targets, packing, None)
        positions = packing.positions[None]
        num_tokens = token_ids.shape[1]
        size = -(-num_tokens // block.size)
        start = block.rank * size
        padding = (0, size * block.size - num_tokens)
        bounds = torch.tensor([start, start + size], device=predictors.device)
        first, last = torch.searchsorted(predictors, bounds).tolist()
        return cls(
            token_ids=pad(token_ids, padding)[:, start : start + size],
            positions=pad(positions, padding)[:, start : start + size],
            predictors=predictors[first:last] - start,
            targets=targets[first:last],
            packing=packing,
            exchange=HeadExchange(block, num_tokens),
            first_row=first,
            num_rows=len(predictors),
        )

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
