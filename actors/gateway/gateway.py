"""The gateway of one generator: it hands the episodes of environment `agent` to agents.

    function   called in a thread for each episode
    command    started for each episode
    neither    agents ask for tasks

Invariant: an agent that fails, falls silent or disappears fails its group, never the generator. An
episode's key is served only while `play` waits.
"""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from actors.concurrency import end_all
from actors.gateway.agent import AGENT, AgentResult
from actors.gateway.open_episodes import OpenEpisode, OpenEpisodes
from actors.gateway.server import GatewayServer
from actors.gateway.session import Session
from actors.gateway.started_agents import CommandAgent, FunctionAgent
from actors.rendering.renderer import ChatRenderer
from streamrl.config import RunConfig
from streamrl.config.environments import EnvironmentEntry
from streamrl.config.generator import AgentSettings
from streamrl.errors import LostAgentError, RolloutError
from streamrl.interfaces import EnvironmentContext
from streamrl.user_code import attributed_to

log = logging.getLogger(__name__)

# An agent that has posted its reward may still have something to write.
_LINGER_S = 5.0
_NOBODY_ASKS_S = 60.0


class Gateway:
    """Plays any number of episodes at a time, between `start` and `close`."""

    def __init__(self, config: RunConfig) -> None:
        """
        Raises:
            ConfigError: a function cannot be loaded, or the token is missing.
        """
        self._settings = config.generator.agent
        self._entries = {e.name: e for e in config.entries if e.environment == AGENT}
        self._agents = {e.name: _agent(e, self._settings) for e in self._entries.values()}
        self._is_pulled = None in self._agents.values()
        """Whether agents ask for tasks."""
        self._num_generators = config.generator.max_count
        self._model = config.model.path
        self._places = asyncio.Semaphore(self._settings.max_agents)
        self._episodes = OpenEpisodes()
        self._url = ""
        self._renderer: ChatRenderer | None = None
        self._server = GatewayServer(
            self._settings,
            self._episodes,
            self._task,
            is_pulled=self._is_pulled,
            model=self._model,
        )

    async def start(self, renderer: ChatRenderer) -> str:
        """Start serving; return the URL. Raises as `GatewayServer.start` does."""
        self._renderer = renderer
        self._url = await self._server.start(self._num_generators)
        if self._is_pulled:
            log.info("agents ask for tasks at %s/sessions", self._url)
        return self._url

    async def close(self) -> None:
        await self._server.close()

    async def play(self, session: Session, context: EnvironmentContext) -> AgentResult:
        """See `actors.gateway.agent.Agent`. Waits until an agent takes the episode, and then until
        it ends it or falls silent."""
        name = context.prompt.environment
        needs_reward = self._entries[name].data.reward == "environment"
        episode = OpenEpisode(session, context, needs_reward=needs_reward)
        agent = self._agents[name]
        self._episodes.add(episode)
        end = "the episode is over"
        try:
            if agent is None:
                await self._offered(episode)
                return await self._ended(episode, None)
            async with self._places:
                running = asyncio.create_task(agent.run(episode, self._task(episode)))
                return await self._ended(episode, running)
        except RolloutError as error:
            end = f"{end}: {error}"
            raise
        finally:
            self._episodes.close(episode, end)

    async def _offered(self, episode: OpenEpisode) -> None:
        """Offer the episode and wait until an agent has taken it."""

        def warn() -> None:
            log.warning(
                "%d episodes wait for agents: none has asked for a task at %s/sessions for %g s",
                *(len(self._episodes.offered), self._url, _NOBODY_ASKS_S),
            )

        warning = asyncio.get_running_loop().call_later(_NOBODY_ASKS_S, warn)
        try:
            await self._episodes.offer(episode)
        finally:
            warning.cancel()

    async def _ended(
        self, episode: OpenEpisode, running: asyncio.Task[AgentResult] | None
    ) -> AgentResult:
        """Return how the agent ended the episode. Waits for its result, for its end, or until it
        has been silent for too long."""
        limit_s = self._settings.silence_s
        silence = asyncio.create_task(episode.wait_for_silence(limit_s))
        started = [] if running is None else [running]
        waiting: list[asyncio.Future[Any]] = [silence, episode.result, *started]
        try:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if episode.result in done:
                if started:
                    await asyncio.wait(started, timeout=_LINGER_S)
                return episode.result.result()
            if running is not None and running in done:
                result = running.result()
                if result.reward is None and episode.needs_reward:
                    raise RolloutError(
                        f"{episode.agent} ended without a reward, and data.reward is environment"
                    )
                return result
            raise LostAgentError(
                f"{episode.agent} has asked for nothing for generator.agent.silence_s, which is "
                f"{limit_s:g} s ({episode.place})"
            )
        finally:
            await end_all((silence, *started))

    def _task(self, episode: OpenEpisode) -> Mapping[str, Any]:
        """The agent's task: what to do, and where to call."""
        assert self._renderer is not None, "it has started"
        context, prompt = episode.context, episode.context.prompt
        return {
            "api_key": episode.key,
            "base_url": f"{self._url}/v1",
            "anthropic_base_url": self._url,
            "session_url": f"{self._url}/sessions/{episode.key}",
            "model": self._model,
            "messages": self._renderer.messages(prompt),
            "row": dict(prompt.row),
            "answer": prompt.answer,
            "environment": prompt.environment,
            "seed": context.seed,
            "episode_index": context.episode_index,
        }


def _agent(entry: EnvironmentEntry, settings: AgentSettings) -> FunctionAgent | CommandAgent | None:
    """The agent that the gateway starts; None if agents ask for the entry's tasks.

    Raises:
        ConfigError: the agent that the entry names cannot be used.
    """
    if entry.kwargs:
        with attributed_to(entry.kwargs_setting):
            settings = AgentSettings(**entry.kwargs)
    if settings.function is not None:
        return FunctionAgent(settings.function)
    return None if settings.command is None else CommandAgent(settings.command)
