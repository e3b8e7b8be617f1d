"""One episode: the engine samples, the environment answers, turn by turn, until a limit or the end.

    deadline            the completion that is being sampled ends with the tokens that it has
    deadline + grace    whatever still runs, in the engine or the environment, is canceled

Invariant: a completion that was sampled is part of the rollout, however the episode ended.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from msgspec import structs

from streamrl.errors import RolloutError
from streamrl.interfaces import (
    CompletionHandle,
    Engine,
    Environment,
    EnvironmentContext,
    Transition,
)
from streamrl.types import (
    Completion,
    FinishReason,
    Float32Array,
    Int32Array,
    SamplingParams,
    Trajectory,
    Turn,
)

# An engine may be loading an update at the deadline, and an environment has to see the last turn.
_GRACE_S = 30.0


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
    finish_reason: FinishReason

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


class EpisodeRun:
    """One episode, to be run once; `num_tokens` may be read meanwhile."""

    def __init__(
        self,
        engine: Engine,
        make_environment: Callable[[], Environment],
        *,
        max_model_len: int,
        deadline_s: float,
    ) -> None:
        self._engine = engine
        self._make_environment = make_environment
        self._max_model_len = max_model_len
        self._deadline_s = deadline_s
        self._stop = asyncio.Event()
        self._handle = CompletionHandle(self._stop)
        self._segments: tuple[Segment, ...] = ()
        self._turns: tuple[Turn, ...] = ()
        self._metrics: Mapping[str, float] = {}

    @property
    def num_tokens(self) -> int:
        """Tokens sampled so far, as far as the engine has reported them; -1 if it has not."""
        reported = [turn.num_completion_tokens for turn in self._turns]
        if self._handle.num_tokens >= 0:
            reported = [*reported, self._handle.num_tokens]
        return sum(reported) if reported else -1

    async def run(self, start: EnvironmentContext, sampling: SamplingParams) -> Rollout:
        """The rollout. Waits for the engine and the environment; the deadline unblocks.

        Raises:
            RolloutError: the engine or the environment failed, or not a token was sampled in time.
        """
        timer = asyncio.get_running_loop().call_later(self._deadline_s, self._stop.set)
        try:
            async with asyncio.timeout(self._deadline_s + min(_GRACE_S, self._deadline_s)) as limit:
                finish_reason = await self._take_turns(start, sampling)
        except TimeoutError:
            if not limit.expired():
                raise
            finish_reason = FinishReason.DEADLINE
        finally:
            timer.cancel()
        if not self._turns:
            raise RolloutError(
                "no token was sampled within generator.group_deadline_s, which is "
                f"{self._deadline_s:g} s"
            )
        return Rollout(self._segments, self._turns, self._metrics, finish_reason)

    async def _take_turns(
        self, start: EnvironmentContext, sampling: SamplingParams
    ) -> FinishReason:
        """Why the episode ended. Waits for the engine, then for the environment, turn by turn."""
        environment = self._make_environment()
        observation = await environment.start(start)
        context: tuple[int, ...] = ()
        while True:
            context = (*context, *observation)
            completion = await self._engine.generate(context, sampling, self._handle)
            if not len(completion.token_ids):
                if completion.finish_reason is FinishReason.DEADLINE:
                    return FinishReason.DEADLINE
                raise RolloutError(f"the engine sampled nothing ({completion.finish_reason})")
            self._on_completion(observation, completion)
            transition = await environment.step(completion)
            self._on_transition(transition)
            context = (*context, *completion.token_ids.tolist())
            observation = transition.observation
            if transition.done:
                return completion.finish_reason
            if self._stop.is_set():
                return FinishReason.DEADLINE
            if len(context) + len(observation) >= self._max_model_len:
                return FinishReason.LENGTH

    def _on_completion(self, observation: tuple[int, ...], completion: Completion) -> None:
        turn = Turn(
            num_observation_tokens=len(observation),
            num_completion_tokens=len(completion.token_ids),
            finish_reason=completion.finish_reason,
        )
        self._turns = (*self._turns, turn)
        sampled = (Segment.observed(observation), Segment.sampled(completion))
        self._segments = (*self._segments, *sampled)
        self._handle = CompletionHandle(self._stop)

    def _on_transition(self, transition: Transition) -> None:
        *earlier, turn = self._turns
        turn = structs.replace(turn, num_tool_calls=transition.num_tool_calls)
        self._turns = (*earlier, turn)
        self._metrics = {**self._metrics, **transition.metrics}
