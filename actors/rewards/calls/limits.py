"""The limits of a reward's calls: how many at a time, how long each, how often again.

Invariant: a call ends by its time-out; whatever goes wrong is one RolloutError that begins with the
name of the reward.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from streamrl.errors import RolloutError

T = TypeVar("T")
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 15.0


class FinalError(RolloutError):
    """A call that would fail again."""


class RewardLimits:
    """Of one reward, for all groups of this process."""

    def __init__(
        self, title: str, *, timeout_s: float = 300.0, max_concurrent: int = 64, retries: int = 0
    ) -> None:
        self._title = title
        self._timeout_s = timeout_s
        self._retries = retries
        self._slots = asyncio.Semaphore(max_concurrent)

    async def call(
        self,
        begin: Callable[[], Awaitable[T]],
        prepare: Callable[[], Awaitable[None]] | None = None,
    ) -> T:
        """The result. Waits for a slot, for what the call needs, which is not its time, for the
        call, and before each further try.

        Raises:
            RolloutError: the last try failed, or took longer than it may.
        """
        for num_failed in range(self._retries + 1):
            try:
                async with self._slots:
                    if prepare is not None:
                        await prepare()
                    return await self._try(begin)
            except RolloutError as error:
                if num_failed == self._retries or isinstance(error, FinalError):
                    tries = f" (tried {num_failed + 1} times)" if num_failed else ""
                    raise RolloutError(f"{error}{tries}") from error.__cause__
            await asyncio.sleep(min(_FIRST_PAUSE_S * 2**num_failed, _LONGEST_PAUSE_S))
        raise AssertionError("the last try returns or raises")

    async def _try(self, begin: Callable[[], Awaitable[T]]) -> T:
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                return await begin()
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise RolloutError(
                f"{self._title} has not answered within timeout_s, which is {self._timeout_s:g} s"
            ) from error
