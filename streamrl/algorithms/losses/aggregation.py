"""The inputs of a policy loss, and the aggregation of its per-token values to a scalar.

Invariant: if every micro-batch and rank is given the totals of the batch, their losses add up to
the loss of the batch, however it was divided. Without totals, one call is one whole batch. The
other terms of the objective, and the value loss, are scalars without their coefficients.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from streamrl.algorithms.candidates import Candidates
from streamrl.algorithms.sequences import Sequences, require_rows
from streamrl.config.algorithm.losses import AggregationMode, LossSettings
from streamrl.config.algorithm.settings import ValueSettings


@dataclass(frozen=True)
class BatchTotals:
    """The counts in the denominators, over all micro-batches and ranks of a step; + adds them."""

    num_tokens: float
    num_sequences: float
    """Sequences with at least one counted token."""
    longest: float
    """Tokens of the longest response: seq-mean-token-sum-norm without a `loss_scale_factor`."""

    @classmethod
    def of(cls, sequences: Sequences, loss_mask: Tensor | None = None) -> "BatchTotals":
        """The counts of one shard; with `loss_mask` [R], of its true tokens only."""
        if loss_mask is None:
            return cls(sequences.num_tokens, sequences.num_nonempty, sequences.longest)
        num_sequences = int((sequences.sum(loss_mask) > 0).sum())
        return cls(int(loss_mask.sum()), num_sequences, sequences.longest)

    def __add__(self, other: "BatchTotals") -> "BatchTotals":
        return BatchTotals(
            num_tokens=self.num_tokens + other.num_tokens,
            num_sequences=self.num_sequences + other.num_sequences,
            longest=max(self.longest, other.longest),
        )


def aggregate(
    per_token: Tensor,
    sequences: Sequences,
    mode: AggregationMode,
    totals: BatchTotals | None = None,
    loss_mask: Tensor | None = None,
    config: LossSettings | None = None,
) -> Tensor:
    """Aggregate the loss to a scalar.

    Args:
        per_token: [R].
        mode: token-mean (sum / tokens), token-sum, seq-mean-token-sum, seq-mean-token-mean, or
            seq-mean-token-sum-norm (sum over a sequence / a fixed length, mean over sequences; Dr.
            GRPO, arXiv 2503.20783).
        totals: counts of the whole batch; by default those of this call.
        loss_mask: [R] bool; false tokens enter neither the numerator nor the default denominator.
        config: `loss_scale_factor` and `norm_by_sequences` for seq-mean-token-sum-norm.
    """
    totals = BatchTotals.of(sequences, loss_mask) if totals is None else totals
    if loss_mask is not None:
        per_token = torch.where(loss_mask, per_token, 0.0)
    if mode != "seq-mean-token-mean":
        return per_token.sum() / denominator(mode, totals, config)
    if loss_mask is None:
        return sequences.mean(per_token).sum() / denominator(mode, totals)
    counted = sequences.sum(loss_mask).clamp(min=1)
    return (sequences.sum(per_token) / counted).sum() / denominator(mode, totals)


def denominator(
    mode: AggregationMode, totals: BatchTotals, config: LossSettings | None = None
) -> float:
    """The divisor of `aggregate`, the only part of it that depends on the rest of the batch."""
    match mode:
        case "token-mean":
            return max(totals.num_tokens, 1)
        case "token-sum":
            return 1
        case "seq-mean-token-sum" | "seq-mean-token-mean":
            return max(totals.num_sequences, 1)
        case "seq-mean-token-sum-norm":
            config = LossSettings() if config is None else config
            scale = config.loss_scale_factor or max(totals.longest, 1)
            return scale * (max(totals.num_sequences, 1) if config.norm_by_sequences else 1)


def token_mean(
    per_token: Tensor,
    sequences: Sequences,
    totals: BatchTotals | None,
    loss_mask: Tensor | None,
) -> Tensor:
    """Mean over tokens without gradient, for metrics; adds up over micro-batches and ranks."""
    return aggregate(per_token.detach(), sequences, "token-mean", totals, loss_mask)


@dataclass(frozen=True, eq=False)
class LossInput:
    """One micro-batch. Every [R] tensor has the response tokens of `sequences` in order.

    Invariant: each tensor has one row per token (or sequence) and is at least float32; tokens that
    contribute nothing have finite values.
    """

    logprobs: Tensor
    """[R] nats, under the current policy, with gradient."""
    proximal_logprobs: Tensor
    """[R] nats, under the policy in the denominator of the ratio."""
    advantages: Tensor
    """[R]"""
    importance_weights: Tensor | None
    """[R], or None for 1."""
    sequences: Sequences
    rewards: Tensor | None = None
    """[S] trajectory rewards; topr and the SFT term need them to find positive trajectories."""
    loss_mask: Tensor | None = None
    """[R] bool; false tokens are left out, also in denominators. None keeps all."""
    sample_weights: Tensor | None = None
    """[S] weights per trajectory, or None for 1."""
    totals: BatchTotals | None = None
    """Counts of the whole step, if this is a part of it."""
    top_candidates: Candidates | None = None
    """Each token's likeliest alternatives, with their behavior log-probabilities."""
    top_logprobs: Tensor | None = None
    """[M] nats, under the current policy, without gradient."""

    def __post_init__(self) -> None:
        require_rows(
            self.sequences.num_tokens,
            logprobs=self.logprobs,
            proximal_logprobs=self.proximal_logprobs,
            advantages=self.advantages,
            importance_weights=self.importance_weights,
            loss_mask=self.loss_mask,
        )
        weights = self.sample_weights
        require_rows(len(self.sequences), rewards=self.rewards, sample_weights=weights)
        ignored = self._ignored()
        for name in ("logprobs", "proximal_logprobs", "advantages"):
            tensor = getattr(self, name)
            tensor = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
            if ignored is not None:
                # Multiplying NaN by 0 would still give NaN in the loss and the gradient.
                tensor = torch.where(ignored & ~tensor.isfinite(), 0.0, tensor)
            object.__setattr__(self, name, tensor)

    @property
    def log_ratio(self) -> Tensor:
        """[R] D = logprobs - proximal_logprobs."""
        return self.logprobs - self.proximal_logprobs

    @cached_property
    def batch_totals(self) -> BatchTotals:
        """The given totals, or those of this micro-batch."""
        if self.totals is not None:
            return self.totals
        return BatchTotals.of(self.sequences, self.loss_mask)

    def mean(self, per_token: Tensor) -> Tensor:
        """`token_mean` of [R] with the batch's totals, for a metric."""
        return token_mean(per_token, self.sequences, self.batch_totals, self.loss_mask)

    def _ignored(self) -> Tensor | None:
        """[R] bool, true for tokens that contribute nothing; None if there are none."""
        weightless = None if self.importance_weights is None else self.importance_weights == 0
        if self.loss_mask is None:
            return weightless
        return ~self.loss_mask if weightless is None else weightless | ~self.loss_mask


@dataclass(frozen=True, eq=False)
class LossOutput:
    """`metrics` are scalars on the device, without gradient; like the loss, they add up over
    micro-batches and ranks that share `totals`."""

    loss: Tensor
    metrics: dict[str, Tensor]


def term(per_token: Tensor, batch: LossInput, config: LossSettings) -> Tensor:
    """Aggregate [R], such as an entropy or a KL, as a further term of the objective."""
    mode, mask = config.loss_agg_mode, batch.loss_mask
    return aggregate(per_token, batch.sequences, mode, batch.batch_totals, mask, config)


def sft_loss(batch: LossInput, config: LossSettings) -> Tensor:
    """Aggregated -log p over trajectories with a positive reward; the others count as 0.

    Raises:
        ValueError: `batch.rewards` is missing.
    """
    if batch.rewards is None:
        raise ValueError("rewards: the SFT term needs the trajectory rewards [S]")
    positive = batch.sequences.expand(batch.rewards > 0)
    return term(torch.where(positive, -batch.logprobs, 0.0), batch, config)


@dataclass(frozen=True, eq=False)
class ObservedInput:
    """The O tokens of a micro-batch that the policy read between its turns."""

    logprobs: Tensor
    """[O] nats, under the current policy, with gradient."""
    sequences: Sequences
    """The observed tokens of each trajectory."""
    totals: BatchTotals
    """Counts of the observed tokens of the whole step."""


def observation_loss(observed: ObservedInput, config: LossSettings) -> Tensor:
    """Aggregated -log p of the environment's answers (ECHO, arXiv 2605.24517). Its denominators
    count these tokens, and the trajectories that have some, independently of the policy loss."""
    mode, totals = config.loss_agg_mode, observed.totals
    return aggregate(-observed.logprobs, observed.sequences, mode, totals, config=config)


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    sequences: Sequences,
    config: ValueSettings,
    totals: BatchTotals | None = None,
    loss_mask: Tensor | None = None,
    aggregation: LossSettings | None = None,
) -> LossOutput:
    """Half the squared error, or half that of the value clipped around the old one if larger.

    Args:
        values, old_values, returns: [R]; `values` with gradient.
        aggregation: the `config` of `aggregate`.
    """
    plain = (values - returns).square()
    error, clipped = plain, torch.zeros_like(plain)
    if config.clip_range is not None:
        near = values.clamp(old_values - config.clip_range, old_values + config.clip_range)
        bounded = (near - returns).square()
        error, clipped = torch.maximum(plain, bounded), (bounded > plain).to(plain.dtype)
    mode = config.loss_agg_mode
    loss = 0.5 * aggregate(error, sequences, mode, totals, loss_mask, aggregation)
    fraction = token_mean(clipped, sequences, totals, loss_mask)
    return LossOutput(loss, {"critic/vf_clipfrac": fraction, "critic/vf_loss": loss.detach()})
