"""From per-token losses to one number, with denominators of the whole batch.

Invariant: with the totals of the batch given to every micro-batch and rank, their losses add up to
the loss of the batch, however it was cut. Without totals one call is one whole batch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from streamrl.algorithms.sequences import Sequences
from streamrl.config.algorithm.losses import AggregationMode, LossSettings

__all__ = ["BatchTotals", "aggregate", "denominator", "token_mean"]


@dataclass(frozen=True)
class BatchTotals:
    """What the denominators count, over every micro-batch and rank of the step. Adds up with +.

    A gradient reduction that averages over ranks instead of summing needs its loss multiplied by
    the number of ranks.
    """

    num_tokens: float
    num_sequences: float
    """Sequences that hold a counted token."""
    longest: float
    """Tokens of the longest response: what seq-mean-token-sum-norm divides by where no constant is
    given. The learner always gives one."""

    @classmethod
    def of(cls, sequences: Sequences, loss_mask: Tensor | None = None) -> "BatchTotals":
        """Of one shard; with `loss_mask` [R] only its tokens count."""
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
    """The loss as a scalar.

    Args:
        per_token: [R].
        mode: token-mean (sum / tokens), token-sum, seq-mean-token-sum, seq-mean-token-mean, or
            seq-mean-token-sum-norm (sum over a sequence / a fixed length, mean over sequences; Dr.
            GRPO, arXiv 2503.20783).
        totals: of the whole batch; by default those of this call.
        loss_mask: [R] bool; false tokens are neither in a numerator nor in a default denominator.
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
    """What `aggregate` divides by: the only thing in it that depends on the rest of the batch."""
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
    raise ValueError(f"mode: {mode!r} is not an aggregation mode")


def token_mean(
    per_token: Tensor,
    sequences: Sequences,
    totals: BatchTotals | None,
    loss_mask: Tensor | None,
) -> Tensor:
    """Mean over tokens without gradient, for a metric; adds up over micro-batches and ranks."""
    return aggregate(per_token.detach(), sequences, "token-mean", totals, loss_mask)
