"""Credit: from the rewards that were recorded to an advantage for every response token.

    recorded reward -> shaping -> token rewards (less KL) -> advantage estimator

Invariant: a function of the batch, the `algorithm:` section and the state below, which is part of a
checkpoint.
Shapes: R response tokens, S trajectories.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from learners.batch import TrainingBatch
from streamrl.algorithms.advantages import AdvantageInput, estimate_advantages, gae_returns
from streamrl.algorithms.kl import kl_controller, kl_penalty
from streamrl.algorithms.rewards import (
    RunningMoments,
    difficulty_mask,
    sample_weights,
    shape_rewards,
    token_rewards,
)
from streamrl.config.algorithm import AlgorithmSettings


@dataclass(frozen=True, eq=False)
class CreditAssignment:
    """What each token and trajectory of a batch is worth."""

    advantages: torch.Tensor
    """[R]"""
    returns: torch.Tensor | None
    """[R] what a critic is trained towards; None without one."""
    sequence_mask: torch.Tensor | None
    """[S] bool; false for prompts that are too easy or too hard, and for trajectories that a limit
    cut, if these are masked. None keeps all."""
    sample_weights: torch.Tensor | None
    """[S], or None for 1."""
    metrics: dict[str, float]
    """Means over the trajectories."""


class CreditAssigner:
    """Computes credit from rewards; keeps the running moments and the KL coefficient."""

    def __init__(self, config: AlgorithmSettings) -> None:
        self._config = config
        self._running = RunningMoments()
        self._kl = kl_controller(config.kl_reward)

    def assign(
        self,
        batch: TrainingBatch,
        proximal_logprobs: torch.Tensor | None = None,
        reference_logprobs: torch.Tensor | None = None,
        values: torch.Tensor | None = None,
    ) -> CreditAssignment:
        """Credit for the whole batch.

        The log-probabilities [R] are for KL in the reward, the values [R] for gae.
        """
        config, sequences = self._config, batch.sequences
        shaped = shape_rewards(
            batch.rewards,
            self._normalization_groups(batch),
            sequences,
            config.reward,
            self._running,
            batch.num_invalid_turns,
            batch.is_truncated,
        )
        kl, metrics = None, shaped.metrics
        if proximal_logprobs is not None and reference_logprobs is not None:
            kl = kl_penalty(proximal_logprobs, reference_logprobs, config.kl_reward.kind)
            metrics = {**metrics, "reward/kl": float(kl.mean()), "reward/kl_coef": self._kl.value}
        rewards = token_rewards(shaped.rewards, sequences, kl, self._kl.value, config.reward.whiten)
        if kl is not None:
            self._kl.update(float(kl.mean()), len(sequences))
        baseline = batch.greedy_rewards if config.needs_greedy_rewards else None
        advantage_input = AdvantageInput(rewards, batch.group_indices, sequences, values, baseline)
        advantages = estimate_advantages(config.advantage, advantage_input, config.advantage_config)
        returns = None if values is None else gae_returns(advantage_input, config.advantage_config)
        return CreditAssignment(
            advantages=advantages,
            returns=returns,
            sequence_mask=self._sequence_mask(batch),
            sample_weights=self._sample_weights(batch),
            metrics=metrics,
        )

    def state_dict(self) -> dict[str, float]:
        return {**self._running.state_dict(), "kl_coef": self._kl.value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self._running.load_state_dict(state)
        self._kl.value = state["kl_coef"]

    def _normalization_groups(self, batch: TrainingBatch) -> torch.Tensor:
        """[S] equal for the trajectories whose rewards are normalized together."""
        agentic = self._config.reward.agentic
        match agentic.grouping if agentic else "state":
            case "batch":
                return torch.zeros_like(batch.group_indices)
            case "inductive":
                return batch.environment_indices
        return batch.group_indices

    def _sequence_mask(self, batch: TrainingBatch) -> torch.Tensor | None:
        config, mask = self._config.reward, None
        if config.difficulty_low is not None or config.difficulty_high is not None:
            low, high = config.difficulty_low, config.difficulty_high
            mask = difficulty_mask(batch.rewards, batch.group_indices, low, high)
        if config.truncated == "mask":
            mask = ~batch.is_truncated if mask is None else mask & ~batch.is_truncated
        return mask

    def _sample_weights(self, batch: TrainingBatch) -> torch.Tensor | None:
        config = self._config.sample_weight
        if not config.difficulty and not config.length:
            return None
        return sample_weights(batch.sequences.lengths, config, batch.difficulties).float()
