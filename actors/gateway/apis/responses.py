"""OpenAI's responses: text and function calls."""

from collections.abc import Iterator, Mapping, Sequence
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
    "background": (False,),
    "conversation": ("",),
    "max_tool_calls": (),
    "prompt": ({},),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
    "text": ({}, {"format": {"type": "text"}}),
    "include": ([], ["reasoning.encrypted_content"]),
    "metadata": (),
    "parallel_tool_calls": (),
    "prompt_cache_key": (),
    "prompt_cache_retention": (),
    "reasoning": (),
    "safety_identifier": (),
    "service_tier": (),
    "store": (),
    "stream_options": (),
    "user": (),
}
_TEXTS = ("input_text", "output_text", "text")
_ROLES = {"developer": "system"}


class _Call(Struct):
    name: str
    call_id: str = ""
    arguments: str = "{}"


class _Output(Struct):
    call_id: str = ""
    output: Any = None


class _Body(Body):
    input: str | list[dict[str, Any]]
    instructions: str = ""
    previous_response_id: str | None = None
    tools: tuple[dict[str, Any], ...] = ()
    max_output_tokens: Integer | None = None


def _read(body: Json, session: Session) -> ApiRequest:
    if isinstance(text := body.get("text"), dict):
        body = {**body, "text": {name: text[name] for name in text if name != "verbosity"}}
    asked = converted(body, _Body, _NEUTRAL)
    system, items = asked.instructions, asked.input
    opening: list[Message] = [{"role": "system", "content": system}] if system else []
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    return asked.request(
        messages=[*opening, *_before(asked, session), *_messages(items)],
        tools=[_tool(tool) for tool in asked.tools],
        max_new_tokens=asked.max_output_tokens,
        num_instructions=len(opening),
    )


def _before(asked: _Body, session: Session) -> Sequence[Message]:
    """The conversation of the response that this request continues, without its instructions."""
    if asked.previous_response_id is None:
        return ()
    number = asked.previous_response_id.removeprefix("resp_")
    if number not in session.answered:
        raise RequestError(
            f"previous_response_id: {asked.previous_response_id!r} is no response of this episode"
        )
    return session.answered[number]


def _tool(tool: Json) -> Json:
    if tool.get("type") != "function":
        raise RequestError(f"tools: has one of type {tool.get('type')!r}; allowed: function")
    function = {
        name: tool[name] for name in ("name", "description", "parameters") if tool.get(name)
    }
    return {"type": "function", "function": function}


def _messages(items: Sequence[Json]) -> list[Message]:
    """The messages of items; consecutive items of the policy form one message."""
    messages: list[Message] = []
    for item in items:
        read = _message(item)
        if read is None:
            continue
        if messages and read["role"] == messages[-1]["role"] == "assistant":
            read = _joined(messages.pop(), read)
        messages.append(read)
    return messages


def _message(item: Json) -> Message | None:
    match item.get("type", "message"):
        case "message":
            role = str(item.get("role"))
            role = _ROLES.get(role, role)
            if role not in ("system", "user", "assistant"):
                raise RequestError(f"input: role was {role!r}; allowed: system, user, assistant")
            return {
                "role": role,
                "content": only_text(item.get("content"), _TEXTS, "input: content"),
            }
        case "function_call":
            made = converted(item, _Call, {})
            function = {"name": made.name, "arguments": made.arguments}
            call = {"id": made.call_id, "type": "function", "function": function}
            return {"role": "assistant", "content": "", "tool_calls": [call]}
        case "function_call_output":
            result = converted(item, _Output, {})
            output = only_text(result.output, _TEXTS, "input: output")
            return {"role": "tool", "tool_call_id": result.call_id, "content": output}
        case "reasoning":
            return None
        case kind:
            raise RequestError(
                f"input: has an item of type {kind!r}; allowed: message, function_call, "
                "function_call_output, reasoning"
            )


def _joined(first: Message, second: Message) -> Message:
    calls = [*first.get("tool_calls", ()), *second.get("tool_calls", ())]
    return {
        "role": "assistant",
        "content": f"{first['content']}{second['content']}",
        **({"tool_calls": calls} if calls else {}),
    }


def _write(answer: Answer) -> Json:
    return {
        **_head(answer),
        "status": "completed" if answer.is_whole else "incomplete",
        "incomplete_details": None if answer.is_whole else {"reason": "max_output_tokens"},
        "output": _items(answer),
        "usage": _usage(answer),
    }


def _head(answer: Answer) -> Json:
    """A response whose output is not there yet."""
    tools = [
        {"type": "function", "strict": False, **tool["function"]} for tool in answer.request.tools
    ]
    return {
        "id": f"resp_{answer.reply.reply_id}",
        "object": "response",
        "created_at": answer.created_s,
        "model": answer.request.model,
        "status": "in_progress",
        "output": [],
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "temperature": answer.session.sampling.temperature,
        "top_p": answer.session.sampling.top_p,
        "tool_choice": "auto",
        "tools": tools,
        "usage": None,
    }


def _items(answer: Answer) -> list[Mapping[str, Any]]:
    said = {
        "id": f"msg_{answer.reply.reply_id}",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": answer.content, "annotations": []}],
    }
    called = [
        {
            "id": f"fc_{answer.reply.reply_id}_{i}",
            "type": "function_call",
            "call_id": call["id"],
            "name": call["function"]["name"],
            "arguments": json_text(call["function"]["arguments"]),
            "status": "completed",
        }
        for i, call in enumerate(answer.calls)
    ]
    return [*([said] if answer.content or not called else []), *called]


def _usage(answer: Answer) -> Json:
    read, sampled = answer.num_tokens
    return {
        "input_tokens": read,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": read + sampled,
    }


def _stream(answer: Answer) -> Iterator[tuple[str, Json]]:
    whole = _write(answer)
    for number, (name, fields) in enumerate(_events(answer, whole)):
        yield name, {"type": name, "sequence_number": number, **fields}


def _events(answer: Answer, whole: Json) -> Iterator[tuple[str, Json]]:
    begun = _head(answer)
    yield "response.created", {"response": begun}
    yield "response.in_progress", {"response": begun}
    for i, item in enumerate(whole["output"]):
        place = {"output_index": i, "item_id": item["id"]}
        is_text = item["type"] == "message"
        empty = {
            **item,
            "status": "in_progress",
            **({"content": []} if is_text else {"arguments": ""}),
        }
        yield "response.output_item.added", {"output_index": i, "item": empty}
        yield from _text_events(item, place) if is_text else _call_events(item, place)
        yield "response.output_item.done", {"output_index": i, "item": item}
    yield f"response.{whole['status']}", {"response": whole}


def _text_events(item: Json, place: Json) -> Iterator[tuple[str, Json]]:
    (part,) = item["content"]
    place = {**place, "content_index": 0}
    yield "response.content_part.added", {**place, "part": {**part, "text": ""}}
    yield "response.output_text.delta", {**place, "delta": part["text"], "logprobs": []}
    yield "response.output_text.done", {**place, "text": part["text"], "logprobs": []}
    yield "response.content_part.done", {**place, "part": part}


def _call_events(item: Json, place: Json) -> Iterator[tuple[str, Json]]:
    arguments = item["arguments"]
    yield "response.function_call_arguments.delta", {**place, "delta": arguments}
    done = {**place, "name": item["name"], "arguments": arguments}
    yield "response.function_call_arguments.done", done


RESPONSES = Api(_read, _write, _stream)
