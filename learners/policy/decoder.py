"""Runs a micro-batch's tokens through the model's decoder: packed or as padded rows, on one rank or
on several that share them (`learners.policy.sequence_parallel`).

In packed calls, packed attention keeps trajectories apart, and so do the sequence indices that
transformers' kernels for convolutions and recurrences take. In unpacked calls of the model's own
code, rows are trajectories of similar length, or of equal length if padding might change the
result.

Invariant: a token's hidden state depends on its own trajectory alone, whatever shares its call.
Padding follows a trajectory's tokens, where a causal model does not look. Ranks that share a
model's parameters make the same number of calls.
Shapes: N tokens, H hidden size, B trajectories of a call, L their longest.
"""

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from learners.batch.micro_batch import Packing
from learners.policy.sequence_parallel import HeadExchange, TokenSlice
from streamrl.errors import ConfigError
from streamrl.placement.limits import facts_of, require_length, rope_limits
from streamrl.types import Media
from streamrl.vision.tower import VisionTower

MediaOf = Sequence[Sequence[Media]]

_KEPT_APART_BY_ATTENTION = {"full_attention", "sliding_attention"}
_COUNTED_FROM_ROW_START = {"chunked_attention"}
"""Layers whose result depends on where a trajectory begins in its row."""
_BLIND_TO_PADDING = (
    _KEPT_APART_BY_ATTENTION
    | _COUNTED_FROM_ROW_START
    | {
        "attention",
        "conv",
        "hybrid",
        "hybrid_sliding",
        "linear_attention",
        "mamba",
        "mlp",
        "moe",
    }
)
"""Layers that later tokens do not change; others get rows of equal length."""


@dataclass(frozen=True, eq=False)
class DecoderInputs:
    """The ids of N tokens or, if some are images, their embeddings and positions on three axes."""

    token_ids: torch.Tensor
    """[1, N]"""
    embeddings: torch.Tensor | None = None
    """[1, N, H]"""
    positions: torch.Tensor | None = None
    """[3, N]"""
    experts: torch.Tensor | None = None
    """[N, L, K] the experts that the tokens are given to; None: the routers choose."""

    @classmethod
    def make(
        cls, tokens: TokenSlice, packing: Packing, tower: VisionTower | None, media: MediaOf
    ) -> "DecoderInputs":
        """`media` are those of each trajectory."""
        if tower is None:
            return cls(tokens.token_ids, experts=tokens.experts)
        ids = tokens.token_ids[0].split(packing.lengths)
        positions = [tower.positions(i.tolist(), m) for i, m in zip(ids, media, strict=True)]
        embeddings = tower.embed(tokens.token_ids, media, packing.ends[:-1].tolist())
        places = torch.cat(positions, dim=1).to(packing.device)
        return cls(tokens.token_ids, embeddings, places, tokens.experts)

    def of(self, indices: torch.Tensor, bounds: dict[str, Any]) -> dict[str, Any]:
        """The decoder's arguments for rows of these tokens [B, L] that have these bounds."""
        if self.experts is not None:
            bounds = {**bounds, "routed_experts": self.experts[indices]}
        if self.embeddings is None or self.positions is None:
            return {"input_ids": self.token_ids[0, indices], **bounds}
        positions = self.positions[:, indices]
        if "position_ids" in bounds:
            # Beside those of the embedding, transformers takes those in the trajectory.
            positions = torch.cat([bounds["position_ids"][None], positions])
        return {**bounds, "inputs_embeds": self.embeddings[0, indices], "position_ids": positions}


class _Call(NamedTuple):
    """One forward pass of the decoder."""

    indices: torch.Tensor
    """[B, L] the tokens of its rows."""
    real: torch.Tensor
    """Which of the flat [B * L] are no padding."""
    bounds: dict[str, Any]
    """The trajectories in its one row; empty if each row is a trajectory."""


def decode(
    model: PreTrainedModel,
    tokens: TokenSlice,
    *,
    packed: bool,
    has_shards: bool = False,
    tower: VisionTower | None = None,
    media: MediaOf = (),
) -> torch.Tensor:
    """[N, H] hidden states of the tokens, or of this rank's slice of them.

    `has_shards`: all ranks make as many calls, each of which gathers parameters.

    Raises:
        ConfigError: the model's position embedding depends on earlier inputs, or ranks cannot share
            the tokens of such a model.
    """
    packing = tokens.packing
    limit = _rotary_limit(model, packing.longest)
    decoder = decoder_of(model)
    inputs = DecoderInputs.make(tokens, packing, tower, media)

    def states_of(indices: torch.Tensor, bounds: dict[str, Any]) -> torch.Tensor:
        """[B, L, H]"""
        output = decoder(**inputs.of(indices, bounds), use_cache=False)
        states: torch.Tensor = output.last_hidden_state
        return states

    if packed and limit == inf:
        row = torch.arange(tokens.token_ids.shape[1], device=packing.device)[None]
        return states_of(row, _bounds(packing, tokens.positions, tokens.exchange))[0]
    if tokens.exchange is not None:
        raise ConfigError(
            f"learner.mesh.sequence: must be 1 for this {model.config.model_type} model, whose "
            "trajectories do not all share one row"
        )
    calls = [call for part in _parts(packing, limit) for call in _calls(model, packed, *part)]
    if has_shards:
        calls += _missing_calls(len(calls), packing.device)
    states = torch.cat([states_of(c.indices, c.bounds).flatten(0, 1)[c.real] for c in calls])
    order = torch.cat([call.indices.flatten()[call.real] for call in calls]).argsort()
    return states[order]


def decoder_of(model: PreTrainedModel) -> Any:
    """The module that turns token ids into the hidden states that the LM head takes."""
    found = (model.get_decoder(), model.base_model, getattr(model, "model", None))
    inner = (m for m in found if isinstance(m, PreTrainedModel) and m is not model)
    return next(inner, model)


def can_be_packed(model: PreTrainedModel) -> bool:
    """Whether packing may leave this model's results unchanged; the comparison at start decides."""
    accepted = inspect.signature(decoder_of(model).forward).parameters.values()
    takes_bounds = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted)
    return (
        takes_bounds
        and model._can_set_attn_implementation()
        and not _layer_types(model) & _COUNTED_FROM_ROW_START
    )


def is_attention_only(model: PreTrainedModel) -> bool:
    """Whether nothing but attention connects tokens, as far as the model says."""
    is_kept_apart = _layer_types(model) <= _KEPT_APART_BY_ATTENTION
    return can_be_packed(model) and not carries_state(model) and is_kept_apart


def carries_state(model: PreTrainedModel) -> bool:
    """Whether layers carry a state from token to token: recurrent ones, and linear attention."""
    return getattr(model, "_is_stateful", False) or "linear_attention" in _layer_types(model)


def may_share_prompts(model: PreTrainedModel) -> bool:
    """Whether trajectories that begin alike have equal states there, regardless of length."""
    return is_attention_only(model) and _rotary_limit(model, 0) == inf


def own_attention(model: PreTrainedModel) -> str:
    """The attention implementation that computes the model as defined, without packing."""
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
        # scaled_dot_product_attention leaves out the soft cap.
        return "eager"
    return model.config._attn_implementation or "eager"


def _rotary_limit(model: PreTrainedModel, longest: int) -> float:
    """Length beyond which a trajectory's position embedding changes; infinite for most."""
    facts = facts_of(model.config.get_text_config())
    require_length(facts, longest)
    return min(rope_limits(facts).values(), default=inf)


def _layer_types(model: PreTrainedModel) -> set[str]:
    return set(getattr(model.config.get_text_config(), "layer_types", None) or ())


def _bounds(
    packing: Packing, positions: torch.Tensor, exchange: HeadExchange | None = None
) -> dict[str, Any]:
    """The arguments that tell a decoder where trajectories end; `positions` [1, n] are the tokens'
    positions in their trajectories."""
    bounds = {
        "position_ids": positions,
        # Without it transformers looks for trajectories in the positions, and the host waits.
        "attention_mask": torch.ones_like(positions, dtype=torch.bool),
        "packing": packing,
        "exchange": exchange,
    }
    if exchange is not None or packing.places is not None:
        return bounds
    return {
        **bounds,
        "cu_seq_lens_q": packing.ends,
        "cu_seq_lens_k": packing.ends,
        "seq_idx": packing.trajectory_indices[None],
    }


def _parts(packing: Packing, limit: float) -> Iterator[tuple[torch.Tensor, Packing]]:
    """Token indices and bounds of trajectories that may share a call."""
    is_long = torch.tensor([length > limit for length in packing.lengths])
    for chosen in (~is_long, is_long):
        lengths = tuple(torch.tensor(packing.lengths)[chosen].tolist())
        if lengths:
            is_token = chosen.to(packing.device)[packing.trajectory_indices]
            yield is_token.nonzero()[:, 0], Packing(lengths, packing.device)


def _calls(
    model: PreTrainedModel, packed: bool, tokens: torch.Tensor, packing: Packing
) -> list[_Call]:
    if packed:
        bounds = _bounds(packing, packing.positions[None])
        return [_Call(tokens[None], torch.arange(len(tokens), device=tokens.device), bounds)]
    may_pad = _layer_types(model) <= _BLIND_TO_PADDING
    buckets = packing.buckets if may_pad else packing.unpadded_buckets
    return [_Call(tokens[indices], real, {}) for indices, real in buckets]


def _missing_calls(num_calls: int, device: torch.device) -> list[_Call]:
    """Empty calls, until this rank makes as many as the one that makes most."""
    most = torch.tensor(num_calls, device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    first = torch.zeros(1, 1, dtype=torch.int64, device=device)
    return [_Call(first, first[0, :0], {})] * (int(most) - num_calls)
