"""Coroutines side by side, under a deadline, and closed whatever becomes of them.

`together`: several at once, all of whose results are needed. None is left running.

`Deadline`: of an episode, of a turn or of a close. What it limits is stopped, then canceled.
Invariant: `stop` is set at the deadline and not before; a block that ends in time leaves no timer,
and a cancellation from elsewhere stays one. There are several for every episode, so each is one
timer, without the coroutines of `asyncio.timeout`.

`ClosedAfter`: what is opened for an episode or a group is closed however it ends. A close that
fails hides no earlier error and no cancellation, and one that hangs holds nobody up for longer than
CLOSE_S.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from types import TracebackType
from typing import Any, TypeVar

from streamrl.errors import RolloutError

T = TypeVar("T")


async def together(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all; the first error cancels the others and is raised."""
    calls = list(calls)
    if len(calls) == 1:
        return [await calls[0]]
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(call) for call in calls]
    except* RolloutError as errors:
        first = errors.exceptions[0]
        raise first from first.__cause__
    return [task.result() for task in running]


# An engine may be loading an update at the deadline, and an environment has to see the last turn.
_GRACE_S = 30.0


class DeadlineError(Exception):
    """The deadline, or the grace after it, is over."""


class Deadline:
    """Around what it limits, in a task.

    Args:
        stop: set at the deadline, which cancels only after the grace; without it, at once.

    Raises:
        DeadlineError: the block was canceled.
    """

    def __init__(self, deadline_s: float, stop: asyncio.Event | None = None) -> None:
        self._deadline_s = deadline_s
        self._stop = stop
        self._is_over = False

    def __enter__(self) -> None:
        self._loop = asyncio.get_running_loop()
        task = asyncio.current_task(self._loop)
        assert task is not None, "a deadline is entered in a task"
        self._task, self._num_cancellations = task, task.cancelling()
        self._timer = self._loop.call_later(self._deadline_s, self._on_deadline)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        if self._is_over:
            is_own = self._task.uncancel() <= self._num_cancellations
            if is_own and kind is asyncio.CancelledError:
                raise DeadlineError from error

    def _on_deadline(self) -> None:
        if self._stop is None:
            self._cancel()
        else:
            self._stop.set()
            self._timer = self._loop.call_later(min(_GRACE_S, self._deadline_s), self._cancel)

    def _cancel(self) -> None:
        self._is_over = True
        self._task.cancel()


log = logging.getLogger(__name__)


CLOSE_S = 10.0


class ClosedAfter:
    """Calls `close` once after the block, also if the block was canceled.

    Raises:
        RolloutError: `close` failed, and the block did not.
    """

    def __init__(self, close: Callable[[], Awaitable[None]]) -> None:
        self._close = close

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            await self._close_in_time()
        except RolloutError as failure:
            if error is None:
                raise
            log.warning("%s", failure)

    async def _close_in_time(self) -> None:
        """Waits for `close`; the limit unblocks."""
        try:
            with Deadline(CLOSE_S):
                await self._close()
        except DeadlineError:
            log.warning("close of an environment is given up after %g s", CLOSE_S)
