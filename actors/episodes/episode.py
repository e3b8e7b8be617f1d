"""One episode: the engine samples, the environment answers, turn by turn, until a limit or the end.

    deadline            the completion that is being sampled ends with the tokens that it has
    deadline + grace    whatever still runs, in the engine or the environment, is canceled

Invariant: a completion that was sampled is part of the rollout, however the episode ended.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from actors.episodes.record import EpisodeRecord, Rollout
from streamrl.errors import RolloutError
from streamrl.interfaces import (
    CompletionHandle,
    Engine,
    Environment,
    EnvironmentContext,
    Observation,
    Transition,
)
from streamrl.types import INVALID_TURNS, Completion, FinishReason, Media, SamplingParams

# An engine may be loading an update at the deadline, and an environment has to see the last turn.
_GRACE_S = 30.0


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
        self._record = EpisodeRecord()
        self._metrics: Mapping[str, float] = {}

    @property
    def num_tokens(self) -> int:
        """Tokens sampled so far, as far as the engine has reported them; -1 if it has not."""
        sampled, now = self._record.num_sampled_tokens, self._handle.num_tokens
        return sampled + max(now, 0) if self._record.segments or now >= 0 else -1

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
        if not self._record.segments:
            raise RolloutError(
                "no token was sampled within generator.group_deadline_s, which is "
                f"{self._deadline_s:g} s"
            )
        return self._record.rollout(finish_reason, self._metrics)

    async def _take_turns(
        self, start: EnvironmentContext, sampling: SamplingParams
    ) -> FinishReason:
        """Why the episode ended. Waits for the engine, then for the environment, turn by turn."""
        environment = self._make_environment()
        try:
            observation = await environment.start(start)
            context = Context()
            while True:
                context = context.after(observation, start)
                if len(context.token_ids) >= self._max_model_len and self._record.segments:
                    return FinishReason.LENGTH
                completion = await self._sample(context, sampling)
                if not len(completion.token_ids):
                    if completion.finish_reason is FinishReason.DEADLINE:
                        return FinishReason.DEADLINE
                    raise RolloutError(f"the engine sampled nothing ({completion.finish_reason})")
                self._record.add(context.token_ids, completion, context.media)
                self._handle = CompletionHandle(self._stop)
                transition = await environment.step(completion)
                self._on_transition(transition)
                context = context.continued(completion)
                observation = transition.observation
                if transition.done:
                    return completion.finish_reason
                if self._stop.is_set():
                    return FinishReason.DEADLINE
        finally:
            await environment.close()

    async def _sample(self, context: "Context", sampling: SamplingParams) -> Completion:
        token_ids, media = context.token_ids, context.media
        if not media:
            return await self._engine.generate(token_ids, sampling, self._handle)
        return await self._engine.generate(token_ids, sampling, self._handle, media)

    def _on_transition(self, transition: Transition) -> None:
        self._record.judge(
            reward=transition.reward,
            num_tool_calls=transition.num_tool_calls,
            in_loss=transition.in_loss,
        )
        self._metrics = {**self._metrics, **transition.metrics}
        if not transition.is_valid:
            count = self._metrics.get(INVALID_TURNS, 0.0) + 1
            self._metrics = {**self._metrics, INVALID_TURNS: count}


@dataclass(frozen=True)
class Context:
    """All that the policy reads before its next turn: token ids, and the media in them."""

    token_ids: tuple[int, ...] = ()
    media: tuple[Media, ...] = ()

    def after(self, observation: Observation, start: EnvironmentContext) -> "Context":
        """With what an environment shows; its prompt's media belong to its prompt's tokens."""
        new, media = observation.token_ids, observation.media
        if not media and new == start.prompt_token_ids:
            media = start.media
        if observation.messages:
            new = (*new, *start.renderer.encode_messages(observation.messages, observation.tools))
            media = (*media, *start.renderer.media(observation.messages))
        if observation.is_new_context:
            return Context(new, media)
        return Context((*self.token_ids, *new), (*self.media, *media))

    def continued(self, completion: Completion) -> "Context":
        return replace(self, token_ids=(*self.token_ids, *completion.token_ids.tolist()))
