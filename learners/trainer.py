"""One optimizer step: facts, gradient, update.

Invariant: the update is that of the whole batch however it was cut into micro-batches, and into
parts where the algorithm accepts parts, and among ranks, which call it together. Runs in one
thread, apart from all input and output.

A step makes one update, so the training pass itself yields the proximal log-probabilities. A pass
of their own comes first only where something must know the whole batch beforehand: KL in the
reward, or weights and denominators that are normalized over all of it.
"""

import time
from collections.abc import Sequence

import torch

from learners.batch import MicroBatch, TrainingBatch
from learners.objective.credit import CreditAssigner
from learners.objective.facts import FactCollector
from learners.objective.gradient import Accumulated, Gradient
from learners.objective.step_metrics import Part, of_facts, of_work
from learners.optimizer import learning_rate, make_optimizer, update
from learners.parallel.ranks import Ranks
from learners.policy.critic import Critic
from learners.policy.policy import Policy
from learners.profiling.profile import StepProfile
from streamrl.algorithms.parts import accepts_parts
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
        ranks: Ranks | None = None,
    ) -> None:
        self._config = config
        self._ranks = ranks = ranks or Ranks()
        self.policy = policy
        self.critic = critic
        self.credit = CreditAssigner(config.algorithm)
        self.optimizer = make_optimizer(policy.parameters(), config.learner.optimizer)
        self._facts = FactCollector(config.algorithm, self.credit, policy, reference, critic, ranks)
        self._gradient = Gradient(config, policy, reference, critic, ranks)
        networks = {"policy": policy, "reference": reference, "critic": critic}
        self._profile = StepProfile(
            config, {name: n.network for name, n in networks.items() if n}, ranks.index
        )
        self._parts: tuple[Part, ...] = ()
        self._accumulated: Accumulated | None = None

    def step(self, batch: TrainingBatch) -> dict[str, float]:
        """Make one update; metrics under their public names."""
        self.accumulate(batch)
        return self.update()

    def accumulate(self, part: TrainingBatch) -> None:
        """Add the gradient of a whole batch, or of groups of it that are not added yet.

        Raises:
            ValueError: the second part of a batch that the algorithm takes as a whole.
        """
        start = time.perf_counter()
        if self._parts and not accepts_parts(self._config.algorithm):
            raise ValueError("part: the algorithm takes a batch as a whole")
        if not self._parts:
            self._profile.begin(part.policy_version + 1)
        micro_batches = self._pack(part)
        facts, metrics = self._facts.collect(part, micro_batches)
        if resampling := self._config.algorithm.pf_ppo:
            chosen = self._ranks.first(pf_ppo_resample(part.rewards, resampling))
            micro_batches = self._pack(part, chosen.tolist())
        self._accumulated = self._gradient.accumulate(micro_batches, facts, self._accumulated)
        train_s = time.perf_counter() - start
        added = Part(part, facts.advantages, metrics, len(micro_batches), train_s)
        self._parts = (*self._parts, added)

    def discard(self) -> None:
        """Clear the gradient; the next part is the first of a batch."""
        self._parts, self._accumulated = (), None
        self.optimizer.zero_grad(set_to_none=True)
        self._profile.end()

    def update(self) -> dict[str, float]:
        """Make one update from the gradient of the batch; metrics under their public names."""
        assert self._accumulated is not None, "a batch is accumulated first"
        start, parts = time.perf_counter(), self._parts
        losses = self._gradient.metrics(self._accumulated)
        with self._profile.phase("update"):
            updates = self._update(parts[0].batch.policy_version)
        self.discard()
        work = of_work(parts, update_s=time.perf_counter() - start)
        profile = self._profile.take(work["learner/train_s"])
        return {**of_facts(parts), **losses, **updates, **work, **profile}

    def logprobs(self, batch: TrainingBatch) -> torch.Tensor:
        """[R response tokens] under the policy, computed as in a step, in nats; on the CPU."""
        return self.policy.batch_logprobs(self._pack(batch), batch.sequences.num_tokens)

    def _pack(self, batch: TrainingBatch, chosen: Sequence[int] | None = None) -> list[MicroBatch]:
        max_tokens = self._config.learner.max_tokens_per_micro_batch
        with self._profile.phase("plan"):
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
