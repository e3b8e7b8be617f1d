"""Log-probabilities of chosen tokens straight from hidden states, without the logits of a batch.

The vocabulary is walked in blocks: forward keeps a running logsumexp, backward recomputes each
block. So the [R, V] logits never exist; the price is one more matrix product. On a GPU with
liger-kernel installed its fused kernels do the same.

Invariant: the results are those of log_softmax in float32 over whole logits.

Letters: R response tokens, H hidden size, V vocabulary, B tokens of the vocabulary in a block.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, cast

import torch
from torch import Tensor

CPU_BLOCK_ELEMENTS = 1 << 22
"""[R, B] logits that stay near a core's caches."""
CUDA_BLOCK_ELEMENTS = 1 << 26
MIN_BLOCK = 256
"""Tokens of the vocabulary below which a matrix product is no longer worth its start."""


@dataclass(frozen=True)
class LogitTransform:
    """What is done to hidden @ weight.T before the softmax; the same as when sampling.

    First multiplication by `scale` (Granite, Cohere), then `softcap * tanh(logits / softcap)`
    (Gemma 2), then division by the temperature.
    """

    temperature: float = 1.0
    softcap: float | None = None
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.temperature <= 0 or (self.softcap is not None and self.softcap <= 0):
            raise ValueError(
                f"temperature is {self.temperature}, softcap {self.softcap}; both must be positive"
            )

    def __call__(self, logits: Tensor) -> Tensor:
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits if self.temperature == 1.0 else logits / self.temperature

    def backward_(self, gradient: Tensor, logits: Tensor) -> Tensor:
        """Gradient before the transform, in place, from transformed `logits`, which are lost."""
        if self.softcap is not None:
            share = logits.mul_(self.temperature / self.softcap)
            gradient = gradient.mul_(share.square_().neg_().add_(1.0))
        factor = self.scale / self.temperature
        return gradient if factor == 1.0 else gradient.mul_(factor)


PLAIN_LOGITS = LogitTransform()


@dataclass(frozen=True, eq=False)
class TokenLogprobs:
    logprobs: Tensor
    """[R] nats, at least float32."""
    entropy: Tensor | None
    """[R] nats, if asked for."""


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    transform: LogitTransform = PLAIN_LOGITS,
    with_entropy: bool = False,
    allow_liger: bool = True,
) -> TokenLogprobs:
    """Log-probability of each target, and the entropy of its distribution.

    Args:
        hidden: [R, H] last hidden states at the positions that predict `targets`.
        weight: [V, H] of the LM head; `bias` [V] if it has one.
        targets: [R] int64 token ids.
        with_entropy: also return the entropy, with gradient.

    Raises:
        ValueError: shapes do not fit, or a target lies outside the vocabulary (CPU only: looking
            would make a GPU wait).
    """
    _check(hidden, weight, targets)
    if allow_liger and not with_entropy and hidden.is_cuda and _has_liger():
        logprobs = _liger_logprobs(hidden, weight, targets, bias, transform)
        if logprobs is not None:
            return TokenLogprobs(logprobs, None)
    # Backward recomputes outside autocast, so forward must not run inside it.
    with torch.autocast(hidden.device.type, enabled=False):
        logprobs, entropy = _BlockedLogprobs.apply(  # type: ignore[no-untyped-call]
            hidden, weight, bias, targets, transform, with_entropy
        )
    return TokenLogprobs(logprobs, entropy)


class _BlockedLogprobs(torch.autograd.Function):
    """(logprobs [R], entropy [R] or None), one block of the vocabulary at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        transform: LogitTransform,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        rows = len(hidden)
        normalizer = hidden.new_full((rows,), -torch.inf, dtype=_wide(hidden))
        chosen, mean_logit = torch.zeros_like(normalizer), torch.zeros_like(normalizer)
        for block in _blocks(rows, weight):
            logits = _logits(hidden, weight, bias, transform, block)
            inside, index = _locate(targets, block)
            chosen = torch.where(inside, logits.gather(1, index).squeeze(1), chosen)
            block_normalizer = logits.logsumexp(1)
            total = torch.logaddexp(normalizer, block_normalizer)
            if with_entropy:
                # Of p * logit over this block, p relative to the block's own normalizer.
                probabilities = (logits - block_normalizer[:, None]).exp_()
                block_mean = probabilities.mul_(logits).sum(1)
                mean_logit = torch.lerp(mean_logit, block_mean, (block_normalizer - total).exp())
            normalizer = total
        logprobs = chosen - normalizer
        entropy = normalizer - mean_logit if with_entropy else None
        ctx.save_for_backward(hidden, weight, bias, targets, normalizer, entropy)
        ctx.transform = transform
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normalizer, entropy = ctx.saved_tensors
        of_logprobs, of_entropy = upstream
        if of_logprobs is None and of_entropy is None:
            return (None,) * len(ctx.needs_input_grad)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(hidden, dtype=_wide(hidden)) if needs_hidden else None
        grad_weight = torch.empty_like(weight) if needs_weight else None
        grad_bias = torch.empty_like(bias) if needs_bias else None
        for block in _blocks(len(hidden), weight):
            logits = _logits(hidden, weight, bias, ctx.transform, block)
            gradient = _logit_gradient(logits, normalizer, entropy, of_logprobs, of_entropy)
            if of_logprobs is not None:
                inside, index = _locate(targets, block)
                gradient.scatter_add_(1, index, (of_logprobs * inside)[:, None])
            gradient = ctx.transform.backward_(gradient, logits)
            if grad_bias is not None:
                grad_bias[block] = gradient.sum(0)
            gradient = gradient.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden += gradient @ weight[block].to(hidden.dtype)
            if grad_weight is not None:
                grad_weight[block] = gradient.T @ hidden
        hidden_result = None if grad_hidden is None else grad_hidden.to(hidden.dtype)
        return hidden_result, grad_weight, grad_bias, None, None, None


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, transform: LogitTransform, block: slice
) -> Tensor:
    """[R, B] at least float32, owned by the caller."""
    logits = hidden @ weight[block].to(hidden.dtype).T
    logits = logits.to(_wide(hidden))
    return transform(logits if bias is None else logits.add_(bias[block]))


def _logit_gradient(
    logits: Tensor,
    normalizer: Tensor,
    entropy: Tensor | None,
    of_logprobs: Tensor | None,
    of_entropy: Tensor | None,
) -> Tensor:
    """[R, B] but for the one at the target: -p (g + h (log p + entropy)), g and h upstream."""
    log_p = logits - normalizer[:, None]
    if of_entropy is None or entropy is None:
        return log_p.exp_().mul_((-cast(Tensor, of_logprobs))[:, None])
    factor = (log_p + entropy[:, None]).mul_(-of_entropy[:, None])
    if of_logprobs is not None:
        factor.sub_(of_logprobs[:, None])
    return log_p.exp_().mul_(factor)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _locate(targets: Tensor, block: slice) -> tuple[Tensor, Tensor]:
    """Which targets lie in the block [R], and where in it [R, 1]; 0 for those that don't."""
    inside = (targets >= block.start) & (targets < block.stop)
    return inside, torch.where(inside, targets - block.start, 0)[:, None]


def _blocks(rows: int, weight: Tensor) -> Iterator[slice]:
    elements = CUDA_BLOCK_ELEMENTS if weight.is_cuda else CPU_BLOCK_ELEMENTS
    vocabulary = weight.shape[0]
    size = min(vocabulary, max(MIN_BLOCK, elements // max(rows, 1)))
    for start in range(0, vocabulary, size):
        yield slice(start, min(start + size, vocabulary))


@cache
def _has_liger() -> bool:
    return find_spec("liger_kernel") is not None


def _liger_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, transform: LogitTransform
) -> Tensor | None:
    """Minus Liger's per-token cross-entropy; None where it cannot express the transform."""
    if transform.softcap is not None and transform.temperature != 1.0:
        return None
    liger = import_module("liger_kernel.transformers.functional")
    factor = transform.scale / transform.temperature
    if factor != 1.0:
        hidden = hidden * factor
        bias = None if bias is None else bias * factor
    losses: Tensor = liger.liger_fused_linear_cross_entropy(
        hidden,
        weight,
        targets,
        bias=bias,
        reduction="none",
        softcap=transform.softcap,
        accum_dtype=torch.float32,
    )
    return -losses


def _check(hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden: has shape {tuple(hidden.shape)}, weight {tuple(weight.shape)};"
            " must be [R, H] and [V, H]"
        )
    if targets.shape != hidden.shape[:1]:
        raise ValueError(f"targets: has shape {tuple(targets.shape)}; must be ({len(hidden)},)")
    if not targets.is_cuda and bool(((targets < 0) | (targets >= len(weight))).any()):
        raise ValueError(f"targets: has ids outside the vocabulary; must be in [0, {len(weight)})")
