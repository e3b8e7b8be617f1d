"""Messages of a conversation in the form that chat templates take. Invariant: the same conversation
has the same form, whichever file or API it came from.

Parquet and Arrow give each record the keys of all others, with null for missing values. A template
that tests for a key would find it, so nulls are left out at every depth. Arguments of tool calls
may be JSON text, as in OpenAI's API; nulls in it were written on purpose and stay.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from jinja2 import TemplateError

from streamrl.interfaces import Message


def normalized(message: Message) -> Message:
    """The message without nulls, text parts joined, arguments of calls as a mapping.

    >>> normalized({"role": "user", "content": [{"type": "text", "text": "a", "image": None}]})
    {'role': 'user', 'content': 'a'}
    >>> normalized({"role": "assistant", "content": "a", "tool_calls": []})
    {'role': 'assistant', 'content': 'a'}
    """
    found: dict[str, Any] = _without_nulls(message)
    content, calls = found.get("content"), found.get("tool_calls")
    if isinstance(content, list) and all(part.get("type") == "text" for part in content):
        found["content"] = "".join(part["text"] for part in content)
    if calls:
        found["tool_calls"] = [_normalized_call(call) for call in calls]
    elif calls is not None:
        # Llama's templates would take an empty list for a call.
        del found["tool_calls"]
    return {**found, "content": found.get("content", "")}


def is_prefill(message: Message) -> bool:
    """Whether the policy continues this message if a prompt ends with it."""
    return message.get("role") == "assistant" and not message.get("tool_calls")


@contextlib.contextmanager
def template_errors() -> Iterator[None]:
    """Turn whatever the rendering of a template raises into a ValueError."""
    try:
        yield
    except Exception as error:
        is_sentence = isinstance(error, TemplateError | TypeError | ValueError | ArithmeticError)
        raise ValueError(str(error) if is_sentence else repr(error)) from error


def _normalized_call(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function", call)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        with contextlib.suppress(msgspec.DecodeError, RecursionError):
            arguments = msgspec.json.decode(arguments)
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [*map(_without_nulls, value)] if isinstance(value, list | tuple) else value
