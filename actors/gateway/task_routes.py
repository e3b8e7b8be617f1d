"""How an agent of any language gets a task and closes its episode.

POST /sessions              take a task: {"agent": name, "wait_s": 30}; 204 if there is none
GET /sessions/KEY           the task
DELETE /sessions/KEY        give it up: its group fails
POST /sessions/KEY/reward   close the episode: {"reward": 1.0, "metrics": {}}
"""

import hmac
import math
from collections.abc import Callable, Mapping

from aiohttp import web
from msgspec import Struct

from actors.gateway.agent import AgentResult
from actors.gateway.apis.chat import write_error
from actors.gateway.apis.requests import Json, RequestError, converted
from actors.gateway.exchange import Handler, answering, json_answer, key_of, read_object
from actors.gateway.open_episodes import OpenEpisode, OpenEpisodes
from streamrl.errors import LostAgentError

_MAX_WAIT_S = 300.0


class _Take(Struct, forbid_unknown_fields=True):
    agent: str = "an agent"
    wait_s: float = 30.0


class _Close(Struct, forbid_unknown_fields=True):
    reward: float | None = None
    metrics: dict[str, float] = {}


class TaskRoutes:
    """Of one gateway."""

    def __init__(
        self,
        episodes: OpenEpisodes,
        task_of: Callable[[OpenEpisode], Json],
        *,
        token: str | None,
        is_pulled: bool,
    ) -> None:
        """
        Args:
            task_of: what an agent is told of its episode.
            token: what an agent must know to take a task; None: nothing.
            is_pulled: whether agents ask for tasks, instead of being started with one.
        """
        self._episodes = episodes
        self._task_of = task_of
        self._token = token
        self._is_pulled = is_pulled

    @property
    def routes(self) -> list[web.RouteDef]:
        handlers: Mapping[tuple[str, str], Handler] = {
            ("POST", "/sessions"): self._take,
            ("GET", "/sessions/{key}"): self._read,
            ("DELETE", "/sessions/{key}"): self._give_up,
            ("POST", "/sessions/{key}/reward"): self._close,
        }
        return [
            web.route(method, path, answering(handler, write_error))
            for (method, path), handler in handlers.items()
        ]

    async def _take(self, request: web.Request) -> web.Response:
        """Waits for a task, as long as the agent asks for."""
        # A header may hold bytes that are no text.
        key = key_of(request).encode(errors="surrogateescape")
        if self._token and not hmac.compare_digest(key, self._token.encode()):
            raise RequestError("a task needs the token: Authorization: Bearer TOKEN", 401)
        if not self._is_pulled:
            raise RequestError(
                "generator.agent starts its agents itself: without function and command, agents "
                "ask for tasks"
            )
        asked = converted(await read_object(request), _Take, {})
        if not 0 <= asked.wait_s <= _MAX_WAIT_S:
            raise RequestError(
                f"wait_s: was {asked.wait_s:g}; it must be from 0 to {_MAX_WAIT_S:g}"
            )
        episode = await self._episodes.take(f"agent {asked.agent!r}", asked.wait_s)
        return web.Response(status=204) if episode is None else json_answer(self._task_of(episode))

    async def _read(self, request: web.Request) -> web.Response:
        return json_answer(self._task_of(self._find(request)))

    async def _give_up(self, request: web.Request) -> web.Response:
        episode = self._find(request)
        episode.fail(LostAgentError(f"{episode.agent} gave up ({episode.place})"))
        return json_answer({})

    async def _close(self, request: web.Request) -> web.Response:
        episode = self._find(request)
        closed = converted(await read_object(request), _Close, {})
        if closed.reward is None and episode.needs_reward:
            raise RequestError("reward: is missing, and data.reward is environment")
        values = {"reward": closed.reward or 0.0, **closed.metrics}
        for name, value in values.items():
            if not math.isfinite(value):
                raise RequestError(f"{name}: was {value}; it must be finite")
        episode.close(AgentResult(closed.reward, closed.metrics))
        return json_answer({})

    def _find(self, request: web.Request) -> OpenEpisode:
        return find(self._episodes, request)


def find(episodes: OpenEpisodes, request: web.Request) -> OpenEpisode:
    """The episode whose key the request carries.

    Raises:
        RequestError: no episode has it.
        SessionEndedError: the episode is over.
    """
    try:
        return episodes.find(key_of(request))
    except KeyError:
        raise RequestError("no episode has this API key", 401, "invalid_api_key") from None
