"""One episode: the engine samples, the environment answers, turn by turn, until a limit or the end.

    deadline            the completion that is being sampled ends with the tokens that it has
    deadline + grace    whatever still runs, in the engine or the environment, is canceled

Both apply to the episode and to each of its turns.

Invariant: however the episode ends, every sampled completion is part of the rollout, and the
environment is closed. What an environment returns is checked first, so that it can be recorded and
sent.
"""

import asyncio
import logging
import operator
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from time import perf_counter
from typing import Any, TypeVar, cast

import msgspec
import numpy as np
from msgspec import structs

from actors.concurrency import DeadlineError, closed_after, deadline
from actors.environments import SingleTurn
from actors.episode_record import (
    Context,
    EpisodeRecord,
    OpenTurn,
    Rollout,
    generate,
    go_on,
    joined,
)
from actors.gateway.agent import Agent, is_agent, play
from actors.gateway.session import Session
from streamrl.config.generator import EpisodeSettings
from streamrl.errors import ConfigError, RolloutError
from streamrl.interfaces import (
    CompletionHandle,
    Engine,
    Environment,
    EnvironmentContext,
    Message,
    Observation,
    RestorableEnvironment,
    ToolSchema,
    Transition,
)
from streamrl.types import INVALID_TURNS, Completion, FinishReason, Media, SamplingParams
from streamrl.user_code import is_finite_number

log = logging.getLogger(__name__)

ABORT = FinishReason.ABORT
_WAIT_S = "environment_wait_s"
_INT_LIMIT = 2**31
_PARTS: Mapping[str, tuple[type, str]] = {
    "media": (Media, "a Media"),
    "messages": (Mapping, "a mapping"),
    "tools": (Mapping, "a mapping"),
}


def checked_observation(observation: Any, method: str = "start") -> Observation:
    """The observation with plain types (tuples, integers), as it is compared and sent.

    Raises:
        RolloutError: it is not an observation, or holds what cannot be encoded.
    """
    _require(Observation, observation, f"{method} returned", "an Observation")
    ids = observation.token_ids
    _require(tuple | list, ids, f"{method}: observation.token_ids was", "a tuple of ints")
    for token in ids:
        if not _is_natural(token):
            raise _wrong(f"{method}: one of observation.token_ids was", token, "a token id")
    for name, (kind, expected) in _PARTS.items():
        parts = getattr(observation, name)
        _require(tuple | list, parts, f"{method}: observation.{name} was", "a tuple")
        for part in parts:
            _require(kind, part, f"{method}: one of observation.{name} was", expected)
    return Observation(
        token_ids=tuple(map(operator.index, ids)),
        messages=tuple(observation.messages),
        media=tuple(observation.media),
        tools=tuple(observation.tools),
        is_new_context=observation.is_new_context,
    )


def checked_transition(transition: Any) -> Transition:
    """
    Raises:
        RolloutError: it is not a transition, or one of its numbers is not a finite number.
    """
    _require(Transition, transition, "step returned", "a Transition")
    observation = checked_observation(transition.observation, "step")
    _require(Mapping, transition.metrics, "step: metrics was", "a mapping of numbers")
    for name in ("done", "in_loss", "is_valid"):
        _require(bool | np.bool_, getattr(transition, name), f"step: {name} was", "a bool")
    for name in transition.metrics:
        _require(str, name, "step: the name of a metric was", "a string")
    if not _is_natural(calls := transition.num_tool_calls):
        raise _wrong("step: num_tool_calls was", calls, "a count")
    for name, value in {"reward": transition.reward, **transition.metrics}.items():
        if not is_finite_number(value):
            raise _wrong(f"step: {name} was", value, "a finite number")
    return Transition(
        observation=observation,
        done=bool(transition.done),
        reward=float(transition.reward),
        in_loss=bool(transition.in_loss),
        num_tool_calls=operator.index(calls),
        is_valid=bool(transition.is_valid),
        metrics=transition.metrics,
    )


def _is_natural(value: Any) -> bool:
    """Whether it is an integer from 0 on that fits into int32."""
    try:
        return 0 <= operator.index(value) < _INT_LIMIT
    except (TypeError, ValueError, RuntimeError):
        # An array or a tensor of several numbers.
        return False


def _require(kind: Any, value: object, place: str, expected: str) -> None:
    if not isinstance(value, kind):
        raise _wrong(place, value, expected)


def _wrong(place: str, value: object, expected: str) -> RolloutError:
    kind = type(value).__name__
    return RolloutError(f"the environment's {place} {kind} {value!r:.60}; it must be {expected}")


class Conversation:
    """The messages of an episode, as its reward reads them; rewritten contexts follow one another.
    They are only for people and rewards: training uses the recorded token ids."""

    def __init__(self, start: EnvironmentContext) -> None:
        self._renderer = start.renderer
        self._prompt_token_ids = start.prompt_token_ids
        self._prompt_messages = start.prompt_messages
        self.tools: tuple[ToolSchema, ...] = ()
        self.messages: tuple[Message, ...] = ()

    def observe(self, observation: Observation) -> None:
        """Add what the policy reads next; token ids become a user message."""
        self.tools = observation.tools or self.tools
        if observation.token_ids == self._prompt_token_ids and not self.messages:
            self.messages = self._prompt_messages
        elif observation.token_ids:
            text = self._renderer.decode(observation.token_ids)
            self.messages = (*self.messages, {"role": "user", "content": text})
        self.messages = (*self.messages, *observation.messages)

    def answer(self, token_ids: tuple[int, ...]) -> None:
        self.messages = (*self.messages, self._renderer.parse(token_ids, self.tools))


Answer = TypeVar("Answer")


class _NotRestoredError(Exception):
    """The environment cannot continue from its snapshot."""


@dataclass(eq=False)
class EpisodeRun:
    """One episode, run once; its properties may be read while it runs."""

    engine: Engine
    make_environment: Callable[[], Environment | Agent]
    _: KW_ONLY
    max_model_len: int
    deadline_s: float
    settings: EpisodeSettings = field(default_factory=EpisodeSettings)
    """`generator.episode`."""
    on_slot_free: Callable[[], None] = lambda: None
    """Called when the episode starts waiting for its environment, or ends."""
    warnings: set[str] | None = None
    """Warnings already logged for other episodes. None: no other process will continue this
    episode, so its environment is not asked for snapshots."""

    def __post_init__(self) -> None:
        self._stop = asyncio.Event()
        self._handle = CompletionHandle(self._stop)
        self._record = EpisodeRecord()
        self._metrics: dict[str, float] = {}
        self._environment_wait_s = 0.0
        self.is_over = False
        self.num_slots = 1
        """Engine slots that it has, waits for or is about to ask for; 0 while it waits for its
        environment."""
        self._session: Session | None = None
        self._has_asked = False
        self._left: Rollout | None = None
        self._standing: Rollout | None = None
        self._begun: Completion | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens sampled so far, as far as the engine has reported them; -1 if it has not."""
        if self._session is not None:
            return self._session.num_tokens
        if self._left is not None:
            return self._left.num_sampled_tokens
        begun, now = 0, self._handle.num_tokens
        if self._begun is not None and self._begun.finish_reason is ABORT:
            begun = len(self._begun.token_ids)
        is_reported = self._record.segments or begun or now >= 0
        return self._record.num_sampled_tokens + begun + max(now, 0) if is_reported else -1

    def restore(self, rollout: Rollout) -> None:
        """Continue the rollout that an earlier lease left; if that is finished, `run` is not
        called."""
        if rollout.open_turn is not None:
            self._left = rollout
            return
        self._record.restore(rollout)
        self.is_over, self.num_slots = True, 0

    def ask(self) -> None:
        """Ask the engine for the tokens it has sampled in this turn."""
        self._handle.is_asked = True

    def standing(self) -> Rollout | None:
        """What another process could continue from, or None. The current turn has the tokens that
        the engine reported when last asked."""
        standing, begun, new = self._standing, self._begun, self._handle.sampled
        if self.is_over or standing is None or standing.open_turn is None:
            return self._left
        sampled = begun if new is None else joined(begun, new)
        turn = structs.replace(standing.open_turn, sampled=sampled)
        return structs.replace(standing, open_turn=turn)

    async def run(self, start: EnvironmentContext, sampling: SamplingParams) -> Rollout:
        """Run the episode; its rollout. Waits for the engine and the environment, until the
        deadline.

        Raises:
            RolloutError: the engine or the environment failed, or no token was sampled in time.
        """
        self._start, self._sampling = start, sampling
        self._conversation = Conversation(start)
        try:
            player = self.make_environment()
            if is_agent(type(player)):
                finish_reason = await self._run(self._attend(cast(Agent, player)))
            else:
                try:
                    finish_reason = await self._play(cast(Environment, player))
                except _NotRestoredError as error:
                    self._warn("an episode begins anew: restore", error.__cause__)
                    self._left = None
                    finish_reason = await self._play(cast(Environment, self.make_environment()))
        except ConfigError as error:
            # What every episode needs was checked at the start.
            raise RolloutError(str(error)) from error.__cause__
        finally:
            self.is_over, self.num_slots = True, 0
        self.on_slot_free()
        metrics = {**self._counts(), **self._metrics}
        return self._record.rollout(finish_reason, metrics, self._conversation.messages)

    async def _play(self, environment: Environment) -> FinishReason:
        # Most episodes have one turn and a close that does nothing; this saves a timer.
        is_plain = type(environment) is SingleTurn
        async with nullcontext() if is_plain else closed_after(environment.close):
            return await self._run(self._take_turns(environment))

    async def _run(self, playing: Awaitable[FinishReason]) -> FinishReason:
        """Start the environment or agent and take the turns; why the episode ended. Waits as `run`
        does."""
        began_s = perf_counter()
        try:
            async with deadline(self.deadline_s, self._stop):
                finish_reason = await playing
        except DeadlineError:
            finish_reason = FinishReason.DEADLINE
        if self._record.segments:
            return finish_reason
        name, limit_s = "episode.turn_deadline_s", self.settings.turn_deadline_s
        if limit_s is None or perf_counter() - began_s >= self.deadline_s:
            name, limit_s = "group_deadline_s", self.deadline_s
        raise RolloutError(f"no token was sampled within generator.{name}, which is {limit_s:g} s")

    async def _take_turns(self, environment: Environment) -> FinishReason:
        """Take turns until the episode ends; why it ended. Waits for the engine, then the
        environment, turn by turn."""
        start, conversation = self._start, self._conversation
        context = await self._restored(environment)
        if context is None:
            async with self._turn(self._stop):
                observation = checked_observation(await self._ask(environment.start(start)))
            conversation.observe(observation)
            context = Context().after(observation, start)
            self._begin_first(context)
        while True:
            if len(context.token_ids) >= self.max_model_len and self._record.segments:
                return FinishReason.LENGTH
            async with self._turn(self._stop):
                completion = await go_on(
                    self.engine,
                    context,
                    self._sampling,
                    self._handle,
                    self._begun,
                    self.max_model_len,
                )
                sampled = tuple(completion.token_ids.tolist())
                if not sampled and completion.finish_reason is FinishReason.DEADLINE:
                    return FinishReason.DEADLINE
                if not sampled:
                    raise RolloutError(f"the engine sampled nothing ({completion.finish_reason})")
                self._record.add(context.token_ids, completion, context.media)
                context = structs.replace(context, sampled=sampled)
                self._handle, self._begun = CompletionHandle(self._stop), completion
                conversation.answer(sampled)
                transition = checked_transition(await self._ask(environment.step(completion)))
            self._on_transition(transition)
            if transition.done:
                return completion.finish_reason
            if self._stop.is_set():
                return FinishReason.DEADLINE
            most = self.settings.max_turns
            if most is not None and self._record.num_turns >= most:
                return FinishReason.MAX_TURNS
            conversation.observe(transition.observation)
            context = context.after(transition.observation, start)
            snapshot = await self._snapshot(environment)
            self._begun = self._standing = None
            if snapshot is not None:
                self._stand(OpenTurn(context, snapshot, conversation.tools))

    async def _restored(self, environment: Environment) -> Context | None:
        """What the policy reads before the turn that an earlier lease was in. None if there is
        none, or it is the first turn, which `start` begins again. Waits for the environment."""
        left = self._left
        if left is None or left.open_turn is None or left.open_turn.environment is None:
            return None
        try:
            state = msgspec.msgpack.decode(left.open_turn.environment)
            async with self._turn(stop=None):
                restorable = cast(RestorableEnvironment, environment)
                await self._ask(restorable.restore(self._start, state))
        except Exception as error:
            raise _NotRestoredError from error
        self._record.restore(left)
        self._conversation.messages = left.messages
        self._conversation.tools = left.open_turn.tools
        self._metrics = dict(left.metrics)
        self._environment_wait_s += self._metrics.pop(_WAIT_S, 0.0)
        self._left, self._standing, self._begun = None, left, left.open_turn.sampled
        return left.open_turn.context

    def _begin_first(self, context: Context) -> None:
        """Begin the first turn, with what an earlier lease sampled of it if the observation is the
        same.

        Images and videos are not compared: those of the prompt are known to be the same; a turn
        with others begins again.
        """
        left, self._left = self._left, None
        self._begun = None
        if context.media == self._start.media:
            context = structs.replace(context, media=())
            if left is not None and left.open_turn is not None and not left.segments:
                is_same = left.open_turn.context == context
                self._begun = left.open_turn.sampled if is_same else None
            self._stand(OpenTurn(context, tools=self._conversation.tools))

    def _stand(self, turn: OpenTurn) -> None:
        if self.warnings is not None:
            metrics = {**self._metrics, _WAIT_S: self._environment_wait_s}
            messages = self._conversation.messages
            self._standing = self._record.rollout(ABORT, metrics, messages, turn)

    async def _snapshot(self, environment: Environment) -> bytes | None:
        """The environment's snapshot; None if it makes none, or failed to. Waits for the
        environment."""
        take = getattr(environment, "snapshot", None)
        if take is None or self.warnings is None:
            return None
        try:
            async with self._turn(stop=None):
                state = await self._ask(take())
            return None if state is None else msgspec.msgpack.encode(state)
        except Exception as error:
            self._warn("the finished turns of an episode are not kept", error)
            return None

    def _warn(self, consequence: str, error: BaseException | None) -> None:
        """Warn once, not for each episode."""
        if self.warnings is not None and consequence not in self.warnings:
            self.warnings.add(consequence)
            log.warning("%s: %s (%s)", consequence, error, type(error).__name__)

    async def _ask(self, answer: Awaitable[Answer]) -> Answer:
        """The environment's answer. While this waits for it, another episode uses the slot."""
        began_s = perf_counter()
        self.num_slots = 0
        try:
            self.on_slot_free()
            return await answer
        finally:
            self.num_slots = 1
            self._environment_wait_s += perf_counter() - began_s

    def _turn(self, stop: asyncio.Event | None) -> AbstractAsyncContextManager[object]:
        """Limit the time of a block: a turn or the environment's start, whose timeout ends the
        episode, or a snapshot or `restore`, which the episode can do without."""
        turn_s = self.settings.turn_deadline_s
        return nullcontext() if turn_s is None else deadline(turn_s, stop)

    def _counts(self) -> dict[str, float]:
        """The metrics recorded for every episode."""
        turns = self._record.turns
        return {
            "num_turns": float(len(turns)),
            "num_tool_calls": float(sum(turn.num_tool_calls for turn in turns)),
            "num_segments": float(len(self._record.segments)),
            "num_observation_tokens": float(sum(t.num_observation_tokens for t in turns)),
            _WAIT_S: self._environment_wait_s,
        }

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        handle: CompletionHandle | None = None,
        media: Sequence[Media] = (),
    ) -> Completion:
        """A completion for the episode's agent. Waits for the engine."""
        # Until its first request, an agent is about to ask.
        self.num_slots = self.num_slots + 1 if self._has_asked else 1
        self._has_asked = True
        try:
            return await generate(self.engine, prompt_token_ids, sampling, handle, media)
        finally:
            # The request may outlast the episode, which then uses no slot.
            self.num_slots = max(0, self.num_slots - 1)
            self.on_slot_free()

    async def _attend(self, agent: Agent) -> FinishReason:
        """Let an agent play; why the episode ended. Waits for the agent, which asks for its turns
        itself."""
        self._session = session = Session(
            self,
            self._start.renderer,
            self._sampling,
            max_model_len=self.max_model_len,
            max_turns=self.settings.max_turns,
            record=self._record,
            stop=self._stop,
        )
        try:
            result = await play(agent, session, self._start)
        finally:
            self._conversation.messages = session.messages or self._conversation.messages
            self._environment_wait_s = session.idle_s
        invalid = {INVALID_TURNS: float(session.num_invalid_turns)}
        self._metrics = {**result.metrics, **(invalid if session.num_invalid_turns else {})}
        return session.finish_reason

    def _on_transition(self, transition: Transition) -> None:
        self._record.judge(
            reward=transition.reward,
            num_tool_calls=transition.num_tool_calls,
            in_loss=transition.in_loss,
        )
        self._metrics |= {name: float(value) for name, value in transition.metrics.items()}
        if not transition.is_valid:
            self._metrics[INVALID_TURNS] = self._metrics.get(INVALID_TURNS, 0.0) + 1
