"""Coroutines side by side, under a deadline, and closed whatever becomes of them.

`together`: several at once, all of whose results are needed. None is left running.

`deadline`: of an episode, of a turn or of a close. What it limits is stopped, then canceled.
Invariant: `stop` is set at the deadline and not before; a block that ends in time leaves no timer,
and a cancellation from elsewhere stays one.

`closed_after`: what is opened for an episode or a group is closed however it ends. A close that
fails hides no earlier error and no cancellation, and one that hangs holds nobody up for longer than
CLOSE_S.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
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


@asynccontextmanager
async def deadline(limit_s: float, stop: asyncio.Event | None = None) -> AsyncIterator[None]:
    """Around what it limits, in a task.

    Args:
        stop: set at the deadline, which cancels only after the grace; without it, at once.

    Raises:
        DeadlineError: the block was canceled.
    """
    timer = None if stop is None else asyncio.get_running_loop().call_later(limit_s, stop.set)
    grace_s = 0.0 if stop is None else min(_GRACE_S, limit_s)
    try:
        async with asyncio.timeout(limit_s + grace_s) as limit:
            yield
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise DeadlineError(f"it took longer than {limit_s:g} s") from error
    finally:
        if timer is not None:
            timer.cancel()


log = logging.getLogger(__name__)


CLOSE_S = 10.0


@asynccontextmanager
async def closed_after(close: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Calls `close` once after the block, also if the block was canceled.

    Raises:
        RolloutError: `close` failed, and the block did not.
    """
    try:
        yield
    except BaseException:
        try:
            await _close_in_time(close)
        except RolloutError as failure:
            log.warning("%s", failure)
        raise
    await _close_in_time(close)


async def _close_in_time(close: Callable[[], Awaitable[None]]) -> None:
    """Waits for `close`; the limit unblocks."""
    try:
        async with deadline(CLOSE_S):
            await close()
    except DeadlineError:
        log.warning("close of an environment is given up after %g s", CLOSE_S)
