"""From a lease to a trajectory group: run the siblings' episodes concurrently, score, record.

Invariant: a group holds facts of what was sampled and nothing derived; if a sibling fails, the
whole group fails (RolloutError).
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec import structs

from actors.chat import Renderer
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
    Completion,
    FinishReason,
    Float32Array,
    Int32Array,
    Lease,
    SamplingParams,
    Trajectory,
    TrajectoryGroup,
    Turn,
)


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens [n], observed (version -1) or sampled, with what is recorded of each."""

    token_ids: Int32Array
    logprobs: Float32Array
    policy_versions: Int32Array

    @classmethod
    def observed(cls, token_ids: tuple[int, ...]) -> "Segment":
        ids = np.array(token_ids, dtype=np.int32)
        return cls(ids, np.zeros(len(ids), np.float32), np.full(len(ids), -1, np.int32))

    @classmethod
    def sampled(cls, completion: Completion) -> "Segment":
        c = completion
        return cls(c.token_ids, c.logprobs, c.policy_versions)


@dataclass(frozen=True)
class Rollout:
    """One episode's tokens in order, before it has a reward."""

    segments: tuple[Segment, ...]
    turns: tuple[Turn, ...]
    metrics: Mapping[str, float]

    @property
    def finish_reason(self) -> FinishReason:
        return self.turns[-1].finish_reason

    @property
    def last_response(self) -> list[int]:
        """The token ids that the policy sampled in its last turn."""
        return [int(token) for token in self.segments[-1].token_ids]

    def trajectory(self, reward: float, metrics: Mapping[str, float]) -> Trajectory:
        """The flat record with these metrics beside its own; see `streamrl.types.Trajectory`."""
        segments = self.segments
        return Trajectory(
            token_ids=np.concatenate([s.token_ids for s in segments]),
            response_mask=np.concatenate([s.policy_versions >= 0 for s in segments]),
            behavior_logprobs=np.concatenate([s.logprobs for s in segments]),
            policy_versions=np.concatenate([s.policy_versions for s in segments]),
            reward=reward,
            finish_reason=self.finish_reason,
            turns=self.turns,
            metrics={**metrics, **self.metrics},
        )


@dataclass(frozen=True)
class GroupRunner:
    """Everything a group needs beside its lease."""

    engine: Engine
    prompts: PromptSource
    renderer: Renderer
    make_environment: Callable[[], Environment]
    environment: str
    reward: Reward
    sampling: SamplingParams
    group_size: int
    max_model_len: int
    with_greedy_reward: bool = False
    """Whether to score a greedy completion, too, and record its reward with every sibling."""
    deadline_s: float | None = None
    """`generator.group_deadline_s`."""

    async def run(self, lease: Lease) -> TrajectoryGroup:
        """The finished group of the lease's prompt.

        Waits for the siblings' completions, environments and the reward, or for the deadline.

        Raises:
            RolloutError: a sibling or the reward failed, or the deadline is over.
            PromptTooLongError: the prompt is too long and `data.truncation` is `drop`.
        """
        try:
            async with asyncio.timeout(self.deadline_s) as deadline:
                return await self._group(lease)
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise RolloutError(
                f"not finished within generator.group_deadline_s, which is {self.deadline_s:g} s"
            ) from error

    async def _group(self, lease: Lease) -> TrajectoryGroup:
        prompt = self.prompts[lease.prompt_index]
        context = EnvironmentContext(prompt, self.renderer.encode(prompt), self.renderer)
        siblings = [self._episode(context, self.sampling) for _ in range(self.group_size)]
        if self.with_greedy_reward:
            greedy = structs.replace(self.sampling, temperature=0.0)
            siblings = [*siblings, self._episode(context, greedy)]
        episodes = await _all_or_none(siblings)
        rollouts = episodes[: self.group_size]
        rewards = await self._score(prompt, rollouts)
        metrics = _prompt_metrics(prompt)
        if self.with_greedy_reward:
            (greedy_reward,) = await self._score(prompt, episodes[self.group_size :])
            metrics = {**metrics, GREEDY_REWARD: greedy_reward}
        return TrajectoryGroup(
            group_id=f"{lease.prompt_index}:{lease.lease_id}",
            prompt_index=lease.prompt_index,
            environment=self.environment,
            trajectories=tuple(
                rollout.trajectory(reward, metrics)
                for rollout, reward in zip(rollouts, rewards, strict=True)
            ),
        )

    def origin(self, lease: Lease) -> str:
        """Where the lease's prompt is found, in brackets for a message; "" if nobody knows."""
        origin = self.prompts[lease.prompt_index].origin
        return f" ({origin})" if origin else ""

    async def _score(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> Sequence[float]:
        return await self.reward.score([self._scored(prompt, rollout) for rollout in rollouts])

    async def _episode(self, start: EnvironmentContext, sampling: SamplingParams) -> Rollout:
        """One episode. Waits for the engine, then for the environment, turn by turn."""
        environment = self.make_environment()
        observation = await environment.start(start)
        context: tuple[int, ...] = ()
        segments: tuple[Segment, ...] = ()
        turns: tuple[Turn, ...] = ()
        metrics: dict[str, float] = {}
        while True:
            context = (*context, *observation)
            completion = await self.engine.generate(context, sampling)
            if not len(completion.token_ids):
                raise RolloutError(f"the engine sampled nothing ({completion.finish_reason})")
            transition = await environment.step(completion)
            turn = Turn(
                num_observation_tokens=len(observation),
                num_completion_tokens=len(completion.token_ids),
                finish_reason=completion.finish_reason,
                num_tool_calls=transition.num_tool_calls,
            )
            segments = (*segments, Segment.observed(observation), Segment.sampled(completion))
            turns, metrics = (*turns, turn), {**metrics, **transition.metrics}
            context = (*context, *completion.token_ids.tolist())
            observation = transition.observation
            if transition.done or len(context) + len(observation) >= self.max_model_len:
                return Rollout(segments, turns, metrics)

    def _scored(self, prompt: Prompt, rollout: Rollout) -> Episode:
        return Episode(
            prompt=prompt,
            response=self.renderer.decode(rollout.last_response),
            num_response_tokens=sum(turn.num_completion_tokens for turn in rollout.turns),
            finish_reason=rollout.finish_reason,
            metrics=rollout.metrics,
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
        raise errors.exceptions[0] from None
    return [task.result() for task in running]
