"""Log-probabilities of chosen tokens straight from hidden states, without a batch's logits.

The vocabulary is processed in blocks: forward keeps a running logsumexp, backward recomputes each
block. The [R, V] logits never exist as a whole; the price is one more matrix product, which is
saved when the logits are few enough to be kept.

Invariant: the results equal log_softmax in float32 over whole logits. On a GPU the logits
themselves are float32 too, whereas liger-kernel rounds them to the dtype of the hidden states.

Letters: R response tokens, H hidden size, V vocabulary, B vocabulary entries in a block.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class LogitTransform:
    """The transform of hidden @ weight.T before the softmax, the same as when sampling.

    Multiply by `scale` (Granite, Cohere), apply `softcap * tanh(logits / softcap)` (Gemma 2), then
    divide by the temperature.
    """

    temperature: float = 1.0
    softcap: float | None = None
    scale: float = 1.0

    def __call__(self, logits: Tensor) -> Tensor:
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits if self.temperature == 1.0 else logits / self.temperature

    def apply_(self, logits: Tensor) -> Tensor:
        """The same in place, without gradient."""
        if self.scale != 1.0:
            logits.mul_(self.scale)
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits if self.temperature == 1.0 else logits.div_(self.temperature)

    @property
    def slope(self) -> float:
        """Slope of the transform without its softcap."""
        return self.scale / self.temperature

    def uncap_(self, gradient: Tensor, logits: Tensor) -> Tensor:
        """Turn the gradient after the softcap into that before it, in place, given the transformed
        `logits`."""
        if self.softcap is not None:
            share = logits.mul(self.temperature / self.softcap)
            gradient = gradient.mul_(share.square_().neg_().add_(1.0))
        return gradient


PLAIN_LOGITS = LogitTransform()


CPU_BLOCK_ELEMENTS = 1 << 20
"""Elements of [R, B] logits that stay near a core's caches."""
CUDA_BLOCK_ELEMENTS = 1 << 26
KEPT_ELEMENTS = 1 << 25
"""Elements of [R, V] logits that are kept for the backward pass: 128 MiB at most."""
MIN_BLOCK = 256
"""The smallest block, in vocabulary entries: a smaller matrix product is not worth its launch."""
ALIGNMENT = 128
"""Block sizes are multiples of it: bfloat16 products whose sizes are not multiples of 8 run on old
GPU kernels, four times slower."""


@dataclass(frozen=True, eq=False)
class TokenLogprobs:
    logprobs: Tensor
    """[R] nats, at least float32."""
    entropy: Tensor | None
    """[R] nats, if requested."""


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    transform: LogitTransform = PLAIN_LOGITS,
    with_entropy: bool = False,
    trains_entropy: bool = True,
) -> TokenLogprobs:
    """Log-probability of each target, and the entropy of its distribution.

    Args:
        hidden: [R, H] last hidden states at the positions that predict `targets`.
        weight: [V, H] the LM head's; `bias` [V] if it has one.
        targets: [R] int64 token ids.
        trains_entropy: whether the entropy has a gradient.

    Raises:
        ValueError: shapes do not match, or a target lies outside the vocabulary (checked on a CPU
            only; on a GPU the check would wait for the device).
    """
    _check(hidden, weight, targets)
    keeps_logits = torch.is_grad_enabled() and len(hidden) * len(weight) <= KEPT_ELEMENTS
    # Backward recomputes outside autocast, so forward must not run inside it.
    with torch.autocast(hidden.device.type, enabled=False):
        logprobs, entropy = _BlockedLogprobs.apply(  # type: ignore[no-untyped-call]
            hidden, weight, bias, targets, transform, with_entropy, keeps_logits
        )
    if entropy is not None and not trains_entropy:
        entropy = entropy.detach()
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
        keeps_logits: bool,
    ) -> tuple[Tensor, Tensor | None]:
        kept: list[tuple[slice, Tensor]] = []
        normalizer = hidden.new_full((len(hidden),), -torch.inf, dtype=_wide(hidden))
        chosen, mean_logit = torch.zeros_like(normalizer), torch.zeros_like(normalizer)
        for block, logits in logit_blocks(hidden, weight, bias, transform):
            if keeps_logits:
                kept.append((block, logits))
            inside, index = _locate(targets, block)
            chosen = torch.where(inside, logits.gather(1, index).squeeze(1), chosen)
            block_normalizer = logits.logsumexp(1)
            total = torch.logaddexp(normalizer, block_normalizer)
            if with_entropy:
                # Mean of the logits over this block, with p normalized within the block.
                probabilities = (logits - block_normalizer[:, None]).exp_()
                block_mean = probabilities.mul_(logits).sum(1)
                mean_logit = torch.lerp(mean_logit, block_mean, (block_normalizer - total).exp())
            normalizer = total
        logprobs = chosen - normalizer
        entropy = normalizer - mean_logit if with_entropy else None
        ctx.save_for_backward(hidden, weight, bias, targets, normalizer, entropy)
        ctx.transform, ctx.kept = transform, kept
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normalizer, entropy = ctx.saved_tensors
        if upstream[0] is None and upstream[1] is None:
            return (None,) * len(ctx.needs_input_grad)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(hidden, dtype=_wide(hidden)) if needs_hidden else None
        grad_weight = torch.empty_like(weight) if needs_weight else None
        grad_bias = torch.empty_like(bias) if needs_bias else None
        of_logprobs, of_entropy = upstream
        # The factor of each row multiplies [R, H] tensors, which are smaller than the logits. With
        # upstream gradients g of logprobs and h of entropy, the gradient of a row is
        # -g (p - onehot) without h, and -(p (g + h (log p + entropy)) - g onehot) with h.
        minus_one = torch.full_like(normalizer, -1.0)
        minus_g = torch.zeros_like(normalizer) if of_logprobs is None else -of_logprobs
        factor, at_target = (minus_g, minus_one) if of_entropy is None else (minus_one, minus_g)
        factor = (factor * ctx.transform.slope)[:, None]
        scaled = (hidden * factor).to(hidden.dtype)
        for block, logits in ctx.kept or logit_blocks(hidden, weight, bias, ctx.transform):
            gradient = _logit_gradient(logits, normalizer, entropy, *upstream)
            inside, index = _locate(targets, block)
            gradient.scatter_add_(1, index, (at_target * inside)[:, None])
            gradient = ctx.transform.uncap_(gradient, logits)
            if grad_bias is not None:
                grad_bias[block] = gradient.T @ factor[:, 0]
            gradient = gradient.to(hidden.dtype)
            if grad_hidden is not None:
                _add_product_(grad_hidden, gradient, weight[block].to(hidden.dtype))
            if grad_weight is not None:
                grad_weight[block] = gradient.T @ scaled
        hidden_result = None if grad_hidden is None else (grad_hidden * factor).to(hidden.dtype)
        return hidden_result, grad_weight, grad_bias, None, None, None, None


def logit_blocks(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, transform: LogitTransform
) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of the vocabulary and their logits [R, B], at least float32, owned by the caller."""
    for block in _blocks(len(hidden), weight):
        logits = _product(hidden, weight[block].to(hidden.dtype).T)
        yield block, transform.apply_(logits if bias is None else logits.add_(bias[block]))


def whole_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, transform: LogitTransform
) -> Tensor:
    """Logits [R, V] of the whole vocabulary, at least float32, with gradient."""
    logits: Tensor = _Logits.apply(hidden, weight)  # type: ignore[no-untyped-call]
    return transform(logits if bias is None else logits + bias)


class _Logits(torch.autograd.Function):
    """hidden @ weight.T, as `logit_blocks` computes it."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return _product(hidden, weight.to(hidden.dtype).T)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        hidden, weight = ctx.saved_tensors
        gradient = gradient.to(hidden.dtype)
        of_hidden, of_weight = ctx.needs_input_grad
        return (
            gradient @ weight.to(hidden.dtype) if of_hidden else None,
            (gradient.T @ hidden).to(weight.dtype) if of_weight else None,
        )


def _product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right, at least float32."""
    if left.is_cuda and left.dtype != _wide(left):
        return torch.mm(left, right, out_dtype=_wide(left))
    return (left @ right).to(_wide(left))


def _add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += _product(left, right)


def _logit_gradient(
    logits: Tensor,
    normalizer: Tensor,
    entropy: Tensor | None,
    of_logprobs: Tensor | None,
    of_entropy: Tensor | None,
) -> Tensor:
    """[R, B] gradient of the logits without the term of the target."""
    log_p = logits - normalizer[:, None]
    if of_entropy is None or entropy is None:
        return log_p.exp_()
    share = (log_p + entropy[:, None]).mul_(of_entropy[:, None])
    if of_logprobs is not None:
        share.add_(of_logprobs[:, None])
    return log_p.exp_().mul_(share)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _locate(targets: Tensor, block: slice) -> tuple[Tensor, Tensor]:
    """Whether each target lies in the block [R], and its index there [R, 1] (0 if it does not)."""
    inside = (targets >= block.start) & (targets < block.stop)
    return inside, torch.where(inside, targets - block.start, 0)[:, None]


def _blocks(rows: int, weight: Tensor) -> Iterator[slice]:
    elements = CUDA_BLOCK_ELEMENTS if weight.is_cuda else CPU_BLOCK_ELEMENTS
    vocabulary = weight.shape[0]
    size = max(MIN_BLOCK, elements // max(rows, 1) // ALIGNMENT * ALIGNMENT)
    for start in range(0, vocabulary, size):
        yield slice(start, min(start + size, vocabulary))


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
