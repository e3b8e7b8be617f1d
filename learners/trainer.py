"""The step of one batch: targets, then gradient and update for each of its mini-batches.

Invariant: an update is the same however its mini-batch was cut into micro-batches and divided among
ranks, which make these calls together. The same holds for a batch that came in parts, if the
algorithm accepts parts and the batch has one update. Runs in one thread, which does no input or
output.

Targets (advantages, proximal log-probabilities, values) are computed once for the batch and stay
fixed while its updates move the policy.
"""

import logging
import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from learners.batch.micro_batch import MicroBatch
from learners.batch.training_batch import TrainingBatch
from learners.objective.credit import CreditAssigner, mini_batches
from learners.objective.gradient import Accumulated, Gradient
from learners.objective.rescoring import Rescorer
from learners.objective.step_metrics import MASKED, BatchPart, of_batch, of_updates, of_work
from learners.objective.targets import PolicyPasses, TargetCollector, Targets
from learners.optimizer import (
    LossScale,
    SkippedUpdates,
    keep_state_on_host,
    learning_rate,
    make_optimizer,
    rate_scale,
    update,
)
from learners.parallel.ranks import Ranks
from learners.policy.critic import Critic
from learners.policy.policy import Policy
from learners.policy.teachers import Teachers
from learners.profiling import StepProfile
from streamrl.algorithms.objective import OBSERVED
from streamrl.algorithms.parts import accepts_parts
from streamrl.algorithms.reward_shaping import pf_ppo_resample
from streamrl.config import RunConfig

log = logging.getLogger(__name__)


class Trainer:
    """Trains the policy; holds its optimizer and the state that one step hands to the next."""

    def __init__(
        self,
        config: RunConfig,
        policy: Policy,
        reference: Policy | None = None,
        critic: Critic | None = None,
        ranks: Ranks | None = None,
        teachers: Teachers | None = None,
    ) -> None:
        self._config = config
        self._ranks = ranks = ranks or Ranks()
        self.policy = policy
        self.critic = critic
        for other in (reference, critic):
            # A critic with its own model chose for itself whether to run packed.
            if other is not None and not (other is critic and config.algorithm.value.model_path):
                other.network.run_packed(policy.network.is_packed)
        self.credit = CreditAssigner(config.algorithm)
        self.optimizer = make_optimizer(policy.parameters(), config.learner.optimizer)
        if config.learner.offload.optimizer:
            keep_state_on_host(self.optimizer)
        passes = PolicyPasses(config, policy, reference)
        self._rescorer = Rescorer(config, policy, ranks) if config.algorithm.rescore_share else None
        self._targets = TargetCollector(
            config, self.credit, policy, passes, reference, critic, ranks, teachers, self._rescorer
        )
        self._scale = LossScale(config.learner.dtype)
        self._gradient = Gradient(config, policy, passes, critic, ranks, self._scale)
        models = {"policy": policy, "reference": reference, "critic": critic}
        networks = {name: model.network for name, model in models.items() if model}
        self._profile = StepProfile(config.learner, config.run.path, networks, ranks.index)
        self._skipped = SkippedUpdates(config.learner.optimizer.max_skipped_updates)
        self._max_tokens = config.learner.max_tokens_per_micro_batch
        self._longest = 0
        self._parts: tuple[BatchPart, ...] = ()
        self._accumulated: Accumulated | None = None
        self._corrected: dict[str, float] = {}
        self._measured = self.credit.state_dict()

    @property
    def optimizers(self) -> list[torch.optim.AdamW]:
        """The policy's, and the critic's if there is one."""
        return [self.optimizer, *([self.critic.optimizer] if self.critic else ())]

    def step(self, batch: TrainingBatch) -> dict[str, float]:
        """Train a batch; metrics under their public names."""
        self.accumulate(batch)
        return self.update()

    def accumulate(self, part: TrainingBatch) -> None:
        """Add the gradient of a batch, or of the next part of it. If the batch has several updates,
        it is the gradient of the first one.

        Raises:
            ValueError: a second part, under an algorithm that takes batches whole.
        """
        start = time.perf_counter()
        algorithm, num_updates = self._config.algorithm, self._config.learner.num_updates
        if self._parts and not accepts_parts(algorithm, num_updates):
            raise ValueError("part: the algorithm takes a batch as a whole")
        self._gradient.seen_weights.begin(is_first=not self._parts)
        if not self._parts:
            self._profile.begin(part.policy_version + 1)
            if (records := self.policy.network.router_records) is not None:
                records.forget()
        self._warn_of_long(part)
        micro_batches = self._pack(part)
        targets, metrics = self._targets.collect(part, micro_batches)
        updates = self._mini_batches(part)
        if updates[0] != list(range(len(part))):
            micro_batches = self._pack(part, updates[0])
        self._accumulate(part, targets, micro_batches, updates[0])
        train_s = time.perf_counter() - start
        self._parts = (*self._parts, BatchPart(part, targets, metrics, updates, train_s))

    def discard(self) -> None:
        """Clear the gradient; the next part is the first of a batch."""
        self._parts, self._accumulated = (), None
        self.optimizer.zero_grad(set_to_none=True)
        self._profile.end()

    def update(self) -> dict[str, float]:
        """Make the updates of the batch, the first from its gradient; its metrics."""
        start, parts = time.perf_counter(), self._parts
        if self._rescorer is not None:
            self._rescorer.keep(parts[0].batch.policy_version)
        updates = [self._update()]
        for chosen in parts[0].mini_batches[1:]:
            batch, targets = parts[0].batch, parts[0].targets
            self._accumulate(batch, targets, self._pack(batch, chosen), chosen)
            updates.append(self._update())
        self.discard()
        self._measured = self.credit.state_dict()
        work = of_work(parts, self._max_tokens, update_s=time.perf_counter() - start)
        profile = self._profile.take(work["learner/train_s"])
        return {**of_batch(parts), **of_updates(updates), **work, **profile}

    def state_dict(self) -> dict[str, float]:
        """What completed steps have measured, without a batch that has not been updated on."""
        return {**self._measured, **self._scale.state_dict()}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.credit.load_state_dict(state)
        self._measured = self.credit.state_dict()
        self._scale.load_state_dict(state)

    def take_weights(self) -> Mapping[int, NDArray[np.float32]]:
        """Importance weights [response tokens] by trajectory, of this rank's share of the last
        batch's first part."""
        return self._gradient.seen_weights.take()

    def logprobs(self, batch: TrainingBatch) -> torch.Tensor:
        """[R response tokens] under the policy, computed as in a step, in nats; on the CPU."""
        return self.policy.batch_logprobs(self._pack(batch), batch.sequences.num_tokens)

    def _pack(self, batch: TrainingBatch, chosen: Sequence[int] | None = None) -> list[MicroBatch]:
        with self._profile.phase("plan"):
            return self.policy.network.cut(batch, self._max_tokens, chosen)

    def _warn_of_long(self, batch: TrainingBatch) -> None:
        """Warn of the longest trajectory if it is over the limit and longer than any before."""
        longest = max(range(len(batch)), key=batch.lengths.__getitem__)
        if batch.lengths[longest] > max(self._max_tokens, self._longest):
            self._longest = batch.lengths[longest]
            log.warning(
                "prompt %d: a trajectory of %d tokens has a micro-batch of its own, since "
                "learner.max_tokens_per_micro_batch is %d; it needs more memory than the others",
                batch.prompt_indices[longest],
                self._longest,
                self._max_tokens,
            )

    def _mini_batches(self, batch: TrainingBatch) -> list[list[int]]:
        """The trajectories of each update."""
        learner, seed = self._config.learner, self._config.run.seed
        if resampling := self._config.algorithm.pf_ppo:
            rewards = batch.episodes.each(batch.rewards)
            chosen = self._ranks.first(pf_ppo_resample(rewards, resampling))
            return mini_batches(batch, learner, seed, batch.episodes.members(chosen))
        return mini_batches(batch, learner, seed)

    def _accumulate(
        self,
        batch: TrainingBatch,
        targets: Targets,
        micro_batches: list[MicroBatch],
        chosen: list[int],
    ) -> None:
        """Add the gradient of the update on these trajectories, which the micro-batches hold."""
        targets, self._corrected = self._targets.of_update(batch, targets, micro_batches, chosen)
        self._accumulated = self._gradient.accumulate(micro_batches, targets, self._accumulated)
        if self.critic is not None:
            with self._profile.phase("plan"):
                of_critic = self.critic.micro_batches(batch, micro_batches, chosen)
            self._accumulated = self._gradient.with_critic(self._accumulated, of_critic, targets)

    def _update(self) -> dict[str, float]:
        """One update of the policy and the critic; its metrics.

        A mini-batch in which no token contributes changes nothing, and the policy is frozen while
        the critic warms up.

        Raises:
            DivergedError: too many in a row were skipped.
        """
        accumulated, self._accumulated = self._accumulated, None
        assert accumulated is not None, "a batch is accumulated first"
        policy_version = self._parts[0].batch.policy_version
        losses = self._gradient.metrics(accumulated)
        is_masked = losses["actor/trained_token_frac"] == 0 and not losses.get(OBSERVED)
        is_warmup = policy_version < self._config.algorithm.value.critic_warmup
        settings = self._config.learner.optimizer
        rate, critic = 1.0, {}
        if self._config.algorithm.rollout_is.scale_lr:
            # By the update's own weights, or the batch's where weights are computed for the batch.
            rate = rate_scale({**self._parts[0].means, **self._corrected, **losses})
        with self._profile.phase("update"):
            if self.critic is not None:
                is_empty = accumulated.totals.num_tokens == 0
                critic = self.critic.update(
                    policy_version, is_frozen=is_empty, loss_scale=self._scale.value
                )
            policy = update(
                self.optimizer,
                self.policy.parameters().values(),
                rate * learning_rate(policy_version, settings, self._config.run.max_steps),
                settings.max_grad_norm,
                prefix="learner",
                is_frozen=is_masked or is_warmup,
                loss_scale=self._scale.value,
            )
        counts = {
            "learner/num_micro_batches": len(accumulated.work),
            MASKED: float(is_masked),
        }
        if self._scale.is_on:
            counts["learner/loss_scale"] = self._scale.value
        if not self._scale.follow({**critic, **policy}):
            self._skipped.count({**critic, **policy}, policy_version)
        return {**losses, **self._corrected, **critic, **policy, **counts}
