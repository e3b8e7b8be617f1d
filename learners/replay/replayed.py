"""One policy that is trained on recorded steps, as the learner trained them.

Invariant: with the settings of the run each step is, bit for bit on a CPU, the step of the run: the
same batches in the same parts, from the same state, with the same numbers of the same random
generators, of which each replayed policy has its own. Shapes: P parameters.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from msgspec import Struct

from learners.batch import TrainingBatch
from learners.checkpoints.contents import tensors_of
from learners.checkpoints.random_state import random_state, restore_random_state
from learners.checkpoints.restore import load_trainer
from learners.checkpoints.shards import whole_tensors
from learners.parallel.ranks import Ranks
from learners.replay.record import Part
from streamrl.algorithms.parts import accepts_parts
from streamrl.checkpoints.find import Checkpoint
from streamrl.config import RunConfig

_LOG_BOUND = 20.0


class RewardEstimate(Struct, frozen=True):
    """Of the policy before the step, from the batch that others sampled."""

    reward: float
    """sum(w R) / sum(w) over the episodes, w the ratio of a whole episode."""
    ess: float
    """(sum w)^2 / sum w^2 / episodes: how far to trust it."""


class ReplayedStep(Struct, frozen=True):
    """`update` is what was added to the parameters [P]."""

    metrics: Mapping[str, float]
    estimate: RewardEstimate
    update: torch.Tensor


class Replayed:
    """Starts from a checkpoint, or from `model.path` without one."""

    def __init__(self, config: RunConfig, checkpoint: Checkpoint | None) -> None:
        if config.learner.num_threads:
            torch.set_num_threads(config.learner.num_threads)
        self._trainer, state = load_trainer(config, checkpoint)
        self._random = random_state()
        self.policy_version = state.policy_version
        self._takes_parts = accepts_parts(config.algorithm, config.learner.num_updates)

    @property
    def is_on_cpu(self) -> bool:
        return self._trainer.policy.device.type == "cpu"

    def step(self, parts: Sequence[Part]) -> ReplayedStep:
        """Train the next recorded step."""
        restore_random_state([self._random], 0, 1)
        whole = [_joined(parts)]
        estimate = self._estimate(self._batch(whole[0]))
        before = self.parameters()
        for part in parts if self._takes_parts else whole:
            self._trainer.accumulate(self._batch(part))
        metrics = self._trainer.update()
        self.policy_version += 1
        self._random = random_state()
        return ReplayedStep(metrics, estimate, self.parameters() - before)

    def parameters(self) -> torch.Tensor:
        """[P] a copy, in host memory."""
        parameters = self._trainer.policy.parameters().values()
        return torch.cat([p.detach().float().cpu().flatten() for p in parameters])

    def difference(self, checkpoint: Path) -> float:
        """The largest difference from any number of the saved state; 0 only if every bit of the
        parameters and of the optimizer's state is the same."""
        ours = tensors_of(self._trainer, ("model", "optimizer"))
        largest = 0.0
        for name, saved in whole_tensors(checkpoint, "").items():
            mine = ours[name].detach().cpu()
            if not _is_same(mine, saved):
                gap = (mine.double() - saved.double()).abs().max()
                largest = max(largest, float(gap) if gap > 0 else math.ulp(0.0))
        return largest

    def checksum(self) -> str:
        """SHA-256 of the parameters, by name."""
        digest = hashlib.sha256()
        for name, tensor in sorted(tensors_of(self._trainer, ("model",)).items()):
            digest.update(name.encode())
            digest.update(_bytes(tensor.detach().cpu()).numpy().tobytes())
        return digest.hexdigest()

    def _batch(self, part: Part) -> TrainingBatch:
        return TrainingBatch.shared(part.headers, part.groups, self.policy_version, Ranks())

    def _estimate(self, batch: TrainingBatch) -> RewardEstimate:
        """By self-normalized importance sampling."""
        log_ratios = self._trainer.logprobs(batch) - batch.behavior_logprobs
        episodes = batch.episodes
        sums = episodes.sequences.sum(log_ratios.double())
        weights = sums.clamp(-_LOG_BOUND, _LOG_BOUND).exp()
        rewards = episodes.each(batch.rewards).double()
        total = weights.sum()
        return RewardEstimate(
            reward=float((weights * rewards).sum() / total),
            ess=float(total.square() / weights.square().sum() / len(weights)),
        )


def _joined(parts: Sequence[Part]) -> Part:
    return Part(
        tuple(header for part in parts for header in part.headers),
        tuple(group for part in parts for group in part.groups),
    )


def _is_same(ours: torch.Tensor, saved: torch.Tensor) -> bool:
    return ours.shape == saved.shape and torch.equal(_bytes(ours), _bytes(saved))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)
