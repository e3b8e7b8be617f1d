"""The gateway's HTTP server, in the generator's event loop.

    POST /v1/chat/completions, /v1/responses, /v1/messages, GET /v1/models
                                with an episode's key as the API's key, or below /sessions/KEY
    POST /sessions              take a task: {"agent": name, "wait_s": 30}; 204 if there is none
    GET /sessions/KEY           the task
    DELETE /sessions/KEY        give the task up: its group fails
    POST /sessions/KEY/reward   close the episode: {"reward": 1.0, "metrics": {}}

Invariant: whatever a client sends is answered, in the form of the client's API. If a client goes
away, its request is canceled and its slot in the engine freed.

Of the sampling, a request can change only the number of tokens, downwards: the learner computes
log-probabilities at `generator.temperature`, so a completion at another temperature would be
off-policy from the first step.
"""

import errno
import hmac
import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler
from msgspec import Struct, structs

from actors.gateway.agent import AgentResult
from actors.gateway.apis import anthropic_messages, chat
from actors.gateway.apis.requests import Answer, Api, ApiRequest, Json, RequestError, converted
from actors.gateway.apis.responses import RESPONSES
from actors.gateway.open_episodes import OpenEpisode, OpenEpisodes
from actors.gateway.session import ContextTooLongError, SessionEndedError
from streamrl.config.addresses import url_host
from streamrl.config.generator import AgentSettings
from streamrl.errors import ConfigError, LostAgentError, RolloutError, TransportError
from streamrl.types import SamplingParams

# 409 would fit better, but clients of both APIs repeat requests that get it.
_GONE = 410


@web.middleware
async def answering(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Run the handler; answer its refusals in the form of the API."""
    allowed: Mapping[str, str] = {}
    try:
        return await handler(request)
    except web.HTTPRequestEntityTooLarge as error:
        refusal = RequestError(f"the body is too large: {error.text}", 413)
    except web.HTTPException as error:
        # There is no such path, or it does not take this method.
        refusal = RequestError(f"{request.method} {request.path} is not served", error.status)
        allowed = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
    except RequestError as error:
        refusal = error
    except SessionEndedError as error:
        refusal = RequestError(str(error), _GONE, "episode_over")
    except ContextTooLongError as error:
        refusal = RequestError(str(error), code="context_length_exceeded")
    except ConfigError as error:
        refusal = RequestError(str(error))
    except RolloutError as error:
        refusal = RequestError(str(error), 500)
    except RecursionError:
        refusal = RequestError("the body is nested too deeply")
    is_anthropic = "/v1/messages" in request.path
    form = anthropic_messages.write_error if is_anthropic else chat.write_error
    return json_answer(form(refusal), refusal.status, allowed)


def json_answer(
    content: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    """An answer in JSON; values of a row that JSON lacks become text."""
    body = msgspec.json.encode(content, enc_hook=str)
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)


async def event_stream(
    request: web.Request, events: Iterable[tuple[str, Json]], end: str
) -> web.StreamResponse:
    """Send server-sent events, then the line that ends them. Waits for the client to take them."""
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
    """The JSON object in the body; {} without a body.

    Raises:
        RequestError: the body is something else.
    """
    # A web page may post certain other types to this machine without asking.
    if request.content_type != "application/json":
        raise RequestError(
            f"Content-Type: was {request.content_type!r}; it must be application/json", 415
        )
    try:
        # Unlike Python's json, this accepts neither NaN nor lone surrogates.
        body = msgspec.json.decode(await request.read() or b"{}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is no JSON: {error}") from error
    except web.RequestPayloadError as error:
        encoding = request.headers.get("Content-Encoding")
        raise RequestError(f"the body cannot be read as Content-Encoding {encoding!r}") from error
    if not isinstance(body, dict):
        raise RequestError(f"the body is a {type(body).__name__}; it must be an object")
    return body


def credential_of(request: web.Request) -> str:
    """The key or token that the request carries, in its path or in the headers of either API."""
    if key := request.match_info.get("key"):
        return key
    scheme, _, credential = request.headers.get("Authorization", "").partition(" ")
    return credential if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")


LOG_S = 10.0


class StrangerFilter(logging.Filter):
    """Logs requests that are no HTTP with one line per LOG_S at most, without aiohttp's traceback
    and without the bytes, which may contain an episode's key."""

    def __init__(self) -> None:
        super().__init__()
        self._logged_s = -LOG_S
        self._num_refused = 0

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, web.RequestPayloadError):
            error = error.__cause__
        if not isinstance(error, HttpProcessingError):
            return True
        self._num_refused += 1
        now_s = time.monotonic()
        if now_s - self._logged_s < LOG_S:
            return False
        self._logged_s = now_s
        reason = error.message.partition("\n")[0].rstrip(":")
        record.msg = f"refused a request that is no HTTP: {reason} ({self._num_refused} so far)"
        record.args = ()
        record.exc_info = record.exc_text = None
        record.levelno, record.levelname = logging.WARNING, "WARNING"
        return True


def server_log() -> logging.Logger:
    log = logging.Logger(__name__)
    log.parent = logging.getLogger("actors.gateway")
    log.addFilter(StrangerFilter())
    return log


log = logging.getLogger(__name__)

_MAX_WAIT_S = 300.0


class _Take(Struct, forbid_unknown_fields=True):
    agent: str = "an agent"
    wait_s: float = 30.0


class _Close(Struct, forbid_unknown_fields=True):
    reward: float | None = None
    metrics: dict[str, float] = {}


_APIS: Mapping[str, Api] = {
    "/v1/chat/completions": chat.CHAT,
    "/v1/responses": RESPONSES,
    "/v1/messages": anthropic_messages.MESSAGES,
}
# The most requests of one episode at a time; clients repeat a request that this limit refuses.
_MAX_IN_FLIGHT = 256
# How long aiohttp waits at the end for requests in flight, twice; its default is a minute.
_CLOSE_S = 1.0


@dataclass(eq=False)
class GatewayServer:
    """Serves the open episodes and, if agents ask for tasks, the offered ones."""

    settings: AgentSettings
    episodes: OpenEpisodes
    task_of: Callable[[OpenEpisode], Json]
    """Makes the task that an agent gets for its episode."""
    _: KW_ONLY
    is_pulled: bool
    """Whether agents ask for tasks, instead of being started with one."""
    model: str
    """The name under which the policy is listed."""

    def __post_init__(self) -> None:
        self._token = self.settings.token
        self._overridden: frozenset[str] = frozenset()
        self._runner: web.AppRunner | None = None
        application = web.Application(
            client_max_size=self.settings.max_request_bytes, middlewares=[answering]
        )
        router = application.router
        router.add_post("/sessions", self._take)
        router.add_get("/sessions/{key}", self._read)
        router.add_delete("/sessions/{key}", self._give_up)
        router.add_post("/sessions/{key}/reward", self._close)
        for prefix in ("", "/sessions/{key}"):
            for path, api in _APIS.items():
                router.add_post(f"{prefix}{path}", partial(self._complete, api))
            router.add_get(f"{prefix}/v1/models", self._list_models)
        self._application = application

    async def start(self, num_ports: int) -> str:
        """Listen at the first free one of `num_ports` ports; return the URL.

        Raises:
            ConfigError: this machine has no such address.
            TransportError: other processes have the ports.
        """
        runner = web.AppRunner(
            self._application,
            handler_cancellation=True,
            shutdown_timeout=_CLOSE_S,
            access_log=None,
            logger=server_log(),
        )
        await runner.setup()
        self._runner = runner
        host, first = self.settings.host, self.settings.port
        for port in range(first, first + (num_ports if first else 1)):
            try:
                await web.TCPSite(runner, host, port).start()
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise ConfigError(f"generator.agent.host: {error.strerror}") from error
            else:
                return f"http://{url_host(host)}:{runner.addresses[0][1]}"
        raise TransportError(
            f"generator.agent.port: other processes listen at {first} to {port}; 0 takes a free one"
        )

    async def close(self) -> None:
        """Stop listening; cancel requests."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _take(self, request: web.Request) -> web.Response:
        """Give an agent a task. Waits for one as long as the agent asks for."""
        # A header may contain bytes that are no text.
        key = credential_of(request).encode(errors="surrogateescape")
        if self._token and not hmac.compare_digest(key, self._token.encode()):
            raise RequestError("a task needs the token: Authorization: Bearer TOKEN", 401)
        if not self.is_pulled:
            raise RequestError(
                "generator.agent starts its agents itself: without function and command, agents "
                "ask for tasks"
            )
        asked = converted(await read_object(request), _Take, {})
        if not 0 <= asked.wait_s <= _MAX_WAIT_S:
            raise RequestError(
                f"wait_s: was {asked.wait_s:g}; it must be from 0 to {_MAX_WAIT_S:g}"
            )
        episode = await self.episodes.take(f"agent {asked.agent!r}", asked.wait_s)
        return web.Response(status=204) if episode is None else json_answer(self.task_of(episode))

    async def _read(self, request: web.Request) -> web.Response:
        return json_answer(self.task_of(self._found(request)))

    async def _give_up(self, request: web.Request) -> web.Response:
        episode = self._found(request)
        episode.fail(LostAgentError(f"{episode.agent} gave up ({episode.place})"))
        return json_answer({})

    async def _close(self, request: web.Request) -> web.Response:
        episode = self._found(request)
        closed = converted(await read_object(request), _Close, {})
        if closed.reward is None and episode.needs_reward:
            raise RequestError("reward: is missing, and data.reward is environment")
        values = {"reward": closed.reward or 0.0, **closed.metrics}
        for name, value in values.items():
            if not math.isfinite(value):
                raise RequestError(f"{name}: was {value}; it must be finite")
        episode.close(AgentResult(closed.reward, closed.metrics))
        return json_answer({})

    async def _complete(self, api: Api, request: web.Request) -> web.StreamResponse:
        """Answer a request for a completion. Waits for the engine."""
        session = self._found(request).session
        if len(session.handles) >= _MAX_IN_FLIGHT:
            raise RequestError(f"the episode has {_MAX_IN_FLIGHT} requests in flight", 429)
        asked = api.read(await read_object(request), session)
        sampling = self._sampling_of(asked, session.sampling)
        reply = await session.complete(
            asked.messages, asked.tools, sampling, num_instructions=asked.num_instructions
        )
        answer = Answer(asked, reply, session, int(time.time()))
        if asked.is_streamed:
            return await event_stream(request, api.stream(answer), api.ends_with)
        return json_answer(api.write(answer))

    def _sampling_of(self, asked: ApiRequest, run: SamplingParams) -> SamplingParams:
        """How the request is sampled; each overridden setting is logged once."""
        for name, value in asked.sampling.items():
            if value is None or value == (own := getattr(run, name)):
                continue
            if self.settings.request_sampling == "refuse":
                raise RequestError(
                    f"{name}: was {value:g}, and generator.{name} is {own:g}; leave it out, or set "
                    "generator.agent.request_sampling to override"
                )
            if name not in self._overridden:
                self._overridden |= {name}
                log.warning(
                    "an agent asks for %s %g; all are sampled with generator.%s, which is %g",
                    *(name, value, name, own),
                )
        if asked.max_new_tokens is None:
            return run
        if asked.max_new_tokens < 1:
            raise RequestError(f"max_tokens: was {asked.max_new_tokens}; it must be 1 or more")
        return structs.replace(run, max_new_tokens=min(asked.max_new_tokens, run.max_new_tokens))

    def _found(self, request: web.Request) -> OpenEpisode:
        """The episode whose key the request carries."""
        try:
            return self.episodes.find(credential_of(request))
        except KeyError:
            raise RequestError("no episode has this API key", 401, "invalid_api_key") from None

    async def _list_models(self, request: web.Request) -> web.Response:
        """List the model, in a form that fits both APIs."""
        self._found(request)
        name = self.model
        openai = {"object": "model", "created": 0, "owned_by": "streamrl"}
        anthropic = {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
        ends = {"has_more": False, "first_id": name, "last_id": name}
        models = [{"id": name, **openai, **anthropic}]
        return json_answer({"object": "list", "data": models, **ends})
