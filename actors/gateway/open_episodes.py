"""The episodes that agents play in this generator, by the keys with which agents name them.

    offered   waits for an agent to ask for it
    open      an agent plays it
    closed    remembered for a while, so that a late call is told why the episode ended

Invariant: a key is secret, belongs to one episode, and is never used again.
"""

import asyncio
import secrets
import time
from collections import OrderedDict, deque
from dataclasses import KW_ONLY, dataclass

from actors.gateway.agent import AgentResult
from actors.gateway.session import Session, SessionEndedError
from streamrl.errors import RolloutError
from streamrl.interfaces import EnvironmentContext

_NUM_REMEMBERED = 4096
# A timer that is this late was not only waiting for other callbacks.
_STOPPED_S = 1.0


@dataclass(eq=False)
class OpenEpisode:
    """One episode and its agent; `result` is set once the agent has closed it."""

    session: Session
    context: EnvironmentContext
    _: KW_ONLY
    needs_reward: bool
    """Whether only the agent can score it."""

    def __post_init__(self) -> None:
        self.key = f"sk-{secrets.token_urlsafe(24)}"
        self.agent = "an agent"
        """Name of the agent in messages."""
        self.result: asyncio.Future[AgentResult] = asyncio.get_running_loop().create_future()
        self.taken = asyncio.Event()
        self._taken_at_s = 0.0

    @property
    def place(self) -> str:
        """Name of the episode in messages."""
        origin = self.context.prompt.origin
        row = f"{origin}, " if origin else ""
        return f"{row}episode {self.context.episode_index}"

    def take(self, agent: str) -> None:
        self.agent = agent
        self._taken_at_s = time.monotonic()
        self.taken.set()

    def close(self, result: AgentResult) -> None:
        """Record the result with which the agent ended the episode; the first one counts.

        Raises:
            SessionEndedError: there is another result already, or the episode has failed.
        """
        if not self.result.done():
            self.result.set_result(result)
        elif self.result.exception() is not None or self.result.result() != result:
            raise SessionEndedError("the episode is over, and its first result stands")

    def fail(self, error: RolloutError) -> None:
        """Fail the episode, since its agent will not continue."""
        if not self.result.done():
            self.result.set_exception(error)

    async def wait_for_silence(self, limit_s: float) -> None:
        """Wait until the agent has asked for nothing for so long. The wait begins anew once this
        process was stopped, as by a signal: a request may lie in its socket."""
        heard_from_s = self._taken_at_s
        while True:
            silent_s = min(self.session.silent_s, time.monotonic() - heard_from_s)
            if silent_s >= limit_s:
                return
            due_s = time.monotonic() + limit_s - silent_s
            await asyncio.sleep(limit_s - silent_s)
            if time.monotonic() - due_s > _STOPPED_S:
                heard_from_s = time.monotonic()


class OpenEpisodes:
    def __init__(self) -> None:
        self._open: dict[str, OpenEpisode] = {}
        self.offered: deque[OpenEpisode] = deque()
        self._changed = asyncio.Condition()
        self._closed: OrderedDict[str, str] = OrderedDict()

    def add(self, episode: OpenEpisode) -> None:
        """Serve calls with the episode's key from now on."""
        self._open[episode.key] = episode

    async def offer(self, episode: OpenEpisode) -> None:
        """Offer the episode and wait until an agent has taken it."""
        async with self._changed:
            self.offered.append(episode)
            # Wake all that wait: a single one may be gone by then.
            self._changed.notify_all()
        await episode.taken.wait()

    async def take(self, agent: str, wait_s: float) -> OpenEpisode | None:
        """Take the episode that has been offered longest. Waits up to `wait_s` for one; None if
        none came."""
        try:
            async with asyncio.timeout(wait_s), self._changed:
                await self._changed.wait_for(lambda: self.offered)
                episode = self.offered.popleft()
        except TimeoutError:
            return None
        episode.take(agent)
        return episode

    def close(self, episode: OpenEpisode, reason: str) -> None:
        """Answer calls with the episode's key with this reason from now on."""
        del self._open[episode.key]
        if episode in self.offered:
            self.offered.remove(episode)
        episode.session.end(reason)
        self._closed[episode.key] = reason
        while len(self._closed) > _NUM_REMEMBERED:
            self._closed.popitem(last=False)

    def find(self, key: str) -> OpenEpisode:
        """
        Raises:
            SessionEndedError: the episode was closed.
            KeyError: no episode has this key.
        """
        if key in self._closed:
            raise SessionEndedError(self._closed[key])
        return self._open[key]
