"""`generator.agent.function`: the user's function plays an episode in a thread.

Invariant: whatever it does to its thread, the generator's event loop goes on.
"""

import asyncio
import contextlib
import inspect
from typing import Any

from actors.gateway.agent import AgentResult
from actors.gateway.apis.requests import Json
from actors.gateway.open_episodes import OpenEpisode
from actors.threads import Threads
from streamrl.errors import RolloutError
from streamrl.user_code import attributed_to, is_finite_number, load_user_code


class FunctionAgent:
    """PATH.py:FUNCTION(task, base_url, api_key), which may be `async`.

    Raises:
        ConfigError: it cannot be loaded.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._function = load_user_code("generator.agent.function", name)
        self._threads = Threads(f"agent {name}")

    async def run(self, episode: OpenEpisode, task: Json) -> AgentResult:
        """Waits for the function. Canceling cancels one that is `async`; another one goes on, and
        its requests are refused.

        Raises:
            RolloutError: it raised, or returned something else than a finite number or None.
        """
        episode.take(f"agent {self._name}")
        call = _Call(self._name, self._function, task)
        try:
            returned = await self._threads.run(call.run)
        finally:
            call.cancel()
        if returned is not None and not is_finite_number(returned):
            raise RolloutError(
                f"agent {self._name} returned {returned!r:.60}; it must be a finite number or None"
            )
        return AgentResult(None if returned is None else float(returned))


class _Call:
    """One call; `run` is for its thread, the rest for the event loop."""

    def __init__(self, name: str, function: Any, task: Json) -> None:
        self._name = name
        self._function = function
        self._task = task
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running: asyncio.Task[Any] | None = None

    def run(self) -> Any:
        """What the function returned."""
        task = dict(self._task)
        with attributed_to(f"agent {self._name}", RolloutError):
            returned = self._function(task, task["base_url"], task["api_key"])
            is_async = inspect.isawaitable(returned)
            return asyncio.run(self._awaited(returned)) if is_async else returned

    def cancel(self) -> None:
        """No effect on a call that is over, or that cannot be canceled."""
        loop, running = self._loop, self._running
        if loop is not None and running is not None:
            # The loop is closed once the call is over.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(running.cancel)

    async def _awaited(self, returned: Any) -> Any:
        self._loop, self._running = asyncio.get_running_loop(), asyncio.current_task()
        return await returned
