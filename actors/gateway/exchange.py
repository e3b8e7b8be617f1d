"""One HTTP exchange of the gateway: the body of a request, and answers and refusals as JSON.

Invariant: whatever a client sends is answered, in the form of the API that it speaks.
"""

import json
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import msgspec
from aiohttp import web

from actors.gateway.apis.requests import Json, RequestError
from actors.gateway.session import ContextTooLongError, SessionEndedError
from streamrl.errors import ConfigError, RolloutError, StreamRLError

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

# 409 would say it better, and the clients of both APIs repeat what gets that.
_GONE = 410


def answering(handler: Handler, write_error: Callable[[RequestError], Json]) -> Handler:
    """The handler, whose refusals are answered in this form."""

    async def answer(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except web.HTTPRequestEntityTooLarge as error:
            refusal = RequestError(f"the body is larger than {error.text}", 413)
        except RequestError as error:
            refusal = error
        except StreamRLError as error:
            refusal = _refusal(error)
        except RecursionError:
            refusal = RequestError("the body is nested too deeply")
        return json_answer(write_error(refusal), refusal.status)

    return answer


def _refusal(error: StreamRLError) -> RequestError:
    """
    Raises:
        StreamRLError: it is none that a request leads to.
    """
    match error:
        case SessionEndedError():
            return RequestError(str(error), _GONE, "episode_over")
        case ContextTooLongError():
            return RequestError(str(error), code="context_length_exceeded")
        case ConfigError():
            return RequestError(str(error))
        case RolloutError():
            return RequestError(str(error), 500)
    raise error


def json_answer(content: Any, status: int = 200) -> web.Response:
    """Also of what a prompt's row may hold beside JSON's types, as text."""
    body = msgspec.json.encode(content, enc_hook=str)
    return web.Response(body=body, status=status, content_type="application/json")


async def event_stream(
    request: web.Request, events: Iterable[tuple[str, Json]], end: str
) -> web.StreamResponse:
    """Server-sent events, then the line that ends them. Waits for the client to take them."""
    response = web.StreamResponse(headers={"Cache-Control": "no-cache"})
    response.content_type = "text/event-stream"
    await response.prepare(request)
    for name, data in events:
        line = f"event: {name}\n" if name else ""
        await response.write(f"{line}data: {json.dumps(data, default=str)}\n\n".encode())
    await response.write(end.encode())
    await response.write_eof()
    return response


async def read_object(request: web.Request) -> Json:
    """The JSON object that is the body; {} where there is no body.

    Raises:
        RequestError: it is something else.
    """
    # A page in a browser may post any other type to this machine without asking.
    if request.content_type != "application/json":
        raise RequestError(
            f"Content-Type: was {request.content_type!r}; it must be application/json", 415
        )
    try:
        # Unlike Python's own, this reads no NaN and no half of a surrogate pair.
        body = msgspec.json.decode(await request.read() or b"{}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestError(f"the body is a {type(body).__name__}; it must be an object")
    return body


def key_of(request: web.Request) -> str:
    """The key or token that the request carries, in its path or in the headers of either API."""
    if key := request.match_info.get("key"):
        return key
    scheme, _, credential = request.headers.get("Authorization", "").partition(" ")
    return credential if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
