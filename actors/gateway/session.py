"""One episode of an agent: the agent asks the policy for completions, which are recorded.

`actors.episodes` makes a session for each episode; the gateway, or an adapter in this process,
calls `complete` on the agent's behalf, with text messages.

Invariant: what the engine read and sampled is recorded token by token. Calls may run concurrently;
a conversation that does not extend an earlier one becomes its own segment.
"""

import asyncio
import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import NoReturn

from actors.episode_record import EpisodeRecord
from actors.rendering.messages import normalized
from streamrl.errors import RolloutError, StreamRLError
from streamrl.interfaces import CompletionHandle, Message, Renderer, Sampler, ToolSchema
from streamrl.types import Completion, FinishReason, SamplingParams


@dataclass(frozen=True)
class RecordedConversation:
    """What the policy has read and said, up to and including one completion."""

    messages: tuple[str, ...]
    """The comparable form of each message; the completion's is the last."""
    tools: str
    token_ids: tuple[int, ...]
    completion_token_ids: tuple[int, ...]
    """The last of `token_ids`."""


class Conversations:
    """Maps the messages of one session to recorded token ids.

    If messages extend a recorded conversation, the policy reads the very ids that the engine read
    and sampled then, followed by what the template puts after them. Other messages are rendered as
    a whole.
    """

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._known: tuple[RecordedConversation, ...] = ()

    def context(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> tuple[int, ...]:
        """The token ids that the policy reads for these messages before it answers."""
        known = self._longest_beginning(messages, tools)
        if known is None:
            return self._renderer.encode_messages(messages, tools)
        new = messages[len(known.messages) :]
        reply = self._renderer.encode_reply(new, known.completion_token_ids, tools)
        return (*known.token_ids, *reply)

    def add(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema],
        context: tuple[int, ...],
        completion_token_ids: tuple[int, ...],
    ) -> None:
        """Record that the policy read `context` and sampled the completion, the last of
        `messages`."""
        conversation = RecordedConversation(
            tuple(map(_comparable, messages)),
            _text(tools),
            (*context, *completion_token_ids),
            completion_token_ids,
        )
        self._known = (*self._known, conversation)

    def _longest_beginning(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema]
    ) -> RecordedConversation | None:
        """The longest recorded conversation that these messages extend; the latest of several."""
        asked, described = tuple(map(_comparable, messages)), _text(tools)
        fitting = [
            known
            for known in self._known
            if known.tools == described
            and len(known.messages) < len(asked)
            and asked[: len(known.messages)] == known.messages
        ]
        return max(reversed(fitting), key=lambda known: len(known.messages), default=None)


def _with_names(messages: Sequence[Message]) -> Sequence[Message]:
    """Add the tool's name to each tool result, since some chat templates show it."""
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    names = {call.get("id"): call["function"].get("name") for call in calls}
    return [
        {"name": names[message["tool_call_id"]], **message}
        if message.get("role") == "tool" and message.get("tool_call_id") in names
        else message
        for message in messages
    ]


def _comparable(message: Message) -> str:
    """A form of a message that is the same however a client sends it back.

    Clients leave out the reasoning and empty fields, and choose ids of calls and names of
    assistants as they like.
    """
    left_out = {"reasoning_content", "tool_calls"}
    left_out |= {"name"} if message.get("role") == "assistant" else set()
    kept = {name: value for name, value in message.items() if value and name not in left_out}
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = [{"name": f.get("name"), "arguments": f["arguments"]} for f in functions]
    return _text({**kept, "tool_calls": calls})


def _text(value: object) -> str:
    return json.dumps(value, sort_keys=True, default=dict)


class SessionEndedError(StreamRLError):
    """The episode is over: it was scored, reached a limit, or lost its agent."""


class ContextTooLongError(StreamRLError):
    """The messages leave no room for a completion."""


@dataclass(frozen=True)
class PolicyReply:
    message: Message
    """The assistant's message: `content` and, if present, `tool_calls` (arguments as a mapping) and
    `reasoning_content`."""
    completion: Completion
    num_prompt_tokens: int
    reply_id: str
    """The key under which `Session.answered` has the messages up to and including this one."""


@dataclass(eq=False)
class Session:
    """The session of one episode; `complete` may be called until `end`."""

    engine: Sampler
    renderer: Renderer
    sampling: SamplingParams
    """The sampling of every completion for which a call gives no other."""
    _: KW_ONLY
    max_model_len: int
    max_turns: int | None = None
    record: EpisodeRecord = field(default_factory=EpisodeRecord)
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    """When it is set, completions that are being sampled end."""

    def __post_init__(self) -> None:
        self._conversations = Conversations(self.renderer)
        self.handles: frozenset[CompletionHandle] = frozenset()
        """Handles of the completions that are being sampled."""
        self._num_begun = 0
        self._last_change_s = time.monotonic()
        self._last_num_tool_calls = 0
        self._finish_reason = FinishReason.STOP
        self._end: str | None = None
        self.num_invalid_turns = 0
        """Completions that no limit has cut and whose tool calls cannot be read."""
        self.idle_s = 0.0
        """Total time between completions in which none was being sampled."""
        self.messages: tuple[Message, ...] = ()
        """The conversation of the last finished completion."""
        self.answered: Mapping[str, Sequence[Message]] = {}
        self._engine_error: Exception | None = None
        self._has_engine_failed = asyncio.Event()

    @property
    def num_tokens(self) -> int:
        """Tokens sampled so far, as far as the engine has reported them; -1 if it has not."""
        now = [handle.num_tokens for handle in self.handles if handle.num_tokens >= 0]
        is_reported = bool(self.record.segments or now)
        return self.record.num_sampled_tokens + sum(now) if is_reported else -1

    @property
    def silent_s(self) -> float:
        """How long no completion has been asked for; 0 while one is being sampled."""
        return 0.0 if self.handles else time.monotonic() - self._last_change_s

    @property
    def finish_reason(self) -> FinishReason:
        """The finish reason of the episode, if it ends now."""
        is_cut = self.stop.is_set() and self._end is None
        return FinishReason.DEADLINE if is_cut else self._finish_reason

    async def engine_failure(self) -> NoReturn:
        """Wait until the engine has failed, and raise its error, which ends more than this
        episode."""
        await self._has_engine_failed.wait()
        assert self._engine_error is not None, "it is set before"
        raise self._engine_error

    def judge(self, reward: float) -> None:
        """Record the reward of the whole episode, with the last finished completion."""
        self.record.judge(reward=reward, num_tool_calls=self._last_num_tool_calls)

    def end(self, reason: str) -> None:
        """Refuse further calls with this reason; completions that are being sampled are not
        recorded."""
        self._finish_reason = self.finish_reason
        self._end = self._end or reason
        self.stop.set()

    async def complete(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        sampling: SamplingParams | None = None,
        *,
        num_instructions: int = 0,
    ) -> PolicyReply:
        """Return and record the policy's answer to the messages. Waits for the engine.

        Args:
            num_instructions: how many of the first messages `answered` leaves out.

        Raises:
            SessionEndedError: the episode is over, or ended before a token was sampled, or the
                engine has ended.
            ContextTooLongError: the messages fill `max_model_len`.
            RolloutError: the engine cannot serve the request.
            ConfigError: the chat template cannot render the messages.
        """
        self._require_open()
        if self.stop.is_set():
            raise SessionEndedError("the episode has reached generator.group_deadline_s")
        if self._num_begun == self.max_turns:
            self._finish_reason = FinishReason.MAX_TURNS
            raise SessionEndedError(
                f"the episode has had its generator.episode.max_turns, {self.max_turns} turns"
            )
        messages = _with_names([normalized(message) for message in messages])
        context = self._conversations.context(messages, tools)
        if len(context) >= self.max_model_len:
            self._finish_reason = FinishReason.LENGTH
            raise ContextTooLongError(
                f"the messages have {len(context)} tokens, and generator.max_model_len is "
                f"{self.max_model_len}"
            )
        completion = await self._sampled(context, sampling or self.sampling)
        self._require_open()
        if not len(completion.token_ids):
            raise SessionEndedError("the episode ended before a token was sampled")
        self.record.add(context, completion)
        reply = self._recorded(messages, tools, context, completion)
        self.answered = {**self.answered, reply.reply_id: self.messages[num_instructions:]}
        return reply

    def _recorded(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema],
        context: tuple[int, ...],
        completion: Completion,
    ) -> PolicyReply:
        sampled = tuple(completion.token_ids.tolist())
        message = self._parsed(sampled, completion.finish_reason, tools)
        self._last_num_tool_calls = len(message.get("tool_calls") or ())
        self.record.judge(num_tool_calls=self._last_num_tool_calls)
        self._finish_reason = completion.finish_reason
        conversation = [*messages, message]
        self._conversations.add(conversation, tools, context, sampled)
        self.messages = tuple(conversation)
        return PolicyReply(message, completion, len(context), uuid.uuid4().hex)

    def _parsed(
        self, token_ids: tuple[int, ...], finish_reason: FinishReason, tools: Sequence[ToolSchema]
    ) -> Message:
        """The policy's message; its calls get ids of nine letters and digits, as Mistral's chat
        templates require."""
        message = dict(self.renderer.parse(token_ids, tools))
        is_unread = message.pop("parse_error", None) is not None
        calls = message.get("tool_calls") or ()
        if not tools:
            # A client that offers no tools expects no calls, so they are text.
            return self.renderer.parse(token_ids, None) if calls else message
        self.num_invalid_turns += is_unread and not finish_reason.is_truncated
        named = [{"id": uuid.uuid4().hex[:9], **call} for call in calls]
        return {**message, "tool_calls": named} if named else message

    async def _sampled(self, context: tuple[int, ...], sampling: SamplingParams) -> Completion:
        handle = CompletionHandle(self.stop)
        if self._num_begun and not self.handles:
            self.idle_s += time.monotonic() - self._last_change_s
        self._num_begun += 1
        self.handles |= {handle}
        try:
            return await self.engine.generate(context, sampling, handle)
        except (RolloutError, asyncio.CancelledError):
            self._num_begun -= 1
            raise
        except Exception as error:
            self._engine_error = error
            self._has_engine_failed.set()
            raise SessionEndedError(f"the engine has ended: {error}") from error
        finally:
            self.handles -= {handle}
            self._last_change_s = time.monotonic()

    def _require_open(self) -> None:
        if self._end is not None:
            raise SessionEndedError(self._end)
