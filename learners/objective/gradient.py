"""The gradient of a step: for each micro-batch a forward pass, correction, loss, backward pass.

Invariant: the gradient and the metrics are those of the whole batch however it was cut, because
every denominator counts the tokens and trajectories of all micro-batches of all ranks. A batch that
comes in parts has the denominators of the parts so far; each further part scales what was
accumulated.
Shapes: R response tokens of a micro-batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import TypeVar

import torch

from learners.batch import MicroBatch
from learners.objective.correction import correct
from learners.objective.facts import Facts
from learners.parallel.ranks import Ranks
from learners.parallel.sharding import sum_gradients
from learners.policy.critic import Critic
from learners.policy.network import NetworkOutput
from learners.policy.policy import Policy
from streamrl.algorithms.losses import BatchTotals, LossInput
from streamrl.algorithms.objective import policy_objective, trained_fraction
from streamrl.algorithms.parts import Rescaling
from streamrl.algorithms.proximal import proximal_logprobs
from streamrl.algorithms.rollout_is import RolloutISStatistics
from streamrl.config import RunConfig

Term = TypeVar("Term", float, torch.Tensor)


@dataclass(frozen=True, eq=False)
class Accumulated:
    """What `.grad` holds of a batch: all of it, or its parts so far."""

    totals: BatchTotals
    terms: dict[str, torch.Tensor]
    """Metrics, with the denominators of `totals`."""
    statistics: RolloutISStatistics | None
    """Of the corrections; None if each was off, or was made for the update as a whole."""
    num_micro_batches: int


class Gradient:
    """Of the objective in the `algorithm:` section, for the policy and the critic."""

    def __init__(
        self,
        config: RunConfig,
        policy: Policy,
        reference: Policy | None,
        critic: Critic | None,
        ranks: Ranks,
    ) -> None:
        self._algorithm = config.algorithm.model_copy(update={"loss_config": config.loss_config})
        self._ranks = ranks
        self._with_entropy = config.algorithm.entropy_coef > 0 or config.learner.report_entropy
        self._sums_each = config.learner.sum_each_micro_batch
        self._policy = policy
        self._reference = reference
        self._critic = critic

    def accumulate(
        self, micro_batches: list[MicroBatch], facts: Facts, previous: Accumulated | None = None
    ) -> Accumulated:
        """Add the gradient of these micro-batches to that of the previous parts of the batch."""
        slices = [(m, facts.select(m)) for m in micro_batches]
        mine = reduce(add, (BatchTotals.of(m.sequences, rows.loss_mask) for m, rows in slices))
        totals = reduce(add, self._ranks.gather(mine))
        terms, shards = [], []
        if previous is not None:
            totals = previous.totals + totals
            terms = [self._rescale(previous, totals)]
            shards = [previous.statistics]
        for i, (micro_batch, rows) in enumerate(slices, 1):
            self._sum_gradients(self._sums_each or i == len(slices))
            policy_terms, statistics = self._backward(micro_batch, rows, totals)
            terms.append({**policy_terms, **self._critic_backward(micro_batch, rows, totals)})
            shards.append(statistics)
        measured = [statistics for statistics in shards if statistics is not None]
        return Accumulated(
            totals=totals,
            terms=_total(terms),
            statistics=reduce(RolloutISStatistics.merge, measured) if measured else None,
            num_micro_batches=len(micro_batches) + (previous.num_micro_batches if previous else 0),
        )

    def _sum_gradients(self, is_on: bool) -> None:
        for trained in (self._policy, self._critic):
            if trained is not None:
                sum_gradients(trained.network, is_on)

    def metrics(self, accumulated: Accumulated) -> dict[str, float]:
        """Under their public names, of all ranks."""
        mine = {name: float(value) for name, value in accumulated.terms.items()}
        terms = _total(self._ranks.gather(mine, dict[str, float]))
        if accumulated.statistics is None:
            return terms
        statistics = accumulated.statistics
        if self._ranks.count > 1:
            statistics = statistics.to_host().merge_ranks(self._ranks.group)
        return {**terms, **statistics.metrics(self._algorithm.rollout_is)}

    def _rescale(self, previous: Accumulated, totals: BatchTotals) -> dict[str, torch.Tensor]:
        """The terms of the previous parts, and `.grad`, with the denominators of `totals`.

        A critic has whole batches only: its advantage is whitened over them.
        """
        rescaling = Rescaling.of(self._algorithm, previous.totals, totals)
        for parameter in self._policy.parameters().values():
            if parameter.grad is not None:
                parameter.grad.mul_(rescaling.loss)
        return {name: term * rescaling.of_metric(name) for name, term in previous.terms.items()}

    def _backward(
        self, micro_batch: MicroBatch, facts: Facts, totals: BatchTotals
    ) -> tuple[dict[str, torch.Tensor], RolloutISStatistics | None]:
        """This micro-batch's share of the metrics, and the statistics of its own correction."""
        current = self._policy(
            micro_batch, with_entropy=self._with_entropy, reference=self._exact(micro_batch)
        )
        assert current.logprobs is not None, "they are asked for by default"
        proximal = self._proximal(facts, current.logprobs)
        weights, loss_mask, statistics = facts.importance_weights, facts.loss_mask, None
        if weights is None:
            correction = correct(
                self._algorithm,
                current.logprobs,
                facts.behavior_logprobs,
                facts.staleness,
                micro_batch.sequences,
            )
            weights, statistics = correction.weights, correction.statistics
            loss_mask = correction.masked(loss_mask)
        if micro_batch.is_empty:
            _backward_of_nothing(current.logprobs, current.entropy, current.kl)
            return {}, statistics
        loss_input = LossInput(
            logprobs=current.logprobs,
            proximal_logprobs=proximal,
            advantages=facts.advantages,
            importance_weights=weights,
            sequences=micro_batch.sequences,
            rewards=facts.rewards,
            loss_mask=loss_mask,
            sample_weights=facts.sample_weights,
            totals=totals,
        )
        output = policy_objective(
            loss_input,
            self._algorithm,
            facts.reference_logprobs,
            exact_kl=current.kl,
            entropy=current.entropy,
        )
        output.loss.backward()
        trained = trained_fraction(loss_input, self._algorithm)
        return {**output.metrics, "actor/trained_token_frac": trained}, statistics

    def _proximal(self, facts: Facts, logprobs: torch.Tensor) -> torch.Tensor:
        if self._algorithm.proximal != "recompute":
            return proximal_logprobs(
                self._algorithm.proximal, logprobs, facts.behavior_logprobs, facts.staleness
            )
        if facts.proximal_logprobs is None:
            return logprobs.detach()
        return facts.proximal_logprobs

    def _exact(self, micro_batch: MicroBatch) -> NetworkOutput | None:
        """Of the reference, where the KL to it is taken over the whole vocabulary."""
        if self._reference is None or not self._algorithm.kl_loss.is_exact:
            return None
        with torch.no_grad():
            return self._reference(micro_batch, with_logprobs=False)

    def _critic_backward(
        self, micro_batch: MicroBatch, facts: Facts, totals: BatchTotals
    ) -> dict[str, torch.Tensor]:
        if self._critic is None or facts.old_values is None or facts.returns is None:
            return {}
        if micro_batch.is_empty:
            _backward_of_nothing(self._critic.values(micro_batch))
            return {}
        return self._critic.backward(
            micro_batch, facts.old_values, facts.returns, totals, facts.loss_mask
        )


def _backward_of_nothing(*columns: torch.Tensor | None) -> None:
    """The backward pass of empty columns: no gradient, and the collectives of the other ranks."""
    sums = [column.sum() for column in columns if column is not None]
    torch.stack(sums).sum().backward()


def _total(terms: Sequence[Mapping[str, Term]]) -> dict[str, Term]:
    """The sum under each name; a micro-batch without trajectories has none."""
    names = dict.fromkeys(name for term in terms for name in term)
    return {name: reduce(add, (t[name] for t in terms if name in t)) for name in names}
