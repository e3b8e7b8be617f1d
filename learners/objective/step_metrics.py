"""Metrics of a step: of its batch, of the work on it, and of its updates.

Invariant: metrics of the batch do not depend on how the batch was cut into parts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from learners.batch.training_batch import TrainingBatch, add_episode_sums, episode_means
from learners.objective.targets import Targets
from streamrl.metrics import Merge, Writer, find
from streamrl.types.rollouts import ALIKE_WITHIN

MASKED = "learner/num_masked_updates"
"""Updates that were not made because no token contributed to the loss."""
_SKIPPED = "learner/skipped_update"


@dataclass(frozen=True, eq=False)
class BatchPart:
    """A part of a batch, or a whole batch, whose gradient has been accumulated."""

    batch: TrainingBatch
    targets: Targets
    means: dict[str, float]
    """Metrics that came with the targets: means over the trajectories."""
    mini_batches: list[list[int]]
    """The trajectories of each update."""
    train_s: float


def of_batch(parts: Sequence[BatchPart]) -> dict[str, float]:
    """Metrics of the batch: rewards, lengths and advantages."""
    counts = [len(part.batch.episodes) for part in parts]
    means = {
        name: sum(n * part.means[name] for n, part in zip(counts, parts, strict=True)) / sum(counts)
        for name in parts[0].means
    }
    rewards = torch.cat([part.batch.episodes.each(part.batch.rewards) for part in parts])
    spreads = torch.cat([_reward_spreads(part.batch) for part in parts])
    lengths = torch.cat([part.batch.episodes.sequences.lengths for part in parts]).float()
    truncated = torch.cat([p.batch.episodes.each(p.batch.is_truncated) for p in parts])
    at_deadline = torch.cat([p.batch.episodes.each(p.batch.is_at_deadline) for p in parts])
    advantages = torch.cat([part.targets.advantages for part in parts])
    episodes = add_episode_sums(part.batch.environment_sums for part in parts)
    return {
        **means,
        **episode_means(episodes),
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std(unbiased=False)),
        "reward/min": float(rewards.min()),
        "reward/max": float(rewards.max()),
        "reward/groups_alike_frac": float((spreads <= ALIKE_WITHIN).float().mean()),
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "response_length/min": float(lengths.min()),
        "response_length/clip_ratio": float(truncated.float().mean()),
        "response_length/deadline_ratio": float(at_deadline.float().mean()),
        "advantage/mean": float(advantages.mean()) if len(advantages) else 0.0,
        "advantage/abs_mean": float(advantages.abs().mean()) if len(advantages) else 0.0,
    }


def of_updates(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of all updates of a step, combined as the catalogue says: counts are summed, extremes
    are the largest or smallest. Others are means over the updates that were made, or over all if
    those lack the metric."""
    names = dict.fromkeys(name for update in updates for name in update)
    return {
        **{name: _together(name, updates) for name in names},
        "learner/num_updates": len(_made(updates, _SKIPPED)),
    }


def _made(updates: Sequence[Mapping[str, float]], skipped: str) -> list[Mapping[str, float]]:
    """The updates that were neither masked nor skipped, as the metric `skipped` says."""
    return [update for update in updates if not update[MASKED] and not update.get(skipped)]


def _together(name: str, updates: Sequence[Mapping[str, float]]) -> float:
    row = find(name)
    if row.merge is Merge.SUM:
        return sum(update.get(name, 0.0) for update in updates)
    is_of_critic = row.writer is Writer.CRITIC
    skipped = "critic/skipped_update" if is_of_critic else _SKIPPED
    having = [update for update in updates if name in update or row.absent is not None]
    trained = [update for update in having if not update[MASKED]]
    made = _made(having, skipped)
    values = [update.get(name, row.absent or 0.0) for update in made or trained or having]
    match row.merge:
        case Merge.MAX:
            return max(values)
        case Merge.MIN:
            return min(values)
        case _:
            return sum(values) / len(values)


def of_work(parts: Sequence[BatchPart], max_tokens: int, update_s: float) -> dict[str, float]:
    """What the step computed, and for how long; waits between parts are not included.

    Tokens are counted over all ranks, micro-batches on one.
    """
    num_tokens = sum(sum(part.batch.lengths) for part in parts)
    train_s = update_s + sum(part.train_s for part in parts)
    return {
        "learner/train_s": train_s,
        "learner/num_tokens": num_tokens,
        "learner/tokens_per_s": num_tokens / train_s,
        "learner/num_long_trajectories": sum(
            length > max_tokens for part in parts for length in part.batch.lengths
        ),
        "learner/num_parts": len(parts),
    }


def _reward_spreads(batch: TrainingBatch) -> torch.Tensor:
    """[groups] the largest reward of each group less its smallest."""
    indices = batch.episodes.each(batch.group_indices)
    rewards = batch.episodes.each(batch.rewards)
    of_none = rewards.new_zeros(int(indices.max()) + 1)
    largest, smallest = (
        of_none.scatter_reduce(0, indices, rewards, extreme, include_self=False)
        for extreme in ("amax", "amin")
    )
    return largest - smallest
