"""The deadline of an episode or of a turn: it is stopped, and canceled after the grace.

Invariant: `stop` is set at the deadline and not before; a block that ends in time leaves no timer.
Called by: episode.py, once or more for every episode, so it is a class with one timer.
"""

import asyncio
from types import TracebackType

# An engine may be loading an update at the deadline, and an environment has to see the last turn.
_GRACE_S = 30.0


class DeadlineError(Exception):
    """The grace after a deadline is over."""


class Deadline:
    """Around what it limits.

    Raises:
        DeadlineError: the block was canceled.
    """

    def __init__(self, deadline_s: float, stop: asyncio.Event) -> None:
        self._deadline_s = deadline_s
        self._stop = stop
        self._limit = asyncio.timeout(None)

    async def __aenter__(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._deadline_s, self._on_deadline)
        await self._limit.__aenter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        try:
            await self._limit.__aexit__(kind, error, traceback)
        except TimeoutError as timeout:
            raise DeadlineError from timeout

    def _on_deadline(self) -> None:
        self._stop.set()
        grace_s = min(_GRACE_S, self._deadline_s)
        self._limit.reschedule(asyncio.get_running_loop().time() + grace_s)
