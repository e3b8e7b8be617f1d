"""The gateway's HTTP server, in the generator's event loop.

    POST /v1/chat/completions, /v1/responses, /v1/messages, GET /v1/models
                          with an episode's key as the API's key
    /sessions...          see `actors.gateway.task_routes`

Every route of an API is also below /sessions/KEY, for clients whose key cannot be set. A request
whose client goes away is canceled, and its slot in the engine is free.
"""

import errno
import time
from collections.abc import Mapping, Sequence
from functools import partial

from aiohttp import web

from actors.gateway.apis.anthropic_messages import MESSAGES
from actors.gateway.apis.chat import CHAT, write_error
from actors.gateway.apis.requests import Answer, Api, RequestError
from actors.gateway.apis.responses import RESPONSES
from actors.gateway.exchange import answering, event_stream, json_answer, read_object
from actors.gateway.open_episodes import OpenEpisodes
from actors.gateway.sampling import RequestSampling
from actors.gateway.stranger_log import server_log
from actors.gateway.task_routes import find
from streamrl.config.generator.agent import AgentSettings
from streamrl.errors import ConfigError, TransportError

_APIS: Mapping[str, Api] = {
    "/v1/chat/completions": CHAT,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
}
# Of one episode at a time; clients repeat what is refused by it.
_MAX_IN_FLIGHT = 256
# For requests in flight at the end, which aiohttp waits for twice; by itself for a minute.
_CLOSE_S = 1.0


class GatewayServer:
    """Serves the open episodes."""

    def __init__(
        self,
        settings: AgentSettings,
        episodes: OpenEpisodes,
        routes: Sequence[web.RouteDef],
        model: str,
    ) -> None:
        """
        Args:
            routes: beside those of the APIs.
            model: the name under which the policy is listed.
        """
        self._settings = settings
        self._episodes = episodes
        self._model = model
        self._sampling = RequestSampling(settings.request_sampling)
        self._runner: web.AppRunner | None = None
        application = web.Application(client_max_size=settings.max_request_bytes)
        application.add_routes(routes)
        for prefix in ("", "/sessions/{key}"):
            for path, api in _APIS.items():
                handler = answering(partial(self._complete, api), api.write_error)
                application.router.add_post(f"{prefix}{path}", handler)
            listing = answering(self._list_models, write_error)
            application.router.add_get(f"{prefix}/v1/models", listing)
        self._application = application

    async def start(self, num_ports: int) -> str:
        """Listens at the first free one of so many ports; its URL.

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
        host, first = self._settings.host, self._settings.port
        for port in range(first, first + (num_ports if first else 1)):
            try:
                await web.TCPSite(runner, host, port).start()
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise ConfigError(f"generator.agent.host: {error.strerror}") from error
            else:
                return f"http://{_bracketed(host)}:{runner.addresses[0][1]}"
        raise TransportError(
            f"generator.agent.port: other processes listen at {first} to {port}; 0 takes a free one"
        )

    async def close(self) -> None:
        """Stops listening; requests are canceled."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _complete(self, api: Api, request: web.Request) -> web.StreamResponse:
        """Waits for the engine."""
        session = find(self._episodes, request).session
        if session.num_in_flight >= _MAX_IN_FLIGHT:
            raise RequestError(f"the episode has {_MAX_IN_FLIGHT} requests in flight", 429)
        asked = api.read(await read_object(request), session)
        sampling = self._sampling.of(asked, session.sampling)
        reply = await session.complete(
            asked.messages, asked.tools, sampling, num_instructions=asked.num_instructions
        )
        answer = Answer(asked, reply, session, int(time.time()))
        if asked.is_streamed:
            return await event_stream(request, api.stream(answer), api.ends_with)
        return json_answer(api.write(answer))

    async def _list_models(self, request: web.Request) -> web.Response:
        find(self._episodes, request)
        model = {
            "id": self._model,
            "object": "model",
            "type": "model",
            "display_name": self._model,
            "created": 0,
            "created_at": "1970-01-01T00:00:00Z",
            "owned_by": "streamrl",
        }
        ends = {"has_more": False, "first_id": self._model, "last_id": self._model}
        return json_answer({"object": "list", "data": [model], **ends})


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
