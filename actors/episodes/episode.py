"""One episode: the engine samples, the environment answers, turn by turn, until a limit or the end.

    deadline            the completion that is being sampled ends with the tokens that it has
    deadline + grace    whatever still runs, in the engine or the environment, is canceled

Invariant: a completion that was sampled is part of the rollout, however the episode ended.
"""

import asyncio
from collections.abc import Callable, Mapping

from actors.episodes.record import EpisodeRecord, Rollout
from actors.gateway.agent import Agent, play
from actors.gateway.session import Session
from streamrl.errors import RolloutError
from streamrl.interfaces import (
    CompletionHandle,
    Engine,
    Environment,
    EnvironmentContext,
    Observation,
    Renderer,
    Transition,
)
from streamrl.types import INVALID_TURNS, FinishReason, SamplingParams

# An engine may be loading an update at the deadline, and an environment has to see the last turn.
_GRACE_S = 30.0


class EpisodeRun:
    """One episode, to be run once; `num_tokens` may be read meanwhile."""

    def __init__(
        self,
        engine: Engine,
        make_environment: Callable[[], Environment | Agent],
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
        self._session: Session | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens sampled so far, as far as the engine has reported them; -1 if it has not."""
        if self._session is not None:
            return self._session.num_tokens
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
        if isinstance(environment, Agent):
            return await self._attend(environment, start, sampling)
        try:
            observation = await environment.start(start)
            context: tuple[int, ...] = ()
            sampled: tuple[int, ...] = ()
            while True:
                context = _context(context, sampled, observation, start.renderer)
                if len(context) >= self._max_model_len and self._record.segments:
                    return FinishReason.LENGTH
                completion = await self._engine.generate(context, sampling, self._handle)
                if not len(completion.token_ids):
                    if completion.finish_reason is FinishReason.DEADLINE:
                        return FinishReason.DEADLINE
                    raise RolloutError(f"the engine sampled nothing ({completion.finish_reason})")
                self._record.add(context, completion)
                self._handle = CompletionHandle(self._stop)
                transition = await environment.step(completion)
                self._on_transition(transition)
                sampled = tuple(completion.token_ids.tolist())
                observation = transition.observation
                if transition.done:
                    return completion.finish_reason
                if self._stop.is_set():
                    return FinishReason.DEADLINE
        finally:
            await environment.close()

    async def _attend(
        self, agent: Agent, start: EnvironmentContext, sampling: SamplingParams
    ) -> FinishReason:
        """Why the episode ended. Waits for the agent, which asks for its turns by itself."""
        self._session = session = Session(
            self._engine,
            start.renderer,
            sampling,
            max_model_len=self._max_model_len,
            record=self._record,
            stop=self._stop,
        )
        result = await play(agent, session, start)
        invalid = {INVALID_TURNS: float(session.num_invalid_turns)}
        self._metrics = {**result.metrics, **(invalid if session.num_invalid_turns else {})}
        return session.finish_reason

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


def _context(
    read: tuple[int, ...],
    sampled: tuple[int, ...],
    observation: Observation,
    renderer: Renderer,
) -> tuple[int, ...]:
    """All that the policy reads before its next turn, after what it read and sampled so far."""
    new, messages, tools = observation.token_ids, observation.messages, observation.tools
    if observation.is_new_context or not sampled:
        return (*new, *renderer.encode_messages(messages, tools)) if messages else new
    reply = renderer.encode_reply(messages, (*sampled, *new), tools) if messages else ()
    return (*read, *sampled, *new, *reply)
