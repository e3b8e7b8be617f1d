"""OpenAI's chat completions."""

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Struct

from actors.gateway.apis.requests import (
    Answer,
    Api,
    ApiRequest,
    Body,
    Integer,
    Json,
    RequestError,
    converted,
    json_text,
    only_text,
)
from actors.gateway.session import Session
from streamrl.interfaces import Message

# Fields that change nothing if they have these values; with () no value changes anything.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "stop": ([], ""),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "top_logprobs": (0,),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "parallel_tool_calls": (),
    "reasoning_effort": (),
    "verbosity": (),
    "seed": (),
    "user": (),
    "metadata": (),
    "store": (),
    "service_tier": (),
    "prompt_cache_key": (),
    "prompt_cache_retention": (),
    "safety_identifier": (),
}


class _Function(Struct):
    name: str
    arguments: str = "{}"


class _ToolCall(Struct):
    function: _Function
    id: str = ""
    type: str = "function"


class _Message(Struct):
    role: str
    content: Any = None
    name: str | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class _Tool(Struct):
    function: dict[str, Any]
    type: str = "function"


class _StreamOptions(Struct, frozen=True):
    include_usage: bool = False


class _Body(Body):
    messages: list[_Message]
    tools: tuple[_Tool, ...] = ()
    max_tokens: Integer | None = None
    max_completion_tokens: Integer | None = None
    top_k: Integer | None = None
    logprobs: bool = False
    stream_options: _StreamOptions = _StreamOptions()


def _read(body: Json, session: Session) -> ApiRequest:
    asked = converted(body, _Body, _NEUTRAL)
    limit = asked.max_completion_tokens
    return asked.request(
        messages=[_message(message) for message in asked.messages],
        tools=[{"type": "function", "function": tool.function} for tool in asked.tools],
        max_new_tokens=asked.max_tokens if limit is None else limit,
        with_logprobs=asked.logprobs,
        with_usage=asked.stream_options.include_usage,
    )


def _message(message: _Message) -> Message:
    role = "system" if message.role == "developer" else message.role
    if role not in ("system", "user", "assistant", "tool"):
        raise RequestError(f"messages: role was {role!r}; allowed: system, user, assistant, tool")
    content = only_text(message.content, ("text",), "messages: content")
    given = {
        name: value for name, value in msgspec.to_builtins(message).items() if value is not None
    }
    return {**given, "role": role, "content": content}


def _write(answer: Answer) -> Json:
    choice = {
        "index": 0,
        "message": _written(answer),
        "finish_reason": _finish_reason(answer),
        "logprobs": _logprobs(answer),
    }
    return {**_head(answer, "chat.completion"), "choices": [choice], "usage": _usage(answer)}


def _stream(answer: Answer) -> Iterator[tuple[str, Json]]:
    head = _head(answer, "chat.completion.chunk")
    message = dict(_written(answer))
    calls = message.pop("tool_calls", ())
    first = {"index": 0, "delta": message, "finish_reason": None, "logprobs": _logprobs(answer)}
    yield "", {**head, "choices": [first]}
    for i, call in enumerate(calls):
        delta = {"tool_calls": [{"index": i, **call}]}
        yield "", {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    last = {"index": 0, "delta": {}, "finish_reason": _finish_reason(answer)}
    yield "", {**head, "choices": [last]}
    if answer.request.with_usage:
        yield "", {**head, "choices": [], "usage": _usage(answer)}


def _head(answer: Answer, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{answer.reply.reply_id}",
        "object": kind,
        "created": answer.created_s,
        "model": answer.request.model,
    }


def _written(answer: Answer) -> Json:
    calls = [
        {
            "id": call["id"],
            "type": "function",
            "function": {
                "name": call["function"]["name"],
                "arguments": json_text(call["function"]["arguments"]),
            },
        }
        for call in answer.calls
    ]
    reasoning = answer.reply.message.get("reasoning_content")
    return {
        "role": "assistant",
        "content": answer.content or (None if calls else ""),
        **({"reasoning_content": reasoning} if reasoning else {}),
        **({"tool_calls": calls} if calls else {}),
    }


def _finish_reason(answer: Answer) -> str:
    if not answer.is_whole:
        return "length"
    return "tool_calls" if answer.calls else "stop"


def _logprobs(answer: Answer) -> Json | None:
    if not answer.request.with_logprobs:
        return None
    completion, renderer = answer.reply.completion, answer.session.renderer
    token_ids, logprobs = completion.token_ids.tolist(), completion.logprobs.tolist()
    content = [
        {
            "token": renderer.decode([token]),
            "logprob": logprob,
            # Also of a part of a character, which has no text.
            "bytes": None if (known := renderer.bytes_of(token)) is None else list(known),
            "top_logprobs": [],
        }
        for token, logprob in zip(token_ids, logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def _usage(answer: Answer) -> Json:
    read, sampled = answer.num_tokens
    return {"prompt_tokens": read, "completion_tokens": sampled, "total_tokens": read + sampled}


def write_error(error: RequestError) -> Json:
    """The error in the form of OpenAI's APIs."""
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    return {"error": {"message": str(error), "type": kind, "param": None, "code": error.code}}


CHAT = Api(_read, _write, _stream, ends_with="data: [DONE]\n\n")
