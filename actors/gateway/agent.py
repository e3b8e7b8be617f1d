"""An agent plays an episode by asking the policy, where an environment answers it.

`actors.episodes` calls `play` where the episode has an agent instead of an environment.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Protocol, runtime_checkable

from actors.gateway.session import Session
from streamrl.errors import RolloutError
from streamrl.interfaces import EnvironmentContext


@dataclass(frozen=True)
class AgentResult:
    """How an agent ended its episode."""

    reward: float | None = None
    """None: `data.reward` alone scores it."""
    metrics: Mapping[str, float] = field(default_factory=dict)


@runtime_checkable
class Agent(Protocol):
    """Plays episodes, any number of them at a time."""

    async def play(self, session: Session, context: EnvironmentContext) -> AgentResult:
        """Asks the session for completions until the episode is over.

        Raises:
            RolloutError: the agent failed or disappeared.
        """
        ...


@cache
def is_agent(player: type) -> bool:
    """Whether players of this class are agents. Kept, since to look takes as long as an episode of
    one turn."""
    return issubclass(player, Agent)


async def play(agent: Agent, session: Session, context: EnvironmentContext) -> AgentResult:
    """The agent's episode, with its reward recorded. Waits for the agent, which a limit of the
    caller's cancels.

    An agent that fails once a limit has cut its episode has been cut, too.

    Raises:
        RolloutError: the agent failed, disappeared, or asked for nothing.
    """
    try:
        result = await agent.play(session, context)
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
