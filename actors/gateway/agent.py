"""Agents: an agent plays an episode by asking the policy for completions (an environment, in
contrast, answers completions).

`actors.episodes` calls `play` if the episode has an agent instead of an environment.

    runs/NAME/gateways/GENERATOR.json   the gateway's URL, while it runs
"""

import json
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from actors.concurrency import first_result
from actors.gateway.session import Session
from streamrl.config import RunConfig
from streamrl.durable_files import write_file
from streamrl.errors import RolloutError
from streamrl.interfaces import EnvironmentContext

if TYPE_CHECKING:
    from actors.rendering.renderer import ChatRenderer


@dataclass(frozen=True)
class AgentResult:
    """How an agent ended its episode."""

    reward: float | None = None
    """None: only `data.reward` scores the episode."""
    metrics: Mapping[str, float] = field(default_factory=dict)


@runtime_checkable
class Agent(Protocol):
    """Plays episodes, any number of them at a time."""

    async def play(self, session: Session, context: EnvironmentContext) -> AgentResult:
        """Ask the session for completions until the episode is over.

        Raises:
            RolloutError: the agent failed or disappeared.
        """
        ...


@cache
def is_agent(player: type) -> bool:
    """Whether players of this class are agents. Cached: the look-up takes as long as an episode of
    one turn."""
    return issubclass(player, Agent)


async def play(agent: Agent, session: Session, context: EnvironmentContext) -> AgentResult:
    """Let the agent play, and record its reward. Waits for the agent; the caller cancels it at a
    limit. A failure after a limit has cut the episode is ignored: the episode counts as cut.

    Raises:
        RolloutError: the agent failed, disappeared, or asked for nothing. The error with which an
            engine ended is raised unchanged, whatever the agent makes of it.
    """
    try:
        # The engine's error comes first: an agent may have ended because the engine failed.
        result = await first_result(session.engine_failure(), agent.play(session, context))
    except RolloutError:
        if not (session.finish_reason.is_truncated and session.record.segments):
            raise
        result = AgentResult()
    finally:
        session.end("the episode is over")
    if not session.record.segments:
        raise RolloutError("the agent ended its episode without a completion")
    if result.reward is not None:
        session.judge(result.reward)
    return result


AGENT = "agent"
"""The name of the environment whose episodes agents play."""


class UnservedAgent:
    """Stands for the environment if no gateway serves it."""

    def __init__(self, function: str | None = None, command: str | list[str] | None = None) -> None:
        """Accept the settings that override `generator.agent` for one environment."""

    async def play(self, session: Session, context: EnvironmentContext) -> AgentResult:
        raise RolloutError(
            "generator.environment: is agent, and agents play in the generators of a run alone"
        )


@asynccontextmanager
async def serving_agents(
    config: RunConfig, generator_id: str, renderer: "ChatRenderer"
) -> AsyncIterator[Mapping[str, Agent]]:
    """Serve the agents of the entries with environment `agent`, by entry name, during the block.

    Raises:
        ConfigError: the gateway cannot be started as configured.
        TransportError: other processes have its ports.
    """
    names = [entry.name for entry in config.entries if entry.environment == AGENT]
    if not names:
        yield {}
        return
    # Imports the HTTP server, which only such environments need.
    from actors.gateway.gateway import Gateway

    gateway = Gateway(config)
    file = config.run.path / "gateways" / f"{generator_id}.json"
    try:
        url = await gateway.start(renderer)
        file.parent.mkdir(exist_ok=True)
        write_file(file, json.dumps({"url": url, "pid": os.getpid()}))
        yield dict.fromkeys(names, gateway)
    finally:
        file.unlink(missing_ok=True)
        await gateway.close()
