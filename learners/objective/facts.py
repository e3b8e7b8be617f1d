"""The facts of a batch: everything known of its tokens before the first backward pass.

    passes without gradient (proximal, reference, values) -> credit -> one table

Invariant: one row per response token (or trajectory) in every column, in the order of the batch;
every rank has all rows, so what compares trajectories is right however they are divided among the
ranks. A pass that no setting uses is not made. A micro-batch gets its rows by `Facts.select` alone.
Shapes: R response tokens, S trajectories.
"""

from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch

from learners.batch import TrainingBatch
from learners.micro_batch import MicroBatch
from learners.objective.correction import Correction, correct
from learners.objective.credit import CreditAssigner
from learners.objective.nonfinite import finite_sequences
from learners.objective.policy_passes import PolicyPasses
from learners.parallel.ranks import Ranks
from learners.policy.critic import Critic
from learners.policy.policy import Policy
from streamrl.algorithms.sequences import Sequences
from streamrl.config import RunConfig

_PER_TRAJECTORY = frozenset({"rewards", "sample_weights", "is_finite"})


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
    """None: each update computes its own."""
    proximal_logprobs: torch.Tensor | None
    """Of the policy at the start of the batch, for `proximal` recompute; None: the training pass
    of the only update yields them."""
    reference_logprobs: torch.Tensor | None
    old_values: torch.Tensor | None
    """Of the critic, before the step."""
    returns: torch.Tensor | None
    """What the critic is trained towards."""
    is_finite: torch.Tensor
    """[S] bool, false where a pass without gradient found a number that is not finite: no loss may
    count the sequence."""

    @property
    def trained_advantages(self) -> torch.Tensor:
        """[R] 0 for tokens that are left out of the loss."""
        if self.loss_mask is None:
            return self.advantages
        return torch.where(self.loss_mask, self.advantages, 0.0)

    def with_correction(self, rows: torch.Tensor, correction: Correction) -> "Facts":
        """The facts of an update on these rows, with a correction made for it as a whole."""
        weights = torch.ones_like(self.behavior_logprobs)
        mask = torch.ones_like(weights, dtype=torch.bool)
        if correction.weights is not None:
            weights[rows] = correction.weights
        if correction.mask is not None:
            mask[rows] = correction.mask
        if self.loss_mask is not None:
            mask = mask & self.loss_mask
        return replace(self, importance_weights=weights, loss_mask=mask)

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
        config: RunConfig,
        credit: CreditAssigner,
        policy: Policy,
        passes: PolicyPasses,
        reference: Policy | None,
        critic: Critic | None,
        ranks: Ranks,
    ) -> None:
        self._config = config.algorithm
        self._needs_policy_pass = config.needs_policy_pass
        self._trains_whole = config.learner.updates_per_batch == 1 and not config.algorithm.pf_ppo
        self._limits = config.learner.max_tokens_per_forward_pass
        self._ranks = ranks
        self._credit = credit
        self._policy = policy
        self._passes = passes
        self._reference = reference
        self._critic = critic

    def collect(
        self, batch: TrainingBatch, micro_batches: list[MicroBatch]
    ) -> tuple[Facts, dict[str, float]]:
        """The table of a batch that is cut into these micro-batches, and its metrics.

        A role with a limit of its own cuts it anew for its pass.
        """
        config, num_tokens = self._config, batch.sequences.num_tokens

        def cut(max_tokens: int | None) -> list[MicroBatch]:
            if not max_tokens:
                return micro_batches
            policy = self._policy
            return batch.pack(max_tokens, policy.device, shares_prompts=policy.shares_prompts)

        policy = reference = values = None
        if self._reference is not None and config.needs_reference_logprobs:
            reference = self._reference.batch_logprobs(cut(self._limits.reference), num_tokens)
            reference = self._ranks.sum(reference)
        if self._critic is not None:
            values = self._critic.batch_values(cut(self._limits.values), num_tokens)
            values = self._ranks.sum(values)
        if self._needs_policy_pass:
            is_next = self._trains_whole and self._limits.proximal is None
            passes = self._passes.logprobs if is_next else self._policy.batch_logprobs
            policy = self._ranks.sum(passes(cut(self._limits.proximal), num_tokens))
        is_finite = finite_sequences(batch.sequences, policy, reference, values)
        finite = partial(_finite, is_finite=batch.sequences.expand(is_finite))
        sampled = finite(policy, batch.behavior_logprobs)
        in_reward = reference if config.kl_reward.coef > 0 else None
        credit = self._credit.assign(
            batch,
            sampled,
            finite(in_reward, batch.behavior_logprobs),
            finite(values, torch.zeros(num_tokens)),
        )
        facts = Facts(
            behavior_logprobs=batch.behavior_logprobs,
            staleness=batch.staleness,
            advantages=credit.advantages,
            rewards=batch.rewards,
            sample_weights=credit.sample_weights,
            loss_mask=credit.loss_mask,
            importance_weights=None,
            proximal_logprobs=policy if config.proximal == "recompute" else None,
            reference_logprobs=reference,
            old_values=values,
            returns=credit.returns,
            is_finite=is_finite,
        )
        if facts.proximal_logprobs is None or sampled is None:
            return facts, credit.metrics
        behavior, staleness = facts.behavior_logprobs, facts.staleness
        correction = correct(
            config, sampled, behavior, staleness, batch.sequences, facts.trained_advantages
        )
        rows = torch.arange(num_tokens)
        return facts.with_correction(rows, correction), {**credit.metrics, **correction.metrics}

    def of_update(
        self, batch: TrainingBatch, facts: Facts, micro_batches: list[MicroBatch], chosen: list[int]
    ) -> tuple[Facts, dict[str, float]]:
        """The facts for the update on these trajectories, and the metrics that this adds.

        Importance weights of the current policy that depend on all of the update are made here, by
        a pass of their own; other ones are in the facts, or made by each micro-batch.
        """
        config = self._config
        if facts.importance_weights is not None or not config.corrects_as_a_whole:
            return facts, {}
        num_tokens = batch.sequences.num_tokens
        logprobs = self._ranks.sum(self._passes.logprobs(micro_batches, num_tokens))
        rows, lengths = batch.rows(chosen), batch.sequences.lengths[chosen]
        behavior, staleness = facts.behavior_logprobs[rows], facts.staleness[rows]
        sequences = Sequences.from_lengths(lengths)
        is_finite = finite_sequences(batch.sequences, logprobs)
        sampled = torch.where(sequences.expand(is_finite[chosen]), logprobs[rows], behavior)
        advantages = facts.trained_advantages[rows]
        correction = correct(config, sampled, behavior, staleness, sequences, advantages)
        facts = replace(facts, is_finite=facts.is_finite & is_finite)
        return facts.with_correction(rows, correction), correction.metrics


def _finite(
    column: torch.Tensor | None, instead: torch.Tensor, *, is_finite: torch.Tensor
) -> torch.Tensor | None:
    """The column [R] with other numbers for sequences that are not finite: no mean over the batch,
    and no state from batch to batch, becomes NaN."""
    return None if column is None else torch.where(is_finite, column, instead)
