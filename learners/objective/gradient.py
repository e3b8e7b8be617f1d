"""The gradient of a step: for each micro-batch a forward pass, correction, loss, backward pass.

Invariant: gradient and metrics are the same however the batch was cut, because every denominator
counts the tokens and trajectories of all micro-batches on all ranks. For a batch in parts,
denominators count the parts so far, and each new part rescales what was accumulated. A sequence
with a number that is not finite counts in neither.
Shapes: R response tokens of a micro-batch.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from learners.batch.micro_batch import MicroBatch
from learners.objective.targets import (
    PolicyPasses,
    Targets,
    correct,
    finite_sequences,
    num_sequences,
    without_nonfinite,
)
from learners.optimizer import LossScale
from learners.parallel.ranks import Ranks
from learners.policy.critic import Critic
from learners.policy.policy import Policy
from learners.policy.sharding import sum_gradients
from streamrl.algorithms.candidates import Likeliest
from streamrl.algorithms.kl import topk_teacher_kl
from streamrl.algorithms.losses import BatchTotals, LossInput, ObservedInput
from streamrl.algorithms.objective import (
    mask_metrics,
    policy_objective,
    proximal_logprobs,
    trained_fraction,
)
from streamrl.algorithms.parts import Rescaling
from streamrl.algorithms.rollout_is import RolloutISStatistics
from streamrl.config import RunConfig

Term = TypeVar("Term", float, torch.Tensor)
Columns: TypeAlias = tuple[torch.Tensor | None, ...]
Work: TypeAlias = tuple[tuple[MicroBatch, Targets], ...]


@dataclass(frozen=True, eq=False)
class Accumulated:
    """What `.grad` holds: the gradient of a batch, or of its parts so far."""

    work: Work
    """This rank's micro-batches, each with the targets of its part."""
    num_given: int
    """This rank's sequences, including non-finite ones, which are in no micro-batch."""
    totals: BatchTotals
    terms: dict[str, torch.Tensor]
    """Metrics, divided by `totals`."""
    statistics: RolloutISStatistics | None
    """Statistics of the corrections; None if there were none, or one for the update as a whole."""


class Gradient:
    """Computes the gradient of the objective in the `algorithm:` section, for policy and critic."""

    def __init__(
        self,
        config: RunConfig,
        policy: Policy,
        passes: PolicyPasses,
        critic: Critic | None,
        ranks: Ranks,
        scale: LossScale,
    ) -> None:
        self._algorithm = config.algorithm.model_copy(update={"loss_config": config.loss_config})
        self._ranks = ranks
        self._keeps_mask = config.generator.keep_sampling_mask
        self._sums_each = config.learner.sum_each_micro_batch
        self._policy = policy
        self._passes = passes
        self._critic = critic
        self._scale = scale
        self.seen_weights = SeenWeights(is_on=config.tracking.samples.num_groups > 0)

    def accumulate(
        self, micro_batches: list[MicroBatch], targets: Targets, previous: Accumulated | None = None
    ) -> Accumulated:
        """Add the gradient of these micro-batches to that of the previous parts of the batch.

        If a sequence is not finite, the gradient of all parts is computed anew without it.
        """
        added: Work = tuple((m, targets) for m in micro_batches)
        num_given = num_sequences(added) + (0 if previous is None else previous.num_given)
        if not targets.is_finite.all():
            added = self._finite(added, [targets.is_finite[m.members] for m in micro_batches])
        accumulated, is_finite = self._add(added, previous, num_given)
        work = accumulated.work
        known = [torch.ones(len(m.members), dtype=torch.bool) for m, _ in work[: -len(added)]]
        kept = self._finite(work, [*known, *is_finite])
        if kept is work:
            return accumulated
        for parameter in self._policy.parameters().values():
            parameter.grad = None
        return self._add(kept, None, num_given)[0]

    def _finite(self, work: Work, is_finite: Sequence[torch.Tensor]) -> Work:
        """The work without non-finite sequences (false in [S]), rebuilt on every rank if any rank
        has one. The work itself if there are none, or if nothing would be left on any rank."""
        known = torch.cat([mask.to(is_finite[-1].device) for mask in is_finite]).cpu()
        counts = torch.tensor([int(known.sum()), len(known)])
        num_finite, num_all = self._ranks.sum(counts).tolist()
        if num_finite in (0, num_all):
            return work
        return without_nonfinite(work, known.split([len(mask) for mask in is_finite]))

    def _add(
        self, work: Work, previous: Accumulated | None, num_given: int
    ) -> tuple[Accumulated, list[torch.Tensor]]:
        """Forward and backward passes over `work`: what is accumulated then, and for each
        micro-batch [S], whether its sequences are finite."""
        slices = [(m, targets.select(m)) for m, targets in work]
        totals = self._totals(BatchTotals.of(m.sequences, t.mask_of(m)) for m, t in work)
        observed = None
        if self._algorithm.echo_coef:
            observed = self._totals(BatchTotals.of(m.observed.sequences) for m, _ in slices)
        terms, shards, is_finite = [], [], []
        if previous is not None:
            totals = previous.totals + totals
            terms = [self._rescale(previous, totals)]
            shards = [previous.statistics]
        for i, (micro_batch, rows) in enumerate(slices, 1):
            sum_gradients(self._policy.network, self._sums_each or i == len(slices))
            policy_terms, statistics, finite = self._backward(micro_batch, rows, totals, observed)
            terms.append(policy_terms)
            shards.append(statistics)
            is_finite.append(finite)
        measured = [statistics for statistics in shards if statistics is not None]
        accumulated = Accumulated(
            work=work if previous is None else (*previous.work, *work),
            num_given=num_given,
            totals=totals,
            terms=_total(terms),
            statistics=reduce(RolloutISStatistics.merge, measured) if measured else None,
        )
        return accumulated, is_finite

    def _totals(self, mine: Iterable[BatchTotals]) -> BatchTotals:
        """The sum over these totals and those of the other ranks."""
        return reduce(add, self._ranks.gather(reduce(add, mine)))

    def with_critic(
        self, accumulated: Accumulated, micro_batches: Sequence[MicroBatch], targets: Targets
    ) -> Accumulated:
        """Add the critic's gradient and metrics for a whole batch or update, over its own
        micro-batches, but only the sequences that the policy's gradient contains."""
        assert self._critic is not None, "who has its micro-batches has one"
        trained = torch.cat([m.members for m, _ in accumulated.work])
        terms = [accumulated.terms]
        for i, given in enumerate(micro_batches, 1):
            micro_batch = given.select(torch.isin(given.members, trained))
            sum_gradients(self._critic.network, self._sums_each or i == len(micro_batches))
            if micro_batch.is_empty:
                _backward_of_nothing(self._critic.values(micro_batch))
                continue
            rows = targets.select(micro_batch)
            assert rows.old_values is not None, "there is a critic"
            assert rows.returns is not None, "there is a critic"
            of_critic = self._critic.backward(
                micro_batch,
                rows.old_values,
                rows.returns,
                accumulated.totals,
                rows.loss_mask,
                loss_scale=self._scale.value,
            )
            terms.append(of_critic)
        return replace(accumulated, terms=_total(terms))

    def metrics(self, accumulated: Accumulated) -> dict[str, float]:
        """Metrics over all ranks, under their public names."""
        num_nonfinite = accumulated.num_given - num_sequences(accumulated.work)
        mine = {
            **{name: float(value) for name, value in accumulated.terms.items()},
            "learner/num_nonfinite_sequences": float(num_nonfinite),
        }
        terms = _total(self._ranks.gather(mine, dict[str, float]))
        if (records := self._policy.network.router_records) is not None:
            terms |= records.metrics(self._ranks)
        if accumulated.statistics is None:
            return terms
        statistics = accumulated.statistics
        if self._ranks.count > 1:
            statistics = statistics.to_host().merge_ranks(self._ranks.group)
        return {**terms, **statistics.metrics(self._algorithm.rollout_is)}

    def _rescale(self, previous: Accumulated, totals: BatchTotals) -> dict[str, torch.Tensor]:
        """Rescale `.grad` and the metrics of the previous parts to the denominators of `totals`.

        The critic needs no rescaling: its advantage is whitened over whole batches.
        """
        rescaling = Rescaling.of(self._algorithm, previous.totals, totals)
        for parameter in self._policy.parameters().values():
            if parameter.grad is not None:
                parameter.grad.mul_(rescaling.loss)
        return {name: term * rescaling.of_metric(name) for name, term in previous.terms.items()}

    def _backward(
        self,
        micro_batch: MicroBatch,
        targets: Targets,
        totals: BatchTotals,
        observed_totals: BatchTotals | None,
    ) -> tuple[dict[str, torch.Tensor], RolloutISStatistics | None, torch.Tensor]:
        """Forward and backward pass of one micro-batch: its share of the metrics, the statistics of
        its own correction, and [S], whether its sequences are finite."""
        taught = targets.taught
        candidates = None if taught is None else taught.candidates()
        current = self._passes.training(micro_batch, candidates)
        assert current.logprobs is not None, "they are asked for by default"
        teacher_kl = self._teacher_kl(current.taught_logprobs, taught)
        computed: Columns = (current.logprobs, current.entropy, current.kl, teacher_kl)
        is_finite = finite_sequences(micro_batch.sequences, *computed)
        observed = None
        if current.observed_logprobs is not None and observed_totals is not None:
            answers, sequences = current.observed_logprobs, micro_batch.observed.sequences
            observed = ObservedInput(answers, sequences, observed_totals)
            is_finite = is_finite & finite_sequences(sequences, answers)
            computed = (*computed, answers)
        proximal = self._proximal(targets, current.logprobs)
        weights, loss_mask, statistics = self._weights(micro_batch, targets, current.logprobs)
        self.seen_weights.add(micro_batch, weights)
        if micro_batch.is_empty:
            _backward_of_nothing(*computed)
            return {}, statistics, is_finite
        loss_input = LossInput(
            logprobs=current.logprobs,
            proximal_logprobs=proximal,
            advantages=targets.advantages,
            importance_weights=weights,
            sequences=micro_batch.sequences,
            rewards=targets.rewards,
            loss_mask=loss_mask,
            sample_weights=targets.sample_weights,
            totals=totals,
            top_candidates=micro_batch.top_candidates,
            top_logprobs=current.top_logprobs,
        )
        output = policy_objective(
            loss_input,
            self._algorithm,
            targets.reference_logprobs,
            exact_kl=current.kl,
            entropy=current.entropy,
            teacher_kl=teacher_kl,
            observed=observed,
        )
        (output.loss * self._scale.value).backward()
        trained = trained_fraction(loss_input, self._algorithm)
        metrics = {**output.metrics, "actor/trained_token_frac": trained}
        if self._keeps_mask:
            metrics |= mask_metrics(micro_batch.sampling_mask, loss_input)
        return metrics, statistics, is_finite

    def _weights(
        self, micro_batch: MicroBatch, targets: Targets, logprobs: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, RolloutISStatistics | None]:
        """Importance weights [R], loss mask [R], and the statistics of the correction if it is
        computed here rather than for the whole update."""
        if targets.importance_weights is not None:
            return targets.importance_weights, targets.loss_mask, None
        found = correct(
            self._algorithm,
            logprobs,
            targets.behavior_logprobs,
            targets.staleness,
            micro_batch.sequences,
            rescored_logprobs=targets.rescored_logprobs,
        )
        weights, mask = found.loss_terms(self._algorithm.rollout_is)
        return weights, targets.masked(mask), found.statistics

    def _teacher_kl(
        self, logprobs: torch.Tensor | None, taught: Likeliest | None
    ) -> torch.Tensor | None:
        """KL [R] over the teacher's candidates, from the policy's log-probabilities [M] of them."""
        settings = self._algorithm.distillation
        if logprobs is None or taught is None or settings is None:
            return None
        own = logprobs.view(taught.logprobs.shape)
        return topk_teacher_kl(own, taught.logprobs, settings.divergence)

    def _proximal(self, targets: Targets, logprobs: torch.Tensor) -> torch.Tensor:
        if self._algorithm.proximal != "recompute":
            return proximal_logprobs(
                self._algorithm.proximal, logprobs, targets.behavior_logprobs, targets.staleness
            )
        if targets.proximal_logprobs is None:
            return logprobs.detach()
        return targets.proximal_logprobs


class SeenWeights:
    """The importance weights that the loss used, for the step's samples: of a batch's first part,
    from the last update of each trajectory. They stay on the device until taken."""

    def __init__(self, *, is_on: bool) -> None:
        self._is_on = is_on
        self._is_first = True
        self._rows: tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], ...] = ()

    def begin(self, *, is_first: bool) -> None:
        """Begin a part of a batch."""
        self._is_first = is_first
        self._rows = () if is_first else self._rows

    def add(self, micro_batch: MicroBatch, weights: torch.Tensor | None) -> None:
        """Add the weights [R] of a micro-batch; None if there is no correction."""
        if weights is None or not self._is_on or not self._is_first or micro_batch.is_empty:
            return
        own = (micro_batch.members, micro_batch.sequences.lengths, weights.detach().float().clone())
        self._rows = (*self._rows, own)

    def take(self) -> Mapping[int, NDArray[np.float32]]:
        """Weights [response tokens] by the trajectory's index in the part. Waits for the device."""
        rows, self._rows = self._rows, ()
        return {
            member: own
            for members, lengths, weights in rows
            for member, own in zip(
                members.tolist(),
                np.split(weights.cpu().numpy(), np.cumsum(lengths.tolist())[:-1]),
                strict=True,
            )
        }


def _backward_of_nothing(*columns: torch.Tensor | None) -> None:
    """A backward pass over empty columns: no gradient, but it joins the other ranks'
    collectives."""
    sums = [column.sum() for column in columns if column is not None]
    torch.stack(sums).sum().backward()


def _total(terms: Sequence[Mapping[str, Term]]) -> dict[str, Term]:
    """The sum under each name; a micro-batch without trajectories has none."""
    names = dict.fromkeys(name for term in terms for name in term)
    return {name: reduce(add, (t[name] for t in terms if name in t)) for name in names}
