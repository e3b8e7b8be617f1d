"""What a completion says: its content, its reasoning and its tool calls, by transformers' parser.

    hermes         <tool_call>{"name": ..., "arguments": {...}}</tool_call>: Qwen2 to Qwen3, Hermes
    qwen3_coder    <tool_call><function=NAME><parameter=KEY>VALUE...: Qwen3-Coder, Qwen3.5
    llama3         {"name": ..., "parameters": {...}} as the whole answer: Llama 3.1 to 3.3
    mistral        [TOOL_CALLS][{"name": ..., "arguments": {...}}]

Each is a response template of `transformers.utils.chat_parsing`. A tokenizer that brings its own
is parsed by that. A new convention is a template and a line in `CONVENTIONS`.
"""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_parsing import parse_response
from transformers.utils.chat_parsing.response_templates import (
    ResponseTemplate,
    load_response_template,
)

from streamrl.errors import ConfigError, did_you_mean
from streamrl.interfaces import Message, ToolSchema

_THINKING = {"open": "<think>", "close": "</think>", "repeats": True, "join": "\n"}
_REST = {"repeats": True, "join": "", "content_args": {"strip": False}}


def _template(calls: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of a convention with these tool calls; the rest of a completion is content."""
    return {
        "start_anchor_pattern": r"\A",
        "fields": {
            "reasoning_content": _THINKING,
            "tool_calls": {"repeats": True, "content": "json", **calls},
            "content": _REST,
        },
    }


CONVENTIONS: Mapping[str, Mapping[str, Any]] = {
    "hermes": _template(
        {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "transform": {"type": "function", "function": "{content}"},
        }
    ),
    "qwen3_coder": _template(
        {
            "open_pattern": r"<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"
            },
            "transform": {
                "type": "function",
                "function": {"name": "{name}", "arguments": "{content}"},
            },
        }
    ),
    "llama3": _template(
        {
            "open_pattern": r"\A\s*(?:<\|python_tag\|>\s*)?(?=\{\s*\"name\")",
            "transform": {
                "type": "function",
                "function": {"name": "{content.name}", "arguments": "{content.parameters}"},
            },
        }
    ),
    "mistral": _template(
        {
            "open": "[TOOL_CALLS]",
            "repeats": False,
            "transform": {
                "type": "function",
                "function": {"name": "{name}", "arguments": "{arguments}"},
            },
            "transform_each": True,
        }
    ),
}


class MessageParser:
    """The parser of one tokenizer and chat template.

    Raises:
        ConfigError: `data.tool_parser` names nothing, or a file that is no response template.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, chat_template: str | None, choice: str
    ) -> None:
        self._tokenizer = tokenizer
        self._template = _choose(tokenizer, chat_template or "", choice)
        self._end_ids = frozenset(tokenizer.all_special_ids)
        # A completion is decoded as a message and for its reward, and siblings may be alike.
        self.decode = lru_cache(maxsize=256)(self._decoded)

    @property
    def knows_tool_calls(self) -> bool:
        return self._template is not None and "tool_calls" in self._template.fields

    def parse(
        self, token_ids: Sequence[int], tools: Sequence[ToolSchema], generation_prompt: str
    ) -> Message:
        """The assistant's message; see `Renderer.parse`.

        Args:
            generation_prompt: what the chat template puts in front of a completion, of which an
                opened `<think>` belongs to the message.
        """
        text = self.decode(self.without_end(token_ids))
        if self._template is None:
            return {"role": "assistant", "content": text}
        _, opened, behind = generation_prompt.rpartition("<think>")
        try:
            parsed = parse_response(
                text,
                self._template,
                prefix=generation_prompt if self._is_own else opened + behind * bool(opened),
                tools=[dict(tool) for tool in tools],
            )
        except (ValueError, KeyError, RecursionError) as error:
            return {"role": "assistant", "content": text, "parse_error": _first_line(error)}
        return _message(parsed, text)

    @property
    def _is_own(self) -> bool:
        """Whether the template is the tokenizer's, which finds the message in the prompt itself."""
        return self._template is not None and self._template.start_anchor_re.pattern != r"\A"

    def without_end(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Without the special tokens at the end; others may be a call's."""
        length = len(token_ids)
        while length and token_ids[length - 1] in self._end_ids:
            length -= 1
        return tuple(token_ids[:length])

    def _decoded(self, token_ids: tuple[int, ...]) -> str:
        """With special tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))


def _message(parsed: Mapping[str, Any], text: str) -> Message:
    """In the form that chat templates read, or with the reason why its calls cannot be run."""
    calls = parsed.get("tool_calls") or []
    calls = calls if isinstance(calls, list) else [calls]
    for call in calls:
        if error := _error_of(call):
            return {"role": "assistant", "content": text, "parse_error": error}
    message = {"role": "assistant", "content": str(parsed.get("content") or "").strip()}
    if reasoning := parsed.get("reasoning_content") or parsed.get("thinking"):
        message |= {"reasoning_content": reasoning}
    return {**message, "tool_calls": calls} if calls else message


def _error_of(call: Any) -> str:
    """What keeps a parsed call from being one; "" for nothing."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return "a tool call has no name"
    if not isinstance(function.get("arguments"), dict):
        return f"the arguments of the call of {function['name']!r} are no JSON object"
    try:
        json.dumps(function, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        return f"the call of {function['name']!a} is no valid Unicode: {error.reason}"
    return ""


def _choose(
    tokenizer: PreTrainedTokenizerBase, chat_template: str, choice: str
) -> ResponseTemplate | None:
    if choice == "auto":
        own = getattr(tokenizer, "response_template", None)
        name = _recognized(chat_template)
        template = own if own is not None else CONVENTIONS.get(name or "")
        return None if template is None else load_response_template(dict(template))
    if choice.endswith(".json"):
        return _load(Path(choice))
    if choice not in CONVENTIONS:
        hint = did_you_mean(choice, ("auto", *CONVENTIONS))
        raise ConfigError(f"data.tool_parser: was {choice!r}; PATH.json or {hint}")
    return load_response_template(dict(CONVENTIONS[choice]))


def _recognized(chat_template: str) -> str | None:
    """The convention whose marks a chat template has."""
    if "<tool_call>" in chat_template:
        return "qwen3_coder" if "<function=" in chat_template else "hermes"
    if "[TOOL_CALLS]" in chat_template:
        return "mistral"
    is_llama = "<|start_header_id|>" in chat_template and '"parameters"' in chat_template
    return "llama3" if is_llama else None


def _load(path: Path) -> ResponseTemplate:
    try:
        return load_response_template(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"data.tool_parser: {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(
            f"data.tool_parser: {path} is no response template of transformers: {error}"
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
