"""A chat template, and how it treats messages, which is found by rendering short conversations.

Templates silently leave things out: tool schemas, a tool's result that follows no call, a content
that is a string. Each property is probed once, when it is first needed.

A reply is what a template puts between a completion and the next one. It is found by rendering a
short conversation in which a mark stands for the completion: the mark is the assistant's content
or, if the template renders a tool's result only after a call, the call's argument; the reply is
what follows the mark. So no completion is tokenized again, and a reply follows the tokens as they
were sampled, even if the template would later render them differently (Qwen3's leaves out earlier
thinking).
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import count, takewhile
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from actors.rendering.messages import template_errors
from streamrl.errors import ConfigError
from streamrl.interfaces import Message, ToolSchema
from streamrl.vision.parts import as_template_reads

_MARK, _PROBE = "streamrlcompletion", "streamrlanswer"
_ASKED: Message = {"role": "user", "content": "question"}
_ANSWERED: Message = {"role": "assistant", "content": _MARK}
_RESULT: Message = {"role": "tool", "name": "streamrltool", "content": _PROBE}
PROBED_TOOL: ToolSchema = {
    "type": "function",
    "function": {
        "name": "streamrltool",
        "description": "Answers a question.",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string", "description": "The question."},
                "limit": {"type": "integer", "description": "The longest answer."},
            },
            "required": ["text"],
        },
    },
}
_ARGUMENTS = ({"text": f'a "{_PROBE}" b', "limit": 3}, {"text": _MARK})
_REFUSED = "data.chat_template: it"


@dataclass(frozen=True)
class Reply:
    """The text after a completion that has not ended its turn."""

    text: str
    ending: str
    """The beginning of the text that does not depend on what follows: the end of the turn."""
    is_behind_call: bool = False
    """Whether the ending begins with the end of a call, which the completion has already
    written."""


@dataclass(frozen=True)
class RenderedCalls:
    """A completion that calls tools, as the template renders it."""

    calls: Sequence[Mapping[str, Any]]
    opening: str
    """The text before the completion."""
    completion: str


def rendered(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], **options: Any
) -> str:
    """Render messages by the tokenizer's chat template, or by the `chat_template` in the options.

    Raises:
        ValueError: it cannot render them.
    """
    copies = [dict(message) for message in messages]
    with template_errors():
        return str(tokenizer.apply_chat_template(copies, tokenize=False, **options))


class ChatTemplate:
    """The chat template of a tokenizer (which may have another one for prompts with tools), or the
    text `source`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, source: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._source = source
        self._roles: dict[tuple[str, bool], bool] = {}
        """Whether the template shows a role's messages, and in first place, as far as probed."""

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        place: str = "a conversation",
        *,
        is_open: bool = True,
        is_begun: bool = False,
    ) -> str:
        """Render a conversation, with the opening of the next turn if `is_open`.

        Args:
            is_begun: the last message is the beginning of that turn.

        Raises:
            ConfigError: the template cannot render it; the message names `place`.
        """
        read = as_template_reads(messages)
        if any(message.get("tool_calls") for message in read) and self._wants_json:
            read = _with_json_arguments(read)
        try:
            return self._rendered(
                self._as_read(read),
                tools=[dict(tool) for tool in tools] or None,
                add_generation_prompt=is_open and not is_begun,
                continue_final_message=is_begun,
            )
        except ValueError as error:
            raise ConfigError(f"data.chat_template: it cannot render {place}: {error}") from error

    def reply(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> Reply:
        """
        Raises:
            ConfigError: the template cannot render them, or does not render an assistant's content.
        """
        messages = _with_ids(messages)
        has_results = any(message.get("role") == "tool" for message in messages)
        is_behind_call = has_results and self._place_of_results == "behind calls"
        return self._reply(messages, tools, is_behind_call=is_behind_call)

    def require_replies(self) -> None:
        """Raise ConfigError if the template does not render a user's message after a completion."""
        if _PROBE not in self.reply([{"role": "user", "content": _PROBE}]).text:
            raise ConfigError(
                f"{_REFUSED} does not render a user's message behind an assistant's, so an "
                "environment cannot answer with messages; name a template that does"
            )

    def require_system(self, setting: str) -> None:
        """Raise ConfigError if the template does not render system messages, in which `setting` is
        sent."""
        if not self._has_system:
            raise ConfigError(
                f"{_REFUSED} leaves out messages of the role system, so the policy would not read "
                f"{setting}; name a template that renders them"
            )

    def require_role(self, role: str, *, is_first: bool) -> None:
        """Raise ConfigError if the template leaves out messages of the role in first place, or in
        any other. One that it refuses raises its own error where it is rendered."""
        if (role, is_first) not in self._roles:
            probe = {"role": role, "content": _PROBE}
            order = [probe, _ASKED] if is_first else [_ASKED, probe]
            text = self._probed(*self._as_read(order))
            self._roles[role, is_first] = not text or _PROBE in text
        if not self._roles[role, is_first]:
            later = "" if is_first else " behind the first message"
            raise ConfigError(
                f"{_REFUSED} leaves out messages of the role {role!r}{later}, so the policy would "
                "not read them; name a template that renders them, or another role"
            )

    def require_tool_results(self) -> None:
        """Raise ConfigError if the template renders no tool results, neither after a call nor
        without one."""
        if self._place_of_results == "nowhere":
            raise ConfigError(
                f"{_REFUSED} does not render messages of the role tool, so the policy would not "
                "read what its tools answer; name a template that does"
            )

    @cached_property
    def describes_tools(self) -> bool:
        """Whether the template shows the policy the tools that it may call."""
        with suppress(ConfigError):
            return "streamrltool" in self.render([_ASKED], [PROBED_TOOL])
        return False

    @cached_property
    def _has_system(self) -> bool:
        probe = {"role": "system", "content": _PROBE}
        return _PROBE in self.render([probe, _ASKED], place="a system message")

    @cached_property
    def generation_prompt(self) -> str:
        """The text before a completion; "" if unknown."""
        with suppress(ConfigError):
            return self.render([_ASKED]).removeprefix(self.render([_ASKED], is_open=False))
        return ""

    @cached_property
    def end_of_turn(self) -> str:
        """The text after an assistant's content; "" if unknown."""
        with suppress(ConfigError):
            return self._behind_mark([_ASKED, _ANSWERED], [PROBED_TOOL], is_open=False)
        return ""

    @cached_property
    def rendered_calls(self) -> RenderedCalls | None:
        """Two calls of the probed tool, or one if the template renders no more; None if it renders
        none."""
        for number in (2, 1):
            made = _calling_with(*_ARGUMENTS[:number])
            try:
                asked = self.render([_ASKED], [PROBED_TOOL], is_open=False)
                opened = self.render([_ASKED], [PROBED_TOOL])
                whole = self.render([_ASKED, made], [PROBED_TOOL], is_open=False)
            except ConfigError:
                continue
            if _PROBE not in whole or (number == 2 and _MARK not in whole):
                continue
            opening = opened[: num_shared(opened, whole)]
            if opening != opened:
                # The shared part may end inside a tag that continues differently.
                opening = re.sub(r"<[^<>]*\Z", "", opening)
            return RenderedCalls(
                made["tool_calls"], opening.removeprefix(asked), whole.removeprefix(opening)
            )
        return None

    @cached_property
    def _wants_parts(self) -> bool:
        """Whether the template leaves out a content that is a string, but renders a list of
        parts."""
        asked = {"role": "user", "content": _PROBE}
        return _PROBE not in self._probed(asked) and _PROBE in self._probed(*_in_parts([asked]))

    @cached_property
    def _wants_json(self) -> bool:
        """Whether arguments of calls must be given as JSON text (DeepSeek): the template renders a
        mapping not at all or as Python prints it, and JSON text correctly, not as a Python
        string."""
        arguments = {"text": _PROBE}
        made = _calling_with(arguments)
        text = self._probed(_ASKED, made, tools=[PROBED_TOOL])
        given = self._probed(_ASKED, *_with_json_arguments([made]), tools=[PROBED_TOOL])
        is_lost = _PROBE not in text or str(arguments) in text
        return is_lost and _PROBE in given and repr(json.dumps(arguments)) not in given

    def _as_read(self, messages: Sequence[Message]) -> Sequence[Message]:
        return _in_parts(messages) if self._wants_parts else messages

    def _probed(self, *messages: Message, **options: Any) -> str:
        """Render messages unchanged; "" if the template cannot."""
        with suppress(ValueError):
            return self._rendered(messages, **options)
        return ""

    def _rendered(self, messages: Sequence[Message], **options: Any) -> str:
        return rendered(self._tokenizer, messages, chat_template=self._source, **options)

    @cached_property
    def _place_of_results(self) -> Literal["behind contents", "behind calls", "nowhere"]:
        """Where the template renders a tool's result."""
        for is_behind_call in (False, True):
            try:
                reply = self._reply(
                    _with_ids([_RESULT]), [PROBED_TOOL], is_behind_call=is_behind_call
                )
            except ConfigError:
                continue
            if _PROBE in reply.text:
                return "behind calls" if is_behind_call else "behind contents"
        return "nowhere"

    def _reply(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], *, is_behind_call: bool
    ) -> Reply:
        results = [message for message in messages if message.get("role") == "tool"]
        marked = ((r["tool_call_id"], r.get("name") or "tool", {"text": _MARK}) for r in results)
        turn = _calling(marked) if is_behind_call else _ANSWERED
        text = self._behind_mark([_ASKED, turn, *messages], tools)
        alone = self._behind_mark([_ASKED, turn], tools, is_open=False)
        return Reply(text, text[: num_shared(text, alone)], is_behind_call)

    def _behind_mark(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        *,
        is_open: bool = True,
    ) -> str:
        text = self.render(messages, tools, "a reply", is_open=is_open)
        _, mark, behind = text.rpartition(_MARK)
        if not mark:
            raise ConfigError(
                f"{_REFUSED} does not render an assistant's content, so an environment cannot "
                "answer with messages; name a template that does"
            )
        return behind


def num_shared(first: Sequence[Any], second: Sequence[Any]) -> int:
    """The length of the common beginning of two sequences."""
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def opened_thinking(opening: str) -> str:
    """The part of a turn's opening from its last `<think>` on; "" without one.

    >>> opened_thinking("<|im_start|>assistant\\n<think>\\n")
    '<think>\\n'
    """
    _, tag, behind = opening.rpartition("<think>")
    return tag + behind if tag else ""


def _calling(calls: Iterable[tuple[str, str, Mapping[str, Any]]]) -> Message:
    """An assistant's turn with these calls (id, name of the tool, arguments)."""
    made = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for call_id, name, arguments in calls
    ]
    return {"role": "assistant", "content": "", "tool_calls": made}


def _calling_with(*arguments: Mapping[str, Any]) -> Message:
    """An assistant's turn that calls the probed tool once with each of these arguments."""
    return _calling((f"call{i:05}", "streamrltool", given) for i, given in enumerate(arguments))


def _with_ids(messages: Sequence[Message]) -> list[Message]:
    """Add the id of its call to each tool result: nine letters and digits, as Mistral requires."""
    number = count()
    return [
        {"tool_call_id": f"call{next(number):05}", **message}
        if message.get("role") == "tool"
        else message
        for message in messages
    ]


def _with_json_arguments(messages: Sequence[Message]) -> list[dict[str, Any]]:
    def in_json(call: Mapping[str, Any]) -> Mapping[str, Any]:
        given = call["function"]["arguments"]
        text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        return {**call, "function": {**call["function"], "arguments": text}}

    return [
        {**message, "tool_calls": [*map(in_json, message["tool_calls"])]}
        if message.get("tool_calls")
        else dict(message)
        for message in messages
    ]


def _in_parts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages with every content as a list of parts."""
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message.get("content"), str)
        else dict(message)
        for message in messages
    ]
