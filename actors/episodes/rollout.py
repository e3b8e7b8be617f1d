"""From a lease to a trajectory group: run the siblings' episodes concurrently, score, record.

Invariant: a group holds facts of what was sampled and nothing derived; if a sibling fails, the
whole group fails (RolloutError). A sibling that a limit cuts has not failed.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from msgspec import structs

from actors.episodes.episode import EpisodeRun
from actors.episodes.record import Rollout
from actors.prompts.media import has_media, load_media
from actors.rendering.renderer import ChatRenderer
from streamrl.errors import RolloutError
from streamrl.interfaces import (
    Engine,
    Environment,
    EnvironmentContext,
    Episode,
    Prompt,
    PromptSource,
    Reward,
)
from streamrl.types import (
    GREEDY_REWARD,
    Lease,
    SamplingParams,
    TrajectoryGroup,
    episode_indices,
)
from streamrl.types.media import distinct


@dataclass(eq=False)
class GroupProgress:
    """The episodes of a group that is being sampled; none before it begins."""

    episodes: Sequence[EpisodeRun] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens that the longest sibling has sampled so far, as far as the engine has reported
        them; -1 if it has reported none."""
        return max((episode.num_tokens for episode in self.episodes), default=-1)


@dataclass(frozen=True)
class GroupRunner:
    """Everything a group needs beside its lease."""

    engine: Engine
    prompts: PromptSource
    renderer: ChatRenderer
    make_environment: Callable[[], Environment]
    environment: str
    reward: Reward
    sampling: SamplingParams
    group_size: int
    max_model_len: int
    with_greedy_reward: bool = False
    """Whether to score a greedy completion, too, and record its reward with every sibling."""
    deadline_s: float = 3600.0
    """`generator.group_deadline_s`."""
    run_seed: int = 0
    """`run.seed`."""

    async def run(self, lease: Lease, progress: GroupProgress | None = None) -> TrajectoryGroup:
        """The finished group of the lease's prompt; `progress` may be read meanwhile.

        Waits for the siblings' completions, environments and the reward, or for the deadline.

        Raises:
            RolloutError: a sibling or the reward failed, or the deadline left nothing to score.
            PromptTooLongError: the prompt is too long and `data.truncation` is `drop`.
        """
        progress = GroupProgress() if progress is None else progress
        context = await self._context(lease)
        samplings = [self.sampling] * self.group_size
        if self.with_greedy_reward:
            samplings = [*samplings, structs.replace(self.sampling, temperature=0.0)]
        progress.episodes = [self._episode() for _ in samplings]
        rollouts = await _all_or_none(
            episode.run(replace(context, episode_index=i), sampling)
            for i, (episode, sampling) in enumerate(zip(progress.episodes, samplings, strict=True))
        )
        return await self._scored_group(lease, context.prompt, rollouts)

    async def _context(self, lease: Lease) -> EnvironmentContext:
        """What the siblings start from. Waits for a thread that reads the prompt's media."""
        prompt = self.prompts[lease.prompt_index]
        if not has_media(prompt):
            return self._start_of(prompt, lease)
        return await asyncio.to_thread(lambda: self._start_of(load_media(prompt), lease))

    def _start_of(self, prompt: Prompt, lease: Lease) -> EnvironmentContext:
        token_ids = self.renderer.encode(prompt)
        media = self.renderer.media_of(prompt) if has_media(prompt) else ()
        return EnvironmentContext(prompt, token_ids, self.renderer, self._seed(lease), media=media)

    def _episode(self) -> EpisodeRun:
        return EpisodeRun(
            self.engine,
            self.make_environment,
            max_model_len=self.max_model_len,
            deadline_s=self.deadline_s,
        )

    async def _scored_group(
        self, lease: Lease, prompt: Prompt, rollouts: Sequence[Rollout]
    ) -> TrajectoryGroup:
        """The record of a group, of which a greedy rollout is not part. Waits for the reward, or
        for as long as the episodes had."""
        siblings, greedy = rollouts[: self.group_size], rollouts[self.group_size :]
        metrics = _prompt_metrics(prompt)
        try:
            async with asyncio.timeout(self.deadline_s) as limit:
                rewards = await self._score(prompt, siblings)
                if greedy:
                    (greedy_reward,) = await self._score(prompt, greedy)
                    metrics = {**metrics, GREEDY_REWARD: greedy_reward}
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise RolloutError(
                "the reward has not scored the group within generator.group_deadline_s, which is "
                f"{self.deadline_s:g} s"
            ) from error
        episodes = [
            rollout.trajectories(reward, metrics)
            for rollout, reward in zip(siblings, rewards, strict=True)
        ]
        return TrajectoryGroup(
            group_id=f"{lease.prompt_index}:{lease.lease_id}",
            prompt_index=lease.prompt_index,
            environment=self.environment,
            trajectories=tuple(t for segments in episodes for t in segments),
            episode_indices=episode_indices(map(len, episodes)),
            media=distinct(medium for rollout in siblings for medium in rollout.media),
        )

    def _seed(self, lease: Lease) -> int:
        """Of the group: the same one if its prompt is leased again."""
        entropy = np.random.SeedSequence([self.run_seed, lease.prompt_index])
        return int(entropy.generate_state(1)[0])

    def origin(self, lease: Lease) -> str:
        """Where the lease's prompt is found; "" if nobody knows."""
        return self.prompts[lease.prompt_index].origin

    async def _score(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> Sequence[float]:
        return await self.reward.score([self._scored(prompt, rollout) for rollout in rollouts])

    def _scored(self, prompt: Prompt, rollout: Rollout) -> Episode:
        return Episode(
            prompt=prompt,
            response=self.renderer.decode(rollout.last_response),
            turn_rewards=tuple(turn.reward for turn in rollout.turns),
            num_response_tokens=sum(turn.num_completion_tokens for turn in rollout.turns),
            finish_reason=rollout.finish_reason,
            metrics=rollout.metrics,
        )


def unbuffered_lease(purpose: str, prompt_index: int) -> Lease:
    """Of a prompt that is sampled for an evaluation or a check, with no buffer behind it."""
    return Lease(
        lease_id=f"{purpose}/{prompt_index}",
        prompt_index=prompt_index,
        min_policy_version=0,
        expires_at_s=0.0,
    )


def _prompt_metrics(prompt: Prompt) -> dict[str, float]:
    """The number of a prompt's row that the learner uses: `difficulty`, for
    `algorithm.sample_weight`."""
    difficulty = prompt.row.get("difficulty")
    return {"difficulty": float(difficulty)} if isinstance(difficulty, int | float) else {}


async def _all_or_none(siblings: Iterable[Coroutine[Any, Any, Rollout]]) -> list[Rollout]:
    """Every sibling's rollout; the first error cancels the others and is raised."""
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(sibling) for sibling in siblings]
    except* RolloutError as errors:
        first = errors.exceptions[0]
        raise first from first.__cause__
    return [task.result() for task in running]
