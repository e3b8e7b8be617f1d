"""A plain function as a reward: called off the event loop, its answer checked.

Invariant: a reward that fails or answers nonsense costs its group (RolloutError, counted as
`failed`), never the daemon.
"""

import asyncio
import contextlib
import inspect
import math
import reprlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from streamrl.errors import RolloutError
from streamrl.interfaces import Episode
from streamrl.user_code import attributed_to, defined_at


class FunctionReward:
    """`function(episode, **kwargs) -> float`, or, with a first parameter named `episodes`, the
    whole group at once: `function(episodes, **kwargs) -> list of float`. Both may be async."""

    def __init__(self, function: Callable[..., Any], kwargs: Mapping[str, Any], name: str) -> None:
        self._function = function
        self._kwargs = kwargs
        self._name = name
        self._place = f"{name}{defined_at(function)}"
        first = next(iter(inspect.signature(function).parameters), "")
        self._takes_group = first == "episodes"

    async def score(self, episodes: Sequence[Episode]) -> tuple[float, ...]:
        if self._takes_group:
            answers = await self._call(episodes)
        else:
            answers = [await self._call(episode) for episode in episodes]
        return self._checked(answers, len(episodes))

    async def _call(self, argument: Any) -> Any:
        with attributed_to(f"reward {self._name}", RolloutError):
            if inspect.iscoroutinefunction(self._function):
                return await self._function(argument, **self._kwargs)
            return await _in_a_thread(lambda: self._function(argument, **self._kwargs))

    def _checked(self, answers: Any, expected: int) -> tuple[float, ...]:
        """
        Raises:
            RolloutError: the answers are not one finite number for each episode.
        """
        try:
            rewards = tuple(float(answer) for answer in answers)
        except (TypeError, ValueError) as error:
            raise self._refused(answers, expected) from error
        if len(rewards) != expected or not all(map(math.isfinite, rewards)):
            raise self._refused(answers, expected)
        return rewards

    def _refused(self, answers: Any, expected: int) -> RolloutError:
        if self._takes_group:
            needed = f"it must return {expected} finite numbers, one for each episode"
        else:
            answers = next(answer for answer in answers if not _is_finite(answer))
            needed = "it must return one finite number"
        return RolloutError(f"reward {self._place} returned {reprlib.repr(answers)}: {needed}")


def _is_finite(answer: Any) -> bool:
    try:
        return math.isfinite(float(answer))
    except (TypeError, ValueError):
        return False


async def _in_a_thread(work: Callable[[], Any]) -> Any:
    """In a thread of its own, and one that ends with the process: a call that never returns costs
    its group and nothing else, whereas in the loop's own few threads it would first hold up weight
    updates and in the end the exit. Waits for the call, or to be cancelled."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Any] = loop.create_future()

    def conclude(result: Any, error: Exception | None) -> None:
        if answer.done():
            return
        if error is None:
            answer.set_result(result)
        else:
            answer.set_exception(error)

    def run() -> None:
        result, failure = None, None
        try:
            result = work()
        except Exception as error:
            failure = error
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(conclude, result, failure)

    threading.Thread(target=run, name="reward", daemon=True).start()
    return await answer
