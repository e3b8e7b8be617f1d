"""The targets of a batch: all that a token's loss is computed from, besides the network.

They are computed before the first backward pass:

    passes without gradient (proximal, reference, values) -> credit -> one table

Invariant: every column has one row per response token (or trajectory), in batch order. Every rank
has all rows, so comparisons between trajectories do not depend on how ranks divide them. A pass
that no setting needs is not made.
Shapes: R response tokens, S trajectories.

Sequences with a number that is not finite are removed, and the step uses the others. A mask is not
enough: 0 * NaN is NaN, so in the backward pass such a row would reach the weights that all rows
share. So the sequence is removed from its micro-batch, and all ranks compute the batch's gradient
again without it. A batch without any finite sequence is left alone; its gradient is not finite, and
its update is skipped and counted.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial, reduce
from operator import or_
from typing import Any, TypeVar

import torch
from torch.distributed.fsdp import FSDPModule

from learners.batch.micro_batch import MicroBatch
from learners.batch.training_batch import TrainingBatch
from learners.objective.credit import CreditAssigner
from learners.objective.rescoring import Rescorer
from learners.parallel.ranks import Ranks
from learners.policy.critic import Critic
from learners.policy.network import NetworkOutput
from learners.policy.policy import Policy
from learners.policy.teachers import Teachers
from streamrl.algorithms.candidates import Candidates, Likeliest
from streamrl.algorithms.objective import proximal_logprobs
from streamrl.algorithms.rollout_is import RolloutIS, rollout_is_weights
from streamrl.algorithms.sequences import Sequences
from streamrl.config import RunConfig
from streamrl.config.algorithm import AlgorithmSettings
from streamrl.errors import ConfigError

log = logging.getLogger(__name__)


def correct(
    config: AlgorithmSettings,
    logprobs: torch.Tensor,
    behavior_logprobs: torch.Tensor,
    staleness: torch.Tensor,
    sequences: Sequences,
    advantages: torch.Tensor | None = None,
    rescored_logprobs: torch.Tensor | None = None,
) -> RolloutIS:
    """The correction of these tokens [R] by `algorithm.rollout_is`.

    Rejection and veto act under every `algorithm.proximal`; the weights do not where the ratio of
    the loss is itself the importance ratio. Only `normalize_by` decides how tokens that are taken
    out count in the denominators.

    Args:
        logprobs: under the policy at the start of the batch if proximal is `recompute`, else under
            the current policy.
        advantages: 0 for tokens that are not trained; given if a batch is corrected as a whole.
        rescored_logprobs: see `Targets`.
    """
    train = logprobs.detach()
    # With `behavior` there is no separate proximal policy: the current one is compared.
    if config.proximal not in ("recompute", "behavior"):
        train = proximal_logprobs(config.proximal, logprobs, behavior_logprobs, staleness)
    found = rollout_is_weights(
        train,
        behavior_logprobs,
        sequences,
        config.rollout_is,
        staleness,
        advantages=advantages,
        rescored_logprobs=rescored_logprobs,
    )
    if config.ratio_holds_correction:
        return replace(found, weights=None, keep=found.accepted)
    return found


class PolicyPasses:
    """The policy's forward passes: `TargetCollector` asks for log-probabilities, `Gradient` for
    what the loss needs. A micro-batch has the same numbers in every pass, and at most one graph
    exists.

    If both ask, the pass over the first micro-batch comes last and keeps its graph, and the
    gradient begins with it; so a batch that fits into one micro-batch is computed once. A sharded
    network keeps no graph, since its parameters would stay gathered until the backward pass; nor
    does one with dropout, which acts only in passes with gradient.
    """

    def __init__(self, config: RunConfig, policy: Policy, reference: Policy | None) -> None:
        algorithm = config.algorithm
        self._policy = policy
        self._exact_reference = reference if algorithm.kl_loss.is_exact else None
        self._with_entropy = algorithm.entropy_coef > 0 or config.learner.report_entropy
        self._trains_entropy = algorithm.entropy_coef != 0
        self._num_top = config.num_top_logprobs
        self._with_observed = algorithm.echo_coef > 0
        lora = config.learner.lora
        has_dropout = lora is not None and lora.dropout > 0
        # A teacher's candidates are part of the targets, which come after that pass.
        self._keeps_graph = not has_dropout and not algorithm.num_taught
        self._kept: tuple[MicroBatch, NetworkOutput] | None = None

    def logprobs(self, micro_batches: Sequence[MicroBatch], num_tokens: int) -> torch.Tensor:
        """Log-probabilities [R of the whole batch] in nats, on the CPU; `num_tokens` is R. Call it
        just before the gradient of the same micro-batches."""
        self._kept = None
        if not self._keeps_graph or isinstance(self._policy.network, FSDPModule):
            return self._policy.batch_logprobs(micro_batches, num_tokens)
        first, *others = micro_batches
        logprobs = self._policy.batch_logprobs(others, num_tokens)
        output = self._with_gradient(first)
        assert output.logprobs is not None, "they are asked for by default"
        logprobs[first.responses] = output.logprobs.detach().float().cpu()
        self._kept = (first, output)
        return logprobs

    def training(self, micro_batch: MicroBatch, taught: Candidates | None = None) -> NetworkOutput:
        """The pass with gradient that the loss is computed from; `taught` are a teacher's
        candidates. ConfigError if a generator did not record the likeliest tokens."""
        kept, self._kept = self._kept, None
        if kept is not None and kept[0] is micro_batch:
            return kept[1]
        del kept
        return self._with_gradient(micro_batch, taught)

    def _with_gradient(
        self, micro_batch: MicroBatch, taught: Candidates | None = None
    ) -> NetworkOutput:
        needs_top = self._num_top > 0 and not micro_batch.is_empty
        if needs_top and micro_batch.top_candidates is None:
            raise ConfigError(
                f"algorithm.loss_config.divergence_topk: was {self._num_top}, and groups came "
                "without the log-probabilities of the likeliest tokens: start every daemon of a "
                "run with one configuration"
            )
        reference: NetworkOutput | None = None
        if self._exact_reference is not None:
            with torch.no_grad():
                reference = self._exact_reference(micro_batch, with_logprobs=False)
        return self._policy(
            micro_batch,
            with_entropy=self._with_entropy,
            trains_entropy=self._trains_entropy,
            with_top_logprobs=needs_top,
            with_observed=self._with_observed,
            taught=taught,
            reference=reference,
        )


Rest = TypeVar("Rest")


def finite_sequences(sequences: Sequences, *columns: torch.Tensor | None) -> torch.Tensor:
    """[S] bool, whether all of a sequence's numbers in the given columns [R] are finite."""
    nonfinite = [~column.detach().isfinite() for column in columns if column is not None]
    if not nonfinite:
        return torch.ones(len(sequences), dtype=torch.bool)
    return sequences.max(reduce(or_, nonfinite).float()) == 0


def without_nonfinite(
    work: Sequence[tuple[MicroBatch, Rest]], is_finite: Sequence[torch.Tensor]
) -> tuple[tuple[MicroBatch, Rest], ...]:
    """The same number of micro-batches without the sequences for which [S] is false; logs each."""
    for (micro_batch, _), mask in zip(work, is_finite, strict=True):
        for i in (~mask).nonzero()[:, 0].tolist():
            log.warning(
                "prompt %d: the log-probabilities of a trajectory of %d tokens are not finite; the "
                "step is made without it",
                micro_batch.prompt_indices[i],
                micro_batch.packing.lengths[i],
            )
    return tuple(
        (micro_batch.select(mask), rest)
        for (micro_batch, rest), mask in zip(work, is_finite, strict=True)
    )


def num_sequences(work: Sequence[tuple[MicroBatch, Rest]]) -> int:
    return sum(len(micro_batch.members) for micro_batch, _ in work)


_PER_TRAJECTORY = frozenset({"rewards", "sample_weights", "is_finite"})


@dataclass(frozen=True, eq=False)
class Targets:
    """Columns [R] unless stated otherwise; None where no setting uses the column."""

    behavior_logprobs: torch.Tensor
    staleness: torch.Tensor
    """Policy versions between sampling and training."""
    advantages: torch.Tensor
    rewards: torch.Tensor
    """[S] as recorded by the generator."""
    sample_weights: torch.Tensor | None
    """[S]"""
    loss_mask: torch.Tensor | None
    """bool; None keeps all."""
    importance_weights: torch.Tensor | None
    """None if each update computes its own."""
    proximal_logprobs: torch.Tensor | None
    """Under the policy at the start of the batch, for proximal `recompute`; None if the training
    pass of the only update yields them."""
    rescored_logprobs: torch.Tensor | None
    """Under the learner's weights of the version that sampled the token; NaN if unknown."""
    reference_logprobs: torch.Tensor | None
    taught: Likeliest | None
    """[R, K] the teacher's candidates, in the rows of this rank's trajectories."""
    old_values: torch.Tensor | None
    """The critic's values before the step."""
    returns: torch.Tensor | None
    """The critic's training targets."""
    is_finite: torch.Tensor
    """[S] bool, false if a pass without gradient found a number that is not finite: no loss may
    count that sequence."""

    @property
    def trained_advantages(self) -> torch.Tensor:
        """[R] advantages, 0 for tokens that are left out of the loss."""
        if self.loss_mask is None:
            return self.advantages
        return torch.where(self.loss_mask, self.advantages, 0.0)

    def with_correction(
        self, rows: torch.Tensor, weights: torch.Tensor | None, mask: torch.Tensor | None
    ) -> "Targets":
        """The targets of an update on these rows, with the result of one correction for the whole
        update; see `RolloutIS.loss_terms`."""
        all_weights = torch.ones_like(self.behavior_logprobs)
        all_kept = torch.ones_like(all_weights, dtype=torch.bool)
        if weights is not None:
            all_weights[rows] = weights
        if mask is not None:
            all_kept[rows] = mask
        return replace(self, importance_weights=all_weights, loss_mask=self.masked(all_kept))

    def masked(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        """The loss mask without the tokens that the correction takes out; None keeps all."""
        if mask is None or self.loss_mask is None:
            return self.loss_mask if mask is None else mask
        return self.loss_mask & mask

    def select(self, micro_batch: MicroBatch) -> "Targets":
        """The rows that belong to this micro-batch, on its device."""

        def rows_of(name: str) -> Any:
            column: torch.Tensor | Likeliest | None = getattr(self, name)
            rows = micro_batch.members if name in _PER_TRAJECTORY else micro_batch.responses
            return None if column is None else column[rows].to(micro_batch.token_ids.device)

        return Targets(**{field.name: rows_of(field.name) for field in fields(self)})

    def mask_of(self, micro_batch: MicroBatch) -> torch.Tensor | None:
        """This micro-batch's loss mask on the CPU, where counting does not wait for a GPU."""
        return None if self.loss_mask is None else self.loss_mask[micro_batch.responses]


@dataclass(frozen=True, eq=False)
class TargetCollector:
    """Computes the targets of each batch; `credit` keeps its state from batch to batch."""

    config: RunConfig
    credit: CreditAssigner
    policy: Policy
    passes: PolicyPasses
    reference: Policy | None
    critic: Critic | None
    ranks: Ranks
    teachers: Teachers | None = None
    rescorer: Rescorer | None = None

    def collect(
        self, batch: TrainingBatch, micro_batches: list[MicroBatch]
    ) -> tuple[Targets, dict[str, float]]:
        """The targets of a batch cut into these micro-batches, and their metrics. A model with its
        own `max_tokens_per_forward_pass` gets its own cut."""
        config, num_tokens = self.config.algorithm, batch.sequences.num_tokens

        def cut(max_tokens: int | None) -> list[MicroBatch]:
            return self.policy.network.cut(batch, max_tokens) if max_tokens else micro_batches

        learner, limits = self.config.learner, self.config.learner.max_tokens_per_forward_pass
        policy = reference = values = None
        if self.reference is not None and config.needs_reference_logprobs:
            reference = self.reference.batch_logprobs(cut(limits.reference), num_tokens)
            reference = self.ranks.sum(reference)
        if self.critic is not None:
            passes = self.critic.micro_batches(batch, micro_batches, limit=limits.values)
            values = self.ranks.sum(self.critic.batch_values(passes, num_tokens))
        teacher, taught = self.teachers.score(batch) if self.teachers else (None, None)
        # Before the pass whose graph is kept: rescoring replaces the weights for a while.
        rescored = None if self.rescorer is None else self.rescorer.logprobs(batch)
        if self.config.needs_policy_pass:
            trains_whole = learner.updates_per_batch == 1 and not config.pf_ppo
            is_next = trains_whole and limits.proximal is None
            logprobs = self.passes.logprobs if is_next else self.policy.batch_logprobs
            policy = self.ranks.sum(logprobs(cut(limits.proximal), num_tokens))
        is_finite = finite_sequences(batch.sequences, policy, reference, values, teacher)
        finite = partial(_finite, is_finite=batch.sequences.expand(is_finite))
        sampled = finite(policy, batch.behavior_logprobs)
        credit = self.credit.assign(
            batch,
            sampled,
            finite(reference if config.kl_reward.coef else None, batch.behavior_logprobs),
            finite(values, torch.zeros(num_tokens)),
            finite(teacher, batch.behavior_logprobs),
            self.ranks,
        )
        targets = Targets(
            behavior_logprobs=batch.behavior_logprobs,
            staleness=batch.staleness,
            advantages=credit.advantages,
            rewards=batch.rewards,
            sample_weights=credit.sample_weights,
            loss_mask=credit.loss_mask,
            importance_weights=None,
            proximal_logprobs=policy if config.proximal == "recompute" else None,
            rescored_logprobs=rescored,
            reference_logprobs=reference,
            taught=taught and taught.within(self.policy.num_tokens),
            old_values=values,
            returns=credit.returns,
            is_finite=is_finite,
        )
        if targets.proximal_logprobs is None:
            return targets, credit.metrics
        targets, metrics = self._corrected(
            batch, targets, targets.proximal_logprobs, range(len(batch))
        )
        return targets, {**credit.metrics, **metrics}

    def of_update(
        self,
        batch: TrainingBatch,
        targets: Targets,
        micro_batches: list[MicroBatch],
        chosen: list[int],
    ) -> tuple[Targets, dict[str, float]]:
        """The targets of the update on these trajectories, and any further metrics.

        Importance weights of the current policy that depend on the whole update are computed here,
        with a pass of their own; others are in the targets or computed by each micro-batch.
        """
        config = self.config.algorithm
        if targets.importance_weights is not None or not config.corrects_as_a_whole:
            return targets, {}
        num_tokens = batch.sequences.num_tokens
        logprobs = self.ranks.sum(self.passes.logprobs(micro_batches, num_tokens))
        is_finite = targets.is_finite & finite_sequences(batch.sequences, logprobs)
        return self._corrected(batch, replace(targets, is_finite=is_finite), logprobs, chosen)

    def _corrected(
        self, batch: TrainingBatch, targets: Targets, logprobs: torch.Tensor, chosen: Sequence[int]
    ) -> tuple[Targets, dict[str, float]]:
        """The targets with one correction over all of these trajectories, and its metrics;
        `logprobs` [R] are the batch's. Non-finite sequences are in neither."""
        # Not only those that the policy cannot score: the reference's and the critic's leave, too.
        logprobs = torch.where(batch.sequences.expand(targets.is_finite), logprobs, torch.nan)
        rows, rescored = batch.rows(chosen), targets.rescored_logprobs
        config = self.config.algorithm
        found = correct(
            config,
            logprobs[rows],
            targets.behavior_logprobs[rows],
            targets.staleness[rows],
            Sequences.from_lengths(batch.sequences.lengths[list(chosen)]),
            targets.trained_advantages[rows],
            None if rescored is None else rescored[rows],
        )
        terms = found.loss_terms(config.rollout_is)
        return targets.with_correction(rows, *terms), found.metrics


def _finite(
    column: torch.Tensor | None, instead: torch.Tensor, *, is_finite: torch.Tensor
) -> torch.Tensor | None:
    """The column [R] with `instead` for non-finite sequences, so that no mean over the batch, and
    no state kept between batches, becomes NaN."""
    return None if column is None else torch.where(is_finite, column, instead)
