"""Attention over packed trajectories: linear layers compute every token once and no padding.

A packed forward pass has batch size 1 and N tokens of S trajectories. In half precision on a GPU
of compute capability 8.0 or newer a variable-length kernel attends within each trajectory:
FlashAttention 3 or 4, which torch calls in place of its own, then flash-attn's (extra `flash`),
then torch's. Elsewhere, and where a model caps its scores or has sinks, trajectories of similar
length (within a factor of two) share one padded call.

Invariant: a token attends to tokens of its own trajectory only, itself and earlier ones; what a
model asks for and this file does not compute is an error.
Shapes: N tokens, Q query heads, H key-value heads, D head width, B trajectories of a bucket, L
their longest.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from inspect import signature
from typing import Any

import torch
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    current_flash_attention_impl,
    restore_flash_attention_impl,
    sdpa_kernel,
)
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from learners.batch.micro_batch import Packing, rows
from learners.policy.sequence_parallel import over_slices
from streamrl.config.learner import FlashAttentionVersion
from streamrl.errors import ConfigError
from streamrl.extras import FLASH_ATTENTION, is_installed

log = logging.getLogger(__name__)

HALF = (torch.bfloat16, torch.float16)

_VERSIONS: Mapping[int, tuple[str, tuple[int, ...]]] = {3: ("FA3", (9,)), 4: ("FA4", (9, 10))}
"""The names of what torch calls in place of its own kernel, once it is activated, and the first
numbers of the compute capabilities that each is made for."""


def use_flash_attention(wanted: FlashAttentionVersion, device: torch.device) -> None:
    """Choose the variable-length kernel of this process for a GPU; on a CPU there is none.

    Raises:
        ConfigError: the wanted version is not installed, not for this device, or does not work.
    """
    if wanted == 2 or (wanted == "auto" and device.type != "cuda"):
        return
    for version in _VERSIONS if wanted == "auto" else (wanted,):
        reason = _not_activated(version, device)
        if reason is None:
            log.info("attention is computed by FlashAttention %d", version)
            return
        if wanted != "auto":
            raise ConfigError(
                f"learner.flash_attention: was {version}, and {reason}; auto takes what is there"
            )


def _not_activated(version: int, device: torch.device) -> str | None:
    """Why it cannot be; None once it is."""
    if device.type != "cuda":
        return f"learner.device is {device}, not a GPU"
    if not is_installed(module := FLASH_ATTENTION[version]):
        return f"there is no module {module}"
    name, gpus = _VERSIONS[version]
    if (major := torch.cuda.get_device_capability(device)[0]) not in gpus:
        made_for = " and ".join(f"{gpu}.x" for gpu in gpus)
        return f"it is for compute capability {made_for}, the GPU has {major}.x"
    if current_flash_attention_impl() == name:
        return None
    try:
        activate_flash_attention_impl(name)
        _require_same(device)
    except Exception as error:
        # Torch 2.13 cannot read the answer of flash-attn-4 4.0.0b36, and 2.11 refuses its gradient.
        if current_flash_attention_impl() is not None:
            restore_flash_attention_impl()
        reason = str(error).partition("\n")[0] or type(error).__name__
        log.warning("FlashAttention %d is installed and does not work: %s", version, reason)
        return f"it does not work: {reason}"
    return None


def _require_same(device: torch.device) -> None:
    """Raise AssertionError, or what the kernel raises, unless it gives a few random tokens the
    output and the gradients that the buckets do."""
    packing, random = Packing((40, 3), device), torch.Generator(device).manual_seed(0)
    options: dict[str, Any] = {"generator": random, "device": device, "dtype": torch.bfloat16}
    query, key, value = (
        torch.randn(packing.num_tokens, heads, 64, **options).requires_grad_()
        for heads in (2, 1, 1)
    )
    for window in (None, 16):
        found = []
        for way in (_unpadded, _bucketed):
            output = way(query, key, value, packing, Scores(window=window))
            # Another weight for each number: where all are alike, scores have no gradient.
            weights = torch.linspace(-1.0, 1.0, output.numel(), device=device).view(output.shape)
            gradients = torch.autograd.grad((output * weights).sum(), (query, key, value))
            found.append((output, *gradients))
        torch.testing.assert_close(*found, rtol=5e-2, atol=5e-2)


@cache
def _has_kernels(device: torch.device) -> bool:
    """Whether variable-length kernels are made for it."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


NAME = "streamrl_packed"

SHORT = 32
"""Tokens of a row up to which plain matrix products take a CPU less time than torch's kernel, which
begins anew for each head of each trajectory."""

_KNOWN = {
    "cu_seq_lens_k",
    "cu_seq_lens_q",
    "deterministic",
    "is_causal",
    "position_ids",
    "seq_idx",
    "sliding_window",
}
"""Arguments of attention that say what `packing` and the mask say, or how it is computed."""


class UnsupportedAttention(ConfigError):
    """The model asks for something that packed attention does not compute."""


@dataclass(frozen=True)
class LayerMask:
    """What a layer's mask says besides "causal, within a trajectory"; stands for the mask."""

    window: int | None
    """Tokens that a token sees, itself included; None: all earlier ones."""


@dataclass(frozen=True, eq=False)
class Scores:
    """What becomes of query @ key before and in the softmax."""

    scale: float | None = None
    """None: one over the square root of the head width."""
    window: int | None = None
    softcap: float | None = None
    """Scores become softcap * tanh(score / softcap)."""
    sinks: torch.Tensor | None = None
    """[Q] one more score per head, which takes its share of the softmax and has no value."""

    @property
    def are_plain(self) -> bool:
        """Whether kernels know all that is asked for."""
        return self.softcap is None and self.sinks is None


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | LayerMask | None,
    *,
    packing: Packing | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each trajectory: output [1, N, Q, D] for query [1, Q, N, D], key and
    value [1, H, N, D]. UnsupportedAttention if the model passes what would change the result."""
    if packing is None or not isinstance(attention_mask, LayerMask):
        raise UnsupportedAttention(f"{type(module).__name__} is not told where trajectories end")
    _require_known(module, kwargs)
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    scores = Scores(scaling, attention_mask.window, softcap, s_aux)
    is_half = query.dtype in HALF and _has_kernels(query.device)
    has_kernel = is_half and scores.are_plain and takes_width(q.shape[-1], v.shape[-1])
    attend = _unpadded if has_kernel else _bucketed
    return attend(q, k, v, packing, scores)[None], None


def takes_width(of_keys: int, of_values: int) -> bool:
    """Whether the variable-length kernel takes heads so wide. FlashAttention 4 takes those between
    128 and 256 on some GPUs alone, and the others those between 192 and 256."""
    highest = 128 if current_flash_attention_impl() == "FA4" else 192
    return of_keys == of_values and of_keys in (*range(8, highest + 1, 8), 256)


def _require_known(module: torch.nn.Module, arguments: dict[str, Any]) -> None:
    is_causal = arguments.get("is_causal")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise UnsupportedAttention(f"{type(module).__name__} is not causal")
    asked = [
        name
        for name, value in arguments.items()
        if name not in _KNOWN and (isinstance(value, torch.Tensor) or value)
    ]
    if asked:
        raise UnsupportedAttention(
            f"{type(module).__name__} passes {', '.join(asked)} to its attention, which packed "
            "attention does not compute"
        )


def _bucketed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packing: Packing,
    scores: Scores,
) -> torch.Tensor:
    """[N, Q, D] from [N, Q, D] and twice [N, H, D]."""
    outputs = []
    for indices, _ in packing.buckets:
        # Padding follows a trajectory's own tokens, where causal attention does not look.
        q, k, v = (rows(tensor, indices).transpose(1, 2) for tensor in (query, key, value))
        has_kernel = scores.are_plain and (query.is_cuda or indices.shape[1] > SHORT)
        attended = _padded(q, k, v, scores) if has_kernel else _scored(q, k, v, scores)
        outputs.append(attended.transpose(1, 2).flatten(0, 1))
    return rows(torch.cat(outputs), packing.order)


def _padded(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores
) -> torch.Tensor:
    """[B, Q, L, D] by torch's kernel."""
    longest = query.shape[2]
    is_windowed = scores.window is not None and scores.window < longest
    if query.is_cuda:
        # Else torch keeps all scores there: its kernel without them knows no groups of heads.
        key, value = _for_each_query(query, key, value)
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=_visible(longest, scores.window, query.device) if is_windowed else None,
        is_causal=not is_windowed,
        scale=scores.scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _scored(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores
) -> torch.Tensor:
    """[B, Q, L, D] with all scores in memory, as transformers' eager attention has them."""
    key, value = _for_each_query(query, key, value)
    scale = query.shape[-1] ** -0.5 if scores.scale is None else scores.scale
    logits = (query @ key.transpose(2, 3) * scale).float()
    if scores.softcap is not None:
        logits = scores.softcap * torch.tanh(logits / scores.softcap)
    visible = _visible(query.shape[2], scores.window, query.device)
    logits = logits + torch.where(visible, 0.0, -torch.inf)
    if scores.sinks is not None:
        sinks = scores.sinks.float()[:, None, None].expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, sinks], dim=-1)
    shares = logits.softmax(-1)
    if scores.sinks is not None:
        shares = shares[..., : key.shape[2]]
    return shares.to(value.dtype) @ value


def _for_each_query(query: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Key and value [., H, ...] repeated, so that each query head of [., Q, ...] has its own."""
    groups = query.shape[1] // tensors[0].shape[1]
    return tensors if groups == 1 else tuple(t.repeat_interleave(groups, dim=1) for t in tensors)


def _visible(longest: int, window: int | None, device: torch.device) -> torch.Tensor:
    """[L, L] bool: which keys (columns) a query (row) attends to."""
    visible = torch.ones(longest, longest, dtype=torch.bool, device=device).tril()
    return visible if window is None else visible.triu(1 - window)


def _unpadded(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packing: Packing,
    scores: Scores,
) -> torch.Tensor:
    """As `_bucketed`, by a variable-length kernel."""
    if packing.places is not None:
        query, key, value = (rows(tensor, packing.repeated) for tensor in (query, key, value))
    ends, longest = packing.ends, packing.longest
    bounds = (ends, ends, longest, longest)
    window = (-1 if scores.window is None else scores.window - 1, 0)
    is_replaced = current_flash_attention_impl() is not None
    attended: torch.Tensor
    if not is_replaced and (flash := _flash_attention()) is not None:
        options = {"softmax_scale": scores.scale, "causal": True, "window_size": window}
        attended = flash(query, key, value, *bounds, **options)
    else:
        attended = _torch_attention(
            query, key, value, *bounds, scale=scores.scale, window_size=window
        )
    return attended if packing.places is None else rows(attended, packing.first)


def _torch_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *bounds: Any, **options: Any
) -> Any:
    from torch.nn.attention.varlen import varlen_attn

    if _takes_grouped_heads():
        options["enable_gqa"] = True
    else:
        key, value = _for_each_query(query, key, value)
    kernel: Any = varlen_attn
    # Else torch 2.15 takes cuDNN, also where another FlashAttention has been chosen.
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return kernel(query.contiguous(), key.contiguous(), value.contiguous(), *bounds, **options)


@cache
def _takes_grouped_heads() -> bool:
    """Whether torch's kernel reads each key-value head for all its query heads: since 2.12."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in signature(varlen_attn).parameters


@cache
def _flash_attention() -> Any:
    """flash-attn's function; None if it is not installed."""
    if not is_installed("flash_attn.flash_attn_interface"):
        return None
    return import_module("flash_attn").flash_attn_varlen_func


def layer_mask(local_size: int | None = None, **kwargs: Any) -> Any:
    """Called by transformers for each kind of layer, in place of making a mask."""
    return LayerMask(local_size)


attend = over_slices(packed_attention)
"""As transformers calls it."""

AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, layer_mask)
