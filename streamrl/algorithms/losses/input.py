"""What a policy loss is computed from, and what it returns.

Invariant: a LossInput that exists has one row per token (or sequence) everywhere, is at least
float32, and holds no non-finite number in a token that contributes nothing.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from streamrl.algorithms.candidates import Candidates
from streamrl.algorithms.losses.aggregation import BatchTotals
from streamrl.algorithms.sequences import Sequences


@dataclass(frozen=True, eq=False)
class LossInput:
    """One micro-batch. Every [R] tensor holds the response tokens of `sequences`, in order."""

    logprobs: Tensor
    """[R] nats, under the current policy, with gradient."""
    proximal_logprobs: Tensor
    """[R] nats, under the policy that the ratio is taken to."""
    advantages: Tensor
    """[R]"""
    importance_weights: Tensor | None
    """[R], or None for 1."""
    sequences: Sequences
    rewards: Tensor | None = None
    """[S] trajectory rewards; topr and the SFT term tell positive ones by them."""
    loss_mask: Tensor | None = None
    """[R] bool; false tokens are left out, denominators included. None keeps all."""
    sample_weights: Tensor | None = None
    """[S] weights per trajectory, or None for 1."""
    totals: BatchTotals | None = None
    """Of the whole step, where this is a part of it."""
    top_candidates: Candidates | None = None
    """The likeliest candidates beside each token, with their behavior log-probabilities."""
    top_logprobs: Tensor | None = None
    """[M] nats, of these candidates under the current policy, without gradient."""

    def __post_init__(self) -> None:
        self._check_shapes()
        ignored = self._ignored()
        for name in ("logprobs", "proximal_logprobs", "advantages"):
            tensor = getattr(self, name)
            tensor = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
            if ignored is not None:
                # A product with 0 would still carry NaN into the loss and into the gradient.
                tensor = torch.where(ignored & ~tensor.isfinite(), 0.0, tensor)
            object.__setattr__(self, name, tensor)

    @property
    def log_ratio(self) -> Tensor:
        """[R] D = logprobs - proximal_logprobs."""
        return self.logprobs - self.proximal_logprobs

    @cached_property
    def batch_totals(self) -> BatchTotals:
        """The denominators: those given, or this batch's own."""
        if self.totals is not None:
            return self.totals
        return BatchTotals.of(self.sequences, self.loss_mask)

    def _ignored(self) -> Tensor | None:
        """[R] bool, tokens that contribute nothing; None if there can be none."""
        weightless = None if self.importance_weights is None else self.importance_weights == 0
        if self.loss_mask is None:
            return weightless
        return ~self.loss_mask if weightless is None else weightless | ~self.loss_mask

    def _check_shapes(self) -> None:
        per_token = (
            "logprobs",
            "proximal_logprobs",
            "advantages",
            "importance_weights",
            "loss_mask",
        )
        num_tokens, num_sequences = self.sequences.num_tokens, len(self.sequences)
        expected = dict.fromkeys(per_token, num_tokens) | dict.fromkeys(
            ("rewards", "sample_weights"), num_sequences
        )
        for name, rows in expected.items():
            tensor = getattr(self, name)
            if tensor is not None and tensor.shape != (rows,):
                raise ValueError(f"{name}: has shape {tuple(tensor.shape)}; must be ({rows},)")


@dataclass(frozen=True, eq=False)
class LossOutput:
    """`metrics` are scalars without gradient, still on the device: reading one synchronizes.

    Like the loss they add up over micro-batches and ranks that share `totals`.
    """

    loss: Tensor
    metrics: dict[str, Tensor]
