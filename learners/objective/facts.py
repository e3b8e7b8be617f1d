"""The facts of a batch: everything known of its tokens before the first backward pass.

    passes without gradient (proximal, reference, values) -> credit -> one table

Invariant: one row per response token (or trajectory) in every column, in the order of the batch;
every rank has all rows, so what compares trajectories is right however they are divided among the
ranks. A pass that no setting uses is not made. A micro-batch gets its rows by `Facts.select` alone.
Shapes: R response tokens, S trajectories.
"""

from dataclasses import dataclass, fields
from typing import Any

import torch

from learners.batch import MicroBatch, TrainingBatch
from learners.objective.credit import CreditAssigner
from learners.parallel.ranks import Ranks
from learners.policy.critic import Critic
from learners.policy.policy import Policy
from streamrl.algorithms.rollout_is import RolloutIS, rollout_is_weights
from streamrl.config.algorithm import AlgorithmSettings

_PER_TRAJECTORY = frozenset({"rewards", "sample_weights"})


@dataclass(frozen=True, eq=False)
class Facts:
    """Columns [R] unless stated otherwise; None where no setting uses the column."""

    behavior_logprobs: torch.Tensor
    staleness: torch.Tensor
    """Policy versions between sampling and training."""
    advantages: torch.Tensor
    rewards: torch.Tensor
    """[S] as recorded."""
    sample_weights: torch.Tensor | None
    """[S]"""
    loss_mask: torch.Tensor | None
    """bool; None keeps all."""
    importance_weights: torch.Tensor | None
    """None: each micro-batch computes its own."""
    proximal_logprobs: torch.Tensor | None
    """None: the training pass yields them."""
    reference_logprobs: torch.Tensor | None
    old_values: torch.Tensor | None
    """Of the critic, before the step."""
    returns: torch.Tensor | None
    """What the critic is trained towards."""

    def select(self, micro_batch: MicroBatch) -> "Facts":
        """The rows of this micro-batch, on its device."""
        return Facts(**{field.name: self._rows(field.name, micro_batch) for field in fields(self)})

    def _rows(self, name: str, micro_batch: MicroBatch) -> Any:
        column: torch.Tensor | None = getattr(self, name)
        if column is None:
            return None
        rows = micro_batch.members if name in _PER_TRAJECTORY else micro_batch.responses
        return column[rows].to(micro_batch.token_ids.device)


class FactCollector:
    """Makes the table of each batch; `credit` keeps its state from batch to batch."""

    def __init__(
        self,
        config: AlgorithmSettings,
        credit: CreditAssigner,
        policy: Policy,
        reference: Policy | None,
        critic: Critic | None,
        ranks: Ranks,
    ) -> None:
        self._config = config
        self._ranks = ranks
        self._credit = credit
        self._policy = policy
        self._reference = reference
        self._critic = critic

    def collect(
        self, batch: TrainingBatch, micro_batches: list[MicroBatch]
    ) -> tuple[Facts, dict[str, float]]:
        """The table of a batch that is cut into these micro-batches, and its metrics."""
        config, num_tokens = self._config, batch.sequences.num_tokens
        proximal = reference = values = correction = None
        if self._needs_proximal_pass:
            proximal = self._ranks.sum(self._policy.batch_logprobs(micro_batches, num_tokens))
            correction = self._correct(batch, proximal)
        if self._reference is not None and config.needs_reference_logprobs:
            reference = self._reference.batch_logprobs(micro_batches, num_tokens)
            reference = self._ranks.sum(reference)
        if self._critic is not None:
            values = self._ranks.sum(self._critic.batch_values(micro_batches, num_tokens))
        in_reward = reference if config.kl_reward.coef > 0 else None
        credit = self._credit.assign(batch, proximal, in_reward, values)
        weights, loss_mask = self._loss_terms(batch, correction, credit.sequence_mask)
        facts = Facts(
            behavior_logprobs=batch.behavior_logprobs,
            staleness=batch.staleness,
            advantages=credit.advantages,
            rewards=batch.rewards,
            sample_weights=credit.sample_weights,
            loss_mask=loss_mask,
            importance_weights=weights,
            proximal_logprobs=proximal,
            reference_logprobs=reference,
            old_values=values,
            returns=credit.returns,
        )
        return facts, {**credit.metrics, **(correction.metrics if correction else {})}

    @property
    def _needs_proximal_pass(self) -> bool:
        """KL in the reward and weights normalized over the batch need it before the first loss."""
        correction = self._config.rollout_is
        is_global = correction.batch_normalize or correction.normalize_by == "kept"
        return self._config.kl_reward.coef > 0 or is_global

    def _correct(self, batch: TrainingBatch, logprobs: torch.Tensor) -> RolloutIS:
        return rollout_is_weights(
            logprobs,
            batch.behavior_logprobs,
            batch.sequences,
            self._config.rollout_is,
            batch.staleness,
        )

    def _loss_terms(
        self,
        batch: TrainingBatch,
        correction: RolloutIS | None,
        sequence_mask: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Importance weights and loss mask [R], as far as the batch decides them."""
        weights, mask = None, None
        if correction is not None:
            weights, mask = correction.loss_terms(self._config.rollout_is)
            weights = torch.ones_like(batch.behavior_logprobs) if weights is None else weights
        if sequence_mask is not None:
            token_mask = batch.sequences.expand(sequence_mask)
            mask = token_mask if mask is None else mask & token_mask
        return weights, mask
