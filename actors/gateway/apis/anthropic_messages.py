"""Anthropic's messages."""

from collections.abc import Iterator, Mapping
from typing import Any

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

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "stop_sequences": ([],),
    "thinking": (),
    "mcp_servers": ([],),
    "metadata": (),
    "service_tier": (),
    "cache_control": (),
    "inference_geo": (),
    "context_management": (),
    "output_config": ({},),
    "speed": (),
}
# Claude Code begins its instructions with a block about its accounts, which differs in every
# request, so with it no conversation would extend an earlier one.
_ABOUT_ACCOUNTS = "x-anthropic-"
# With this code, the loop of Anthropic's client asks again without a thread.
_UNTHREADED = "thread_unsupported_request"
# Blocks of an answer that the policy is not shown.
_THOUGHTS = ("thinking", "redacted_thinking")
_ERRORS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


class _Message(Struct):
    role: str
    content: str | list[dict[str, Any]]


class _ToolUse(Struct):
    name: str
    id: str = ""
    input: dict[str, Any] = {}


class _ToolResult(Struct):
    tool_use_id: str = ""
    content: Any = None


class _Tool(Struct):
    name: str
    input_schema: dict[str, Any] | None = None
    description: str = ""
    type: str = "custom"


class _Body(Body):
    max_tokens: Integer
    messages: list[_Message]
    system: str | list[dict[str, Any]] = ""
    tools: tuple[_Tool, ...] = ()
    top_k: Integer | None = None


def _read(body: Json, session: Session) -> ApiRequest:
    if isinstance(config := body.get("output_config"), dict):
        said = {name: value for name, value in config.items() if value is not None}
        said.pop("effort", None)
        body = {**body, "output_config": said}
    if body.get("thread") is not None:
        sentence = "thread: conversations are not kept here; send all messages, without it"
        raise RequestError(sentence, code=_UNTHREADED)
    asked = converted(body, _Body, _NEUTRAL)
    system = _instructions(asked.system)
    opening: list[Message] = [{"role": "system", "content": system}] if system else []
    messages = [read for message in asked.messages for read in _messages(message)]
    tools = [_tool(tool) for tool in asked.tools]
    return asked.request([*opening, *messages], tools, asked.max_tokens)


def _instructions(system: str | list[dict[str, Any]]) -> str:
    if isinstance(system, list):
        system = [b for b in system if not str(b.get("text")).startswith(_ABOUT_ACCOUNTS)]
    return only_text(system, ("text",), "system")


def _tool(tool: _Tool) -> Mapping[str, Any]:
    if tool.type != "custom" or tool.input_schema is None:
        raise RequestError(
            f"tools: {tool.name} is of type {tool.type!r}, which is served by Anthropic alone; "
            "allowed: custom, with an input_schema"
        )
    described = {"description": tool.description} if tool.description else {}
    function = {"name": tool.name, **described, "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _messages(message: _Message) -> Iterator[Message]:
    """Yield the tool results of a message first, each as its own message; then the rest."""
    if message.role not in ("user", "assistant"):
        # Claude Code looks for these words, and then asks again without system messages.
        raise RequestError(
            f"messages: role {message.role!r} is not supported; allowed: user, assistant"
        )
    blocks = message.content
    if isinstance(blocks, str):
        yield {"role": message.role, "content": blocks}
        return
    results = [converted(b, _ToolResult, {}) for b in blocks if b.get("type") == "tool_result"]
    uses = [converted(b, _ToolUse, {}) for b in blocks if b.get("type") == "tool_use"]
    apart = ("tool_result", "tool_use", *_THOUGHTS)
    said = [block for block in blocks if block.get("type") not in apart]
    for result in results:
        content = only_text(result.content, ("text",), "messages: tool_result: content")
        yield {"role": "tool", "tool_call_id": result.tool_use_id, "content": content}
    if said or uses or not results:
        content = only_text(said, ("text",), "messages: content")
        called_by = {"tool_calls": [*map(_call, uses)]} if uses else {}
        yield {"role": message.role, "content": content, **called_by}


def _call(use: _ToolUse) -> Json:
    # As text, so that nulls that the policy wrote stay.
    function = {"name": use.name, "arguments": json_text(use.input)}
    return {"id": use.id, "type": "function", "function": function}


def _write(answer: Answer) -> Json:
    return {
        "id": f"msg_{answer.reply.reply_id}",
        "type": "message",
        "role": "assistant",
        "model": answer.request.model,
        "content": _blocks(answer),
        "stop_reason": _stop_reason(answer),
        "stop_sequence": None,
        "usage": _usage(answer),
    }


def _blocks(answer: Answer) -> list[Json]:
    calls = [
        {
            "type": "tool_use",
            "id": call["id"],
            "name": call["function"]["name"],
            "input": call["function"]["arguments"],
        }
        for call in answer.calls
    ]
    is_said = answer.content or not calls
    return [*([{"type": "text", "text": answer.content}] if is_said else []), *calls]


def _stop_reason(answer: Answer) -> str:
    if not answer.is_whole:
        return "max_tokens"
    return "tool_use" if answer.calls else "end_turn"


def _usage(answer: Answer) -> Json:
    read, sampled = answer.num_tokens
    return {"input_tokens": read, "output_tokens": sampled}


def _stream(answer: Answer) -> Iterator[tuple[str, Json]]:
    whole = _write(answer)
    begun = {
        **whole,
        "content": [],
        "stop_reason": None,
        "usage": {**_usage(answer), "output_tokens": 0},
    }
    yield _event("message_start", message=begun)
    for i, block in enumerate(whole["content"]):
        if block["type"] == "text":
            empty = {**block, "text": ""}
            delta = {"type": "text_delta", "text": block["text"]}
        else:
            empty = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json_text(block["input"])}
        yield _event("content_block_start", index=i, content_block=empty)
        yield _event("content_block_delta", index=i, delta=delta)
        yield _event("content_block_stop", index=i)
    end = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    yield _event("message_delta", delta=end, usage=_usage(answer))
    yield _event("message_stop")


def _event(name: str, **fields: Any) -> tuple[str, Json]:
    return name, {"type": name, **fields}


def write_error(error: RequestError) -> Json:
    server = "api_error" if error.status >= 500 else "invalid_request_error"
    details = {"details": {"error_code": error.code}} if error.code else {}
    return {
        "type": "error",
        "error": {"type": _ERRORS.get(error.status, server), "message": str(error), **details},
    }


MESSAGES = Api(_read, _write, _stream)
