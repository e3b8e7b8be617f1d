"""A plain function as a reward: called off the event loop, its answer checked.

Invariant: a reward that fails or answers nonsense costs its group (RolloutError, counted as
`failed`), never the daemon.
"""

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from streamrl.errors import RolloutError
from streamrl.interfaces import Episode


class FunctionReward:
    """`function(episode, **kwargs) -> float`, or, with a first parameter named `episodes`, the
    whole group at once: `function(episodes, **kwargs) -> list of float`. Both may be async."""

    def __init__(self, function: Callable[..., Any], kwargs: Mapping[str, Any], name: str) -> None:
        self._function = function
        self._kwargs = kwargs
        self._name = name
        first = next(iter(inspect.signature(function).parameters), "")
        self._takes_group = first == "episodes"

    async def score(self, episodes: Sequence[Episode]) -> tuple[float, ...]:
        if self._takes_group:
            answers = await self._call(episodes)
        else:
            answers = [await self._call(episode) for episode in episodes]
        return self._checked(answers, len(episodes))

    async def _call(self, argument: Any) -> Any:
        # User code may raise anything; whatever it is belongs to this group alone.
        try:
            if inspect.iscoroutinefunction(self._function):
                return await self._function(argument, **self._kwargs)
            return await asyncio.to_thread(self._function, argument, **self._kwargs)
        except Exception as error:
            raise RolloutError(f"reward {self._name}: {type(error).__name__}: {error}") from error

    def _checked(self, answers: Any, expected: int) -> tuple[float, ...]:
        try:
            rewards = tuple(float(answer) for answer in answers)
        except (TypeError, ValueError) as error:
            raise RolloutError(f"reward {self._name}: answered {answers!r}: no numbers") from error
        if len(rewards) != expected:
            raise RolloutError(
                f"reward {self._name}: {len(rewards)} rewards for {expected} episodes"
            )
        if not all(math.isfinite(reward) for reward in rewards):
            raise RolloutError(f"reward {self._name}: answered {rewards}: not finite")
        return rewards
