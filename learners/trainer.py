"""One optimizer step: credit, packing, forward, correction, loss, backward, update.

Invariant: the update is that of the whole batch however it was cut into micro-batches, because
every denominator counts the step's tokens and trajectories. Runs in one thread, apart from all
input and output; called by `learners.learner`.

A step makes one update, so the training pass itself yields the proximal log-probabilities. A pass
of their own comes first only where something must know the whole batch beforehand: KL in the
reward, or weights and denominators that are normalized over all of it.
"""

import time
from dataclasses import dataclass

import torch

from learners.batch import MicroBatch, TrainingBatch
from learners.credit import Credit, CreditAssigner
from learners.critic import Critic
from learners.optimizer import learning_rate, make_optimizer, update
from learners.packing import pack
from learners.policy import Policy
from streamrl.algorithms.losses import BatchTotals, LossInput
from streamrl.algorithms.objective import policy_objective
from streamrl.algorithms.proximal import proximal_logprobs, weighed_logprobs
from streamrl.algorithms.rewards import pf_ppo_resample
from streamrl.algorithms.rollout_is import RolloutIS, RolloutISStatistics, rollout_is_weights
from streamrl.config import RunConfig


@dataclass(frozen=True, eq=False)
class Part:
    """A micro-batch and its share of what the step knows; per-token tensors are [R]."""

    micro_batch: MicroBatch
    behavior_logprobs: torch.Tensor
    staleness: torch.Tensor
    advantages: torch.Tensor
    rewards: torch.Tensor
    """[S]"""
    sample_weights: torch.Tensor | None
    """[S]"""
    loss_mask: torch.Tensor | None
    importance_weights: torch.Tensor | None
    """Those of the whole batch; None: this part computes its own."""
    proximal_logprobs: torch.Tensor | None
    reference_logprobs: torch.Tensor | None
    old_values: torch.Tensor | None
    """Of the critic, before the step; None without one."""
    returns: torch.Tensor | None


class Trainer:
    """The policy, its optimizer, and what is remembered from step to step."""

    def __init__(
        self,
        config: RunConfig,
        policy: Policy,
        reference: Policy | None = None,
        critic: Critic | None = None,
    ) -> None:
        self._config = config
        self._algorithm = config.algorithm
        self._reference = reference
        self.policy = policy
        self.critic = critic
        self.credit = CreditAssigner(config.algorithm)
        self.optimizer = make_optimizer(policy.parameters(), config.learner.optimizer)

    def step(self, batch: TrainingBatch) -> dict[str, float]:
        """Make one update; metrics under their public names."""
        start = time.perf_counter()
        parts, metrics = self._prepare(batch)
        totals = _totals(parts)
        done = [self._backward(part, totals) for part in parts]
        losses = {name: float(sum(terms[name] for terms, _ in done)) for name in done[0][0]}
        shards = [shard for _, shard in done if shard is not None]
        updated = self._update(batch.policy_version)
        num_tokens, seconds = sum(batch.lengths), time.perf_counter() - start
        return {
            **metrics,
            **losses,
            **self._mismatch(shards),
            **updated,
            "learner/train_s": seconds,
            "learner/num_tokens": num_tokens,
            "learner/tokens_per_s": num_tokens / seconds,
            "learner/num_micro_batches": len(parts),
        }

    def logprobs(self, batch: TrainingBatch) -> torch.Tensor:
        """[R] under the policy, computed as a step computes them, in nats; on the CPU."""
        everyone = self._pack(batch, range(len(batch.trajectories)))
        return self._logprobs_of(self.policy, batch, everyone)

    def _prepare(self, batch: TrainingBatch) -> tuple[list[Part], dict[str, float]]:
        """Everything that must be known of the batch before its first backward pass."""
        algorithm = self._algorithm
        everyone = self._pack(batch, range(len(batch.trajectories)))
        proximal = self._logprobs_of(self.policy, batch, everyone) if self._looks_ahead() else None
        reference = None
        if self._reference is not None and algorithm.needs_reference_logprobs:
            reference = self._logprobs_of(self._reference, batch, everyone)
        in_reward = reference if algorithm.kl_reward.coef > 0 else None
        values = None
        if self.critic is not None:
            values = self.critic.estimate(everyone, batch.sequences.num_tokens)
        credit = self.credit.assign(batch, proximal, in_reward, values)
        correction = None if proximal is None else self._correct(batch, proximal)
        chosen = everyone
        if algorithm.pf_ppo is not None:
            chosen = self._pack(batch, pf_ppo_resample(batch.rewards, algorithm.pf_ppo).tolist())
        parts = [
            self._part(batch, micro_batch, credit, correction, proximal, reference, values)
            for micro_batch in chosen
        ]
        return parts, {**credit.metrics, **(correction.metrics if correction else {})}

    def _looks_ahead(self) -> bool:
        correction = self._algorithm.rollout_is
        is_global = correction.batch_normalize or correction.normalize_by == "kept"
        return self._algorithm.kl_reward.coef > 0 or is_global

    def _pack(self, batch: TrainingBatch, chosen: "range | list[int]") -> list[MicroBatch]:
        limit = self._config.learner.max_tokens_per_micro_batch
        (bins,) = pack([batch.lengths[i] for i in chosen], limit)
        device = self.policy.device
        return [batch.micro_batch([chosen[i] for i in members], device) for members in bins]

    @torch.no_grad()
    def _logprobs_of(
        self, policy: Policy, batch: TrainingBatch, micro_batches: list[MicroBatch]
    ) -> torch.Tensor:
        """[R] of the whole batch under this policy, on the CPU."""
        logprobs = torch.zeros(batch.sequences.num_tokens)
        for micro_batch in micro_batches:
            computed = policy.logprobs(micro_batch, with_entropy=False).logprobs
            logprobs[micro_batch.responses] = computed.float().cpu()
        return logprobs

    def _correct(self, batch: TrainingBatch, logprobs: torch.Tensor) -> RolloutIS:
        return rollout_is_weights(
            logprobs,
            batch.behavior_logprobs,
            batch.sequences,
            self._algorithm.rollout_is,
            batch.staleness,
        )

    def _part(
        self,
        batch: TrainingBatch,
        micro_batch: MicroBatch,
        credit: Credit,
        correction: RolloutIS | None,
        proximal: torch.Tensor | None,
        reference: torch.Tensor | None,
        values: torch.Tensor | None,
    ) -> Part:
        device, tokens, rows = self.policy.device, micro_batch.responses, micro_batch.members

        def share(whole: torch.Tensor | None, of: torch.Tensor = tokens) -> torch.Tensor | None:
            return None if whole is None else whole[of].to(device)

        weights, mask = None, None
        if correction is not None:
            weights, mask = correction.loss_terms(self._algorithm.rollout_is)
            weights = torch.ones_like(batch.behavior_logprobs) if weights is None else weights
        if credit.is_trained is not None:
            trained = batch.sequences.expand(credit.is_trained)
            mask = trained if mask is None else mask & trained
        return Part(
            micro_batch=micro_batch,
            behavior_logprobs=batch.behavior_logprobs[tokens].to(device),
            staleness=batch.staleness[tokens].to(device),
            advantages=credit.advantages[tokens].to(device),
            rewards=batch.rewards[rows].to(device),
            sample_weights=share(credit.sample_weights, rows),
            loss_mask=share(mask),
            importance_weights=share(weights),
            proximal_logprobs=share(proximal),
            reference_logprobs=share(reference),
            old_values=share(values),
            returns=share(credit.returns),
        )

    def _backward(
        self, part: Part, totals: BatchTotals
    ) -> tuple[dict[str, torch.Tensor], RolloutISStatistics | None]:
        """Add this part's gradient; its share of the metrics, and its correction's statistics."""
        algorithm, sequences = self._algorithm, part.micro_batch.sequences
        with_entropy = algorithm.entropy_coef > 0 or self._config.learner.report_entropy
        hidden = self.policy.responses(part.micro_batch)
        now = self.policy.logprobs(part.micro_batch, with_entropy=with_entropy, hidden=hidden)
        proximal = self._proximal(part, now.logprobs)
        weights, mask, statistics = part.importance_weights, part.loss_mask, None
        if weights is None:
            correction = rollout_is_weights(
                weighed_logprobs(algorithm, now.logprobs, proximal),
                part.behavior_logprobs,
                sequences,
                algorithm.rollout_is,
                part.staleness,
            )
            statistics = correction.statistics
            weights, _ = correction.loss_terms(algorithm.rollout_is)
        loss_input = LossInput(
            logprobs=now.logprobs,
            proximal_logprobs=proximal,
            advantages=part.advantages,
            importance_weights=None if algorithm.ratio_holds_correction else weights,
            sequences=sequences,
            rewards=part.rewards,
            loss_mask=mask,
            sample_weights=part.sample_weights,
            totals=totals,
        )
        output = policy_objective(
            loss_input,
            algorithm,
            part.reference_logprobs,
            exact_kl=self._exact_kl(part, hidden),
            entropy=now.entropy,
        )
        output.loss.backward()
        return {**output.metrics, **self._critic_backward(part, totals)}, statistics

    def _exact_kl(self, part: Part, hidden: torch.Tensor) -> torch.Tensor | None:
        if self._reference is None or not self._algorithm.kl_loss.is_exact:
            return None
        return self.policy.exact_kl(hidden, self._reference, part.micro_batch)

    def _critic_backward(self, part: Part, totals: BatchTotals) -> dict[str, torch.Tensor]:
        if self.critic is None or part.old_values is None or part.returns is None:
            return {}
        return self.critic.backward(
            part.micro_batch, part.old_values, part.returns, totals, part.loss_mask
        )

    def _proximal(self, part: Part, logprobs: torch.Tensor) -> torch.Tensor:
        if self._algorithm.proximal == "recompute":
            known = part.proximal_logprobs
            return logprobs.detach() if known is None else known
        return proximal_logprobs(
            self._algorithm.proximal, logprobs, part.behavior_logprobs, part.staleness
        )

    def _mismatch(self, shards: list[RolloutISStatistics]) -> dict[str, float]:
        """The correction's metrics over all parts: merged, not averaged."""
        if not shards:
            return {}
        whole = shards[0]
        for shard in shards[1:]:
            whole = whole.merge(shard)
        return whole.metrics(self._algorithm.rollout_is)

    def _update(self, policy_version: int) -> dict[str, float]:
        """The policy's and the critic's; the policy waits while the critic warms up."""
        settings = self._config.learner.optimizer
        critic = self.critic.update(policy_version) if self.critic else {}
        policy = update(
            self.optimizer,
            self.policy.parameters().values(),
            learning_rate(policy_version, settings, self._config.run.max_steps),
            settings.max_grad_norm,
            prefix="learner",
            is_waiting=policy_version < self._algorithm.value.critic_warmup,
        )
        return {**critic, **policy}


def _totals(parts: list[Part]) -> BatchTotals:
    first, *others = [BatchTotals.of(part.micro_batch.sequences, part.loss_mask) for part in parts]
    for other in others:
        first = first + other
    return first
