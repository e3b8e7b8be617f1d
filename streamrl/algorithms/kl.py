"""KL to a reference policy: estimators per token, the exact KL, and its weight in the reward.

With x = logprobs - reference and tokens sampled from the policy (Schulman, "Approximating KL
divergence", 2020): kl = k1 = x; abs = |x|; mse = k2 = x^2 / 2; low_var_kl = k3 = exp(-x) + x - 1.
Only k2 has the gradient of the KL; a trailing + keeps the value of a kind and takes the gradient of
k2. Kind `full` is `full_kl`, the exact sum over the vocabulary.
"""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from streamrl.algorithms.logprobs import PLAIN_LOGITS, LogitTransform, whole_logits
from streamrl.config.algorithm.settings import KlRewardSettings

_LOG_RATIO_BOUND = 20.0
_K3_BOUND = 10.0
_CHUNK_ELEMENTS = 1 << 25


def kl_penalty(logprobs: Tensor, reference_logprobs: Tensor, kind: str) -> Tensor:
    """[R] nats, by any kind except `full`, from both policies' log-probabilities of the sampled
    tokens. Raises ValueError for an unknown kind."""
    difference = logprobs - reference_logprobs
    value = _estimate(difference, kind.removesuffix("+"))
    if not kind.endswith("+"):
        return value
    squared = 0.5 * difference.square()
    return squared - squared.detach() + value.detach()


def _estimate(difference: Tensor, name: str) -> Tensor:
    match name:
        case "kl" | "k1":
            return difference
        case "abs":
            return difference.abs()
        case "mse" | "k2":
            return 0.5 * difference.square()
        case "low_var_kl" | "k3":
            behind = (-difference).clamp(-_LOG_RATIO_BOUND, _LOG_RATIO_BOUND)
            return (behind.expm1() - behind).clamp(-_K3_BOUND, _K3_BOUND)
        case _:
            raise ValueError(f"{name!r} is no kind of KL by sampled tokens")


def teacher_advantages(teacher_logprobs: Tensor, logprobs: Tensor) -> Tensor:
    """[R] log pi_T - log pi of the sampled tokens: one-sample estimates of minus the reverse KL to
    the teacher. Each token is credited with its own difference alone (Thinking Machines, On-Policy
    Distillation, 2025; tinker-cookbook, `distillation`).

    Args:
        logprobs: [R] nats, under the sampling or the trained policy; without gradient.
    """
    return teacher_logprobs - logprobs


_SMALLEST_REST = 1e-7
"""Lower bound of 1 - a sum of float32 probabilities."""


def topk_teacher_kl(logprobs: Tensor, teacher_logprobs: Tensor, divergence: str) -> Tensor:
    """[R] KL between the policy p and a teacher q over the set C of the teacher's K likeliest
    tokens, with all other tokens as one more outcome of probability r:

        reverse_kl    sum_C p (log p - log q) + r_p (log r_p - log r_q)
        forward_kl    sum_C q (log q - log p) + r_q (log r_q - log r_p)

    The extra outcome follows SDPO (arXiv 2601.20802). It makes this a divergence, unlike verl's
    `forward_kl_topk`: at least 0, and at most the KL over the whole vocabulary. It is computed
    exactly at each sampled position, so no importance ratio weighs it.

    Args:
        logprobs: [R, K] nats over the whole vocabulary, with gradient.
        teacher_logprobs: [R, K] nats; -inf for no candidate, which then counts with the others.
    """
    is_candidate = teacher_logprobs > -torch.inf
    mine, theirs = (
        column.masked_fill(~is_candidate, 0.0) for column in (logprobs, teacher_logprobs)
    )
    if divergence == "forward_kl":
        mine, theirs = theirs, mine
    p, q = (column.exp() * is_candidate for column in (mine, theirs))
    rest_p, rest_q = ((1 - part.sum(1)).clamp_min(_SMALLEST_REST) for part in (p, q))
    return (p * (mine - theirs)).sum(1) + rest_p * (rest_p.log() - rest_q.log())


def full_kl(
    hidden: Tensor,
    weight: Tensor,
    reference_hidden: Tensor,
    reference_weight: Tensor,
    transform: LogitTransform = PLAIN_LOGITS,
    bias: Tensor | None = None,
    reference_bias: Tensor | None = None,
) -> Tensor:
    """[R] exact KL from hidden states; logits exist for one chunk of tokens at a time, and are
    computed again in backward.

    Args:
        hidden, reference_hidden: [R, H]; the policy's has a gradient.
        weight, reference_weight: [V, H] LM heads; `bias`, `reference_bias` [V] are theirs, if any.
    """

    def of_rows(mine: Tensor, theirs: Tensor) -> Tensor:
        return kl_of_logits(
            whole_logits(mine, weight, bias, transform),
            whole_logits(theirs, reference_weight, reference_bias, transform),
        )

    rows = max(1, _CHUNK_ELEMENTS // max(len(weight), 1))
    chunks = zip(hidden.split(rows), reference_hidden.detach().split(rows), strict=True)
    parts = [
        checkpoint(
            of_rows,
            *chunk,
            use_reentrant=False,
            preserve_rng_state=False,
            determinism_check="none",
        )
        for chunk in chunks
    ]
    return torch.cat(parts)


def kl_of_logits(logits: Tensor, reference: Tensor) -> Tensor:
    """[R] sum over the vocabulary of p (log p - log q), from logits or log-probabilities [R, V]."""
    log_p, log_q = logits.log_softmax(-1), reference.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


class KlCoefficient:
    """The weight of the KL in the reward: `coef`; the controller `adaptive` starts there and
    follows the measured KL (Ziegler et al., arXiv 1909.08593, section 2.2)."""

    def __init__(self, config: KlRewardSettings) -> None:
        self._config = config
        self.is_adaptive = config.controller == "adaptive"
        self.value = config.coef

    def update(self, current_kl: float, n_steps: int) -> None:
        """Adapt to a step on `n_steps` trajectories with a KL of `current_kl` nats per token."""
        if self.is_adaptive:
            error = min(max(current_kl / self._config.target - 1, -0.2), 0.2)
            self.value *= 1 + error * n_steps / self._config.horizon
