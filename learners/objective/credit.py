"""Credit assignment: from recorded rewards to an advantage for every response token.

    recorded reward -> shaping -> token rewards (less KL) -> advantage estimator

Invariant: credit depends on the batch, the `algorithm:` section and the state below alone;
checkpoints save that state. An episode of several segments is credited as one.
Shapes: R response tokens, E episodes, S trajectories.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
import torch

from learners.batch.training_batch import TrainingBatch
from learners.parallel.ranks import Ranks
from streamrl.algorithms.advantages import AdvantageInput, estimate_advantages, gae_returns
from streamrl.algorithms.kl import KlCoefficient, kl_penalty, teacher_advantages
from streamrl.algorithms.reward_shaping import (
    RoleBaselines,
    RunningMoments,
    difficulty_mask,
    sample_weights,
    shape_rewards,
    token_rewards,
)
from streamrl.config.algorithm import AlgorithmSettings
from streamrl.config.algorithm.advantages import GdpoSettings, RaeSettings
from streamrl.config.learner import LearnerSettings


def mini_batches(
    batch: TrainingBatch,
    learner: LearnerSettings,
    seed: int,
    resampled: Sequence[int] | None = None,
) -> list[list[int]]:
    """The trajectories of each update, by their index in the batch, in the order of the updates.

    A resumed run makes the same ones. Groups are not split; an epoch trains each group once.

    Args:
        seed: of the run.
        resampled: trajectories to train instead of all the batch's, possibly repeated.
    """
    indices = range(len(batch.lengths)) if resampled is None else resampled
    group_of = batch.group_indices.tolist()
    chosen = []
    for epoch in range(learner.epochs):
        random = np.random.default_rng([seed, batch.policy_version, epoch])
        order = random.permutation(max(group_of) + 1)
        for part in np.array_split(order, learner.updates_per_batch):
            groups = frozenset(part.tolist())
            chosen.append([i for i in indices if group_of[i] in groups])
    return [members for members in chosen if members]


@dataclass(frozen=True, eq=False)
class CreditAssignment:
    """What each token and trajectory of a batch is worth."""

    advantages: torch.Tensor
    """[R]"""
    returns: torch.Tensor | None
    """[R] the critic's training targets; None without a critic."""
    loss_mask: torch.Tensor | None
    """[R] bool; false for prompts that are too easy or too hard, truncated trajectories (if
    masked), and turns that the environment left out. None keeps all."""
    sample_weights: torch.Tensor | None
    """[S], or None for 1."""
    metrics: dict[str, float]
    """Means over the episodes."""


class CreditAssigner:
    """Computes credit from rewards; keeps the running moments and baselines and the KL
    coefficient."""

    def __init__(self, config: AlgorithmSettings) -> None:
        self._config = config
        self._running = RunningMoments()
        self._kl = KlCoefficient(config.kl_reward)
        self._roles: RoleBaselines | None = None
        if config.reads_rewards and isinstance(config.advantage_config, RaeSettings):
            self._roles = RoleBaselines(config.advantage_config.decay)

    def assign(
        self,
        batch: TrainingBatch,
        proximal_logprobs: torch.Tensor | None = None,
        reference_logprobs: torch.Tensor | None = None,
        values: torch.Tensor | None = None,
        teacher_logprobs: torch.Tensor | None = None,
        ranks: Ranks | None = None,
    ) -> CreditAssignment:
        """Credit for the whole batch. All ranks call it together and get the same result.

        KL in the reward needs both proximal and reference log-probabilities [R]; opob, otb and
        teachers need the proximal ones; gae needs the values [R].
        """
        config, episodes = self._config, batch.episodes
        sequences = episodes.sequences
        shaped, metrics = shape_rewards(
            episodes.each(batch.rewards),
            episodes.each(self._normalization_groups(batch)),
            sequences,
            config.reward,
            self._running,
            episodes.each(batch.num_invalid_turns),
            episodes.each(batch.is_truncated),
        )
        kl = None
        if proximal_logprobs is not None and reference_logprobs is not None:
            kl = kl_penalty(proximal_logprobs, reference_logprobs, config.kl_reward.kind)
            metrics = {**metrics, "reward/kl": float(kl.mean()), "reward/kl_coef": self._kl.value}
        rewards = token_rewards(
            shaped,
            sequences,
            kl,
            self._kl.value,
            config.reward.whiten,
            batch.turn_rewards if config.reward.placement == "turn" else None,
        )
        if kl is not None:
            self._kl.update(float(kl.mean()), len(sequences))
        baseline = self._baseline(batch, sequences.sum(rewards.double()), ranks or Ranks())
        advantage_input = AdvantageInput(
            rewards,
            episodes.each(batch.group_indices),
            sequences,
            values,
            baseline,
            logprobs=proximal_logprobs,
            behavior_logprobs=batch.behavior_logprobs,
            components=self._components(batch, ranks or Ranks()),
            anchors=batch.anchors(ranks or Ranks()) if config.needs_anchors else None,
        )
        advantages, of_teachers = self._advantages(advantage_input, teacher_logprobs)
        returns = None if values is None else gae_returns(advantage_input, config.advantage_config)
        return CreditAssignment(
            advantages=advantages.float(),
            returns=None if returns is None else returns.float(),
            loss_mask=self._loss_mask(batch),
            sample_weights=self._sample_weights(batch),
            metrics={**metrics, **of_teachers, **self._role_metrics()},
        )

    def _baseline(
        self, batch: TrainingBatch, returns: torch.Tensor, ranks: Ranks
    ) -> torch.Tensor | None:
        """[E] the baseline of each episode's return [E], if it does not come from the batch
        itself."""
        if self._config.needs_greedy_rewards:
            return batch.episodes.each(batch.greedy_rewards)
        if self._roles is None:
            return None
        numbers = self._config.advantage_config
        assert isinstance(numbers, RaeSettings), "these are of rae"
        roles = batch.roles(numbers.role, ranks, is_first=not self._roles.values)
        return self._roles.follow(roles, returns)

    def _role_metrics(self) -> dict[str, float]:
        known = {} if self._roles is None else self._roles.values
        # A user's environment is named without its folders.
        short = {"/".join(role.split("/")[-2:]): value for role, value in known.items()}
        return {f"advantage/baseline/{role}": value for role, value in short.items()}

    def _advantages(
        self, given: AdvantageInput, teacher_logprobs: torch.Tensor | None
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """[R] advantages from the reward, the teachers or both, and the teachers' metrics."""
        config, settings = self._config, self._config.distillation
        advantages = torch.zeros_like(given.token_rewards)
        if config.reads_rewards:
            advantages = estimate_advantages(config.advantage, given, config.advantage_config)
        if settings is None or teacher_logprobs is None:
            return advantages, {}
        student = given.logprobs if settings.compares_proximal else given.behavior_logprobs
        assert student is not None, "`needs_ratios` asks for them"
        taught = teacher_advantages(teacher_logprobs, student)
        kl = float(given.sequences.mean(-taught).mean())
        total = settings.reward_coef * advantages
        if not settings.top_k:
            total = total + settings.coef * taught
        return total, {"reward/teacher_kl": kl}

    def state_dict(self) -> dict[str, float]:
        kl = {"kl_coef": self._kl.value} if self._kl.is_adaptive else {}
        roles = {} if self._roles is None else self._roles.state_dict()
        return {**self._running.state_dict(), **kl, **roles}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self._running.load_state_dict(state)
        if self._roles is not None:
            self._roles.load_state_dict(state)
        # A fixed coefficient is the configuration's, even if that has changed since.
        if self._kl.is_adaptive:
            self._kl.value = state.get("kl_coef") or self._kl.value

    def _normalization_groups(self, batch: TrainingBatch) -> torch.Tensor:
        """[S] equal for trajectories whose rewards are normalized together."""
        agentic = self._config.reward.agentic
        match agentic.grouping if agentic else "state":
            case "batch":
                return torch.zeros_like(batch.group_indices)
            case "inductive":
                return batch.environment_indices
        return batch.group_indices

    def _components(self, batch: TrainingBatch, ranks: Ranks) -> torch.Tensor | None:
        """[E, K] the rewards that gdpo adds; None for other advantages."""
        numbers = self._config.advantage_config
        if not isinstance(numbers, GdpoSettings):
            return None
        return batch.episodes.each(batch.recorded(tuple(numbers.rewards), ranks, "rewards"))

    def _loss_mask(self, batch: TrainingBatch) -> torch.Tensor | None:
        config, episodes = self._config.reward, batch.episodes
        masks = [] if batch.is_in_loss.all() else [batch.is_in_loss]
        if config.difficulty_low is not None or config.difficulty_high is not None:
            low, high = config.difficulty_low, config.difficulty_high
            rewards, groups = episodes.each(batch.rewards), episodes.each(batch.group_indices)
            mask = difficulty_mask(rewards, groups, low, high)
            masks = [*masks, episodes.sequences.expand(mask)]
        if config.truncated == "mask":
            masks = [*masks, batch.sequences.expand(~batch.is_truncated)]
        return reduce(torch.logical_and, masks) if masks else None

    def _sample_weights(self, batch: TrainingBatch) -> torch.Tensor | None:
        config = self._config.sample_weight
        if not config.difficulty and not config.length:
            return None
        episodes = batch.episodes
        difficulties, lengths = episodes.each(batch.difficulties), episodes.sequences.lengths
        return episodes.to_trajectories(sample_weights(lengths, config, difficulties).float())
