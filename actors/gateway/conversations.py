"""The conversations of one session: which messages stand for which recorded token ids.

Invariant: messages that extend what a completion ended with are read as the very ids that the
engine read and sampled then, and what the template puts after them. Any other messages are rendered
whole.
"""

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from streamrl.interfaces import Message, Renderer, ToolSchema


@dataclass(frozen=True)
class Conversation:
    """What the policy had read and said after one completion."""

    messages: tuple[str, ...]
    """The comparable form of each, the completion's last."""
    tools: str
    token_ids: tuple[int, ...]
    completion_token_ids: tuple[int, ...]
    """The last of `token_ids`."""


class Conversations:
    """Those of one session; they only get more."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._known: tuple[Conversation, ...] = ()

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
        """The policy read `context` and sampled the completion; `messages` end with its own."""
        conversation = Conversation(
            tuple(map(_comparable, messages)),
            _text(tools),
            (*context, *completion_token_ids),
            completion_token_ids,
        )
        self._known = (*self._known, conversation)

    def _longest_beginning(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema]
    ) -> Conversation | None:
        """The latest of the longest conversations that these messages go on with."""
        asked, described = tuple(map(_comparable, messages)), _text(tools)
        fitting = [
            known
            for known in self._known
            if known.tools == described
            and len(known.messages) < len(asked)
            and asked[: len(known.messages)] == known.messages
        ]
        return max(reversed(fitting), key=lambda known: len(known.messages), default=None)


def normalized(message: Message) -> Message:
    """The message as chat templates take it: text parts joined, arguments of calls as a mapping.

    >>> normalized({"role": "user", "content": [{"type": "text", "text": "a"}]})
    {'role': 'user', 'content': 'a'}
    """
    content, calls = message.get("content"), message.get("tool_calls")
    changes: dict[str, Any] = {}
    if isinstance(content, list | tuple) and all(part.get("type") == "text" for part in content):
        changes["content"] = "".join(part["text"] for part in content)
    if calls:
        changes["tool_calls"] = [_normalized_call(call) for call in calls]
    return {**message, **changes}


def _normalized_call(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function", call)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        with contextlib.suppress(msgspec.DecodeError, RecursionError):
            arguments = msgspec.json.decode(arguments)
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def _comparable(message: Message) -> str:
    """What two forms of one message have in common.

    Clients leave out the reasoning and fields that are null or empty, and name calls as they like.
    """
    left_out = {"reasoning_content", "tool_calls"}
    kept = {name: value for name, value in message.items() if value and name not in left_out}
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = [{"name": f.get("name"), "arguments": f["arguments"]} for f in functions]
    return _text({**kept, "tool_calls": calls})


def _text(value: object) -> str:
    return json.dumps(value, sort_keys=True, default=dict)
