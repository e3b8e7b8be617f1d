"""What the APIs share: a request as the session takes it, its answer and its refusal."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Struct

from actors.gateway.session import PolicyReply, Session
from streamrl.interfaces import Message, ToolSchema
from streamrl.types import FinishReason

Json = Mapping[str, Any]
Form = TypeVar("Form")
SAMPLING = ("temperature", "top_p", "top_k")
Integer = Annotated[int, msgspec.Meta(ge=-(2**53), le=2**53)]
"""An integer that every JSON reader represents exactly."""


class RequestError(Exception):
    """A request is refused, with this HTTP status and the API's code, if there is one."""

    def __init__(self, sentence: str, status: int = 400, code: str | None = None) -> None:
        super().__init__(sentence)
        self.status = status
        self.code = code


@dataclass(frozen=True)
class ApiRequest:
    messages: Sequence[Message]
    tools: Sequence[ToolSchema]
    max_new_tokens: int | None
    sampling: Mapping[str, float | None]
    """`temperature`, `top_p` and `top_k`, each None if it was left out."""
    model: str
    is_streamed: bool
    with_logprobs: bool = False
    with_usage: bool = False
    """Whether a stream ends with its numbers of tokens."""
    num_instructions: int = 0
    """How many of the first messages do not belong to the conversation that a later request
    names."""


@dataclass(frozen=True)
class Answer:
    """The policy's answer to a request."""

    request: ApiRequest
    reply: PolicyReply
    session: Session
    created_s: int

    @property
    def content(self) -> str:
        return self.reply.message.get("content") or ""

    @property
    def calls(self) -> Sequence[Json]:
        return self.reply.message.get("tool_calls") or ()

    @property
    def is_whole(self) -> bool:
        return self.reply.completion.finish_reason is FinishReason.STOP

    @property
    def num_tokens(self) -> tuple[int, int]:
        """Numbers of tokens read and sampled."""
        return self.reply.num_prompt_tokens, len(self.reply.completion.token_ids)


def json_text(value: Any) -> str:
    """A call's arguments as JSON text, as the APIs send them."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


@dataclass(frozen=True)
class Api:
    """One API, which has one route."""

    read: Callable[[Json, Session], ApiRequest]
    """Reads a request; raises RequestError."""
    write: Callable[[Answer], Json]
    stream: Callable[[Answer], Iterable[tuple[str, Json]]]
    """The events of a stream, each with its name, or "" if the API does not name events."""
    ends_with: str = ""
    """The line after the last event."""


class Body(Struct, kw_only=True, forbid_unknown_fields=True):
    """What a request to any of the APIs may contain besides messages and tools."""

    model: str = ""
    tool_choice: Any = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool = False

    def request(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema],
        max_new_tokens: int | None,
        **more: Any,
    ) -> ApiRequest:
        """
        Args:
            more: further fields of the request.

        Raises:
            RequestError: the policy cannot answer these messages, or use these tools.
        """
        if not messages:
            raise RequestError("messages: is empty; there must be one at least")
        if messages[-1].get("role") == "assistant":
            raise RequestError(
                "messages: the last one is the assistant's; going on with it is not supported"
            )
        return ApiRequest(
            messages=messages,
            tools=_offered(tools, self.tool_choice),
            max_new_tokens=max_new_tokens,
            sampling={name: getattr(self, name, None) for name in SAMPLING},
            model=self.model,
            is_streamed=self.stream,
            **more,
        )


def converted(body: Json, form: type[Form], neutral: Mapping[str, Sequence[Any]]) -> Form:
    """The body as the form, without fields that would change nothing.

    Args:
        neutral: fields outside the form, each with the values for which it has no effect; () means
            any value.

    Raises:
        RequestError: a field is unknown, has the wrong type, or asks for something unsupported.
    """
    for name, allowed in neutral.items():
        value = body.get(name)
        # In Python true equals 1, and false 0.
        alike = [one for one in allowed if isinstance(one, bool) == isinstance(value, bool)]
        if allowed and value is not None and value not in alike:
            raise RequestError(f"{name}: was {value!r:.60}, which is not supported; leave it out")
    left = {name: value for name, value in body.items() if name not in neutral}
    given = {name: value for name, value in left.items() if value is not None}
    try:
        return msgspec.convert(given, form)
    except msgspec.ValidationError as error:
        raise RequestError(f"{str(error).replace('$.', '')}") from error


def only_text(parts: Any, kinds: Sequence[str], place: str) -> str:
    """The text of a message's content, which is a string or a list of parts of these kinds.

    Raises:
        RequestError: a part is of another kind.
    """
    if parts is None or isinstance(parts, str):
        return parts or ""
    if not isinstance(parts, list):
        raise RequestError(f"{place}: was {type(parts).__name__}; it must be a string or a list")
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in kinds or not isinstance(part.get("text"), str):
            raise RequestError(f"{place}: has a part of type {kind!r}; allowed: {', '.join(kinds)}")
    return "".join(part["text"] for part in parts)


def _offered(tools: Sequence[ToolSchema], choice: Any) -> Sequence[ToolSchema]:
    """The tools that the policy is shown. A choice that forces a call is refused, since it cannot
    be sampled."""
    if not all(isinstance(tool["function"].get("name"), str) for tool in tools):
        raise RequestError("tools: has a function without a name")
    kind = choice.get("type") if isinstance(choice, dict) else choice
    match kind:
        case None | "auto":
            return tools
        case "none":
            return ()
        case _:
            raise RequestError(f"tool_choice: was {kind!r}; allowed: auto, none")
