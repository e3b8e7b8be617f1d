"""Metrics of a step: of the facts and the work of its batch, trained as a whole or in parts.

Invariant: metrics of the facts do not depend on how the batch was cut into parts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from learners.batch import TrainingBatch


@dataclass(frozen=True, eq=False)
class Part:
    """A part of a batch whose gradient is accumulated, or the whole of it."""

    batch: TrainingBatch
    advantages: torch.Tensor
    """[R]"""
    means: dict[str, float]
    """Metrics that came with its facts: means over its trajectories, or of a whole batch."""
    num_micro_batches: int
    train_s: float


def of_facts(parts: Sequence[Part]) -> dict[str, float]:
    """Metrics of rewards, lengths and advantages."""
    counts = [len(part.batch) for part in parts]
    means = {
        name: sum(n * part.means[name] for n, part in zip(counts, parts, strict=True)) / sum(counts)
        for name in parts[0].means
    }
    rewards = torch.cat([part.batch.rewards for part in parts])
    variances = torch.cat([_reward_variances(part.batch) for part in parts])
    lengths = torch.cat([part.batch.sequences.lengths for part in parts]).float()
    truncated = torch.cat([part.batch.is_truncated for part in parts])
    at_deadline = torch.cat([part.batch.is_at_deadline for part in parts])
    advantages = torch.cat([part.advantages for part in parts])
    return {
        **means,
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std(unbiased=False)),
        "reward/min": float(rewards.min()),
        "reward/max": float(rewards.max()),
        "reward/groups_alike_frac": float((variances < 1e-8).float().mean()),
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "response_length/min": float(lengths.min()),
        "response_length/clip_ratio": float(truncated.float().mean()),
        "response_length/deadline_ratio": float(at_deadline.float().mean()),
        "advantage/mean": float(advantages.mean()) if len(advantages) else 0.0,
        "advantage/abs_mean": float(advantages.abs().mean()) if len(advantages) else 0.0,
    }


def of_work(parts: Sequence[Part], update_s: float) -> dict[str, float]:
    """What the step computed, and for how long; waiting between the parts is not included.

    Tokens are those of all ranks, micro-batches those of one.
    """
    num_tokens = sum(sum(part.batch.lengths) for part in parts)
    train_s = update_s + sum(part.train_s for part in parts)
    return {
        "learner/train_s": train_s,
        "learner/num_tokens": num_tokens,
        "learner/tokens_per_s": num_tokens / train_s,
        "learner/num_micro_batches": sum(part.num_micro_batches for part in parts),
        "learner/num_parts": len(parts),
    }


def _reward_variances(batch: TrainingBatch) -> torch.Tensor:
    """[groups] of the batch."""
    num_groups = int(batch.group_indices.max()) + 1
    sums = torch.zeros(num_groups).index_add_(0, batch.group_indices, batch.rewards)
    squares = torch.zeros(num_groups).index_add_(0, batch.group_indices, batch.rewards**2)
    sizes = batch.group_indices.bincount()
    return squares / sizes - (sums / sizes) ** 2
