"""One optimizer step: facts, gradient, update.

Invariant: the update is that of the whole batch however it was cut into micro-batches. Runs in one
thread, apart from all input and output.

A step makes one update, so the training pass itself yields the proximal log-probabilities. A pass
of their own comes first only where something must know the whole batch beforehand: KL in the
reward, or weights and denominators that are normalized over all of it.
"""

import time
from collections.abc import Sequence

import torch

from learners.batch import MicroBatch, TrainingBatch
from learners.critic import Critic
from learners.objective.credit import CreditAssigner
from learners.objective.facts import FactCollector
from learners.objective.gradient import Gradient
from learners.optimizer import learning_rate, make_optimizer, update
from learners.policy import Policy
from streamrl.algorithms.rewards import pf_ppo_resample
from streamrl.config import RunConfig


class Trainer:
    """The policy, its optimizer, and the state that a step hands to the next one."""

    def __init__(
        self,
        config: RunConfig,
        policy: Policy,
        reference: Policy | None = None,
        critic: Critic | None = None,
    ) -> None:
        self._config = config
        self.policy = policy
        self.critic = critic
        self.credit = CreditAssigner(config.algorithm)
        self.optimizer = make_optimizer(policy.parameters(), config.learner.optimizer)
        self._facts = FactCollector(config.algorithm, self.credit, policy, reference, critic)
        self._gradient = Gradient(config, policy, reference, critic)

    def step(self, batch: TrainingBatch) -> dict[str, float]:
        """Make one update; metrics under their public names."""
        start = time.perf_counter()
        micro_batches = self._pack(batch)
        facts, metrics = self._facts.collect(batch, micro_batches)
        if resampling := self._config.algorithm.pf_ppo:
            chosen = pf_ppo_resample(batch.rewards, resampling)
            micro_batches = self._pack(batch, chosen.tolist())
        losses = self._gradient.accumulate(micro_batches, facts)
        updates = self._update(batch.policy_version)
        num_tokens, seconds = sum(batch.lengths), time.perf_counter() - start
        return {
            **metrics,
            **losses,
            **updates,
            "learner/train_s": seconds,
            "learner/num_tokens": num_tokens,
            "learner/tokens_per_s": num_tokens / seconds,
            "learner/num_micro_batches": len(micro_batches),
        }

    def logprobs(self, batch: TrainingBatch) -> torch.Tensor:
        """[R response tokens] under the policy, computed as in a step, in nats; on the CPU."""
        return self.policy.batch_logprobs(self._pack(batch), batch.sequences.num_tokens)

    def _pack(self, batch: TrainingBatch, chosen: Sequence[int] | None = None) -> list[MicroBatch]:
        max_tokens = self._config.learner.max_tokens_per_micro_batch
        return batch.pack(max_tokens, self.policy.device, chosen)

    def _update(self, policy_version: int) -> dict[str, float]:
        """The policy's and the critic's; the policy is frozen while the critic warms up."""
        settings = self._config.learner.optimizer
        critic = self.critic.update(policy_version) if self.critic else {}
        policy = update(
            self.optimizer,
            self.policy.parameters().values(),
            learning_rate(policy_version, settings, self._config.run.max_steps),
            settings.max_grad_norm,
            prefix="learner",
            is_frozen=policy_version < self._config.algorithm.value.critic_warmup,
        )
        return {**critic, **policy}
