"""Concurrent coroutines, deadlines, clean-up in any case, and threads for calls of user
functions."""

import asyncio
import contextlib
import contextvars
import logging
import queue
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar, cast

from streamrl.errors import RolloutError

T = TypeVar("T")
log = logging.getLogger(__name__)


async def together(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all; their results. The first error cancels the others and is raised."""
    # A gather that is canceled would raise what a call makes of it instead.
    calls = list(calls)
    return cast(list[T], await first_finished(calls, len(calls)))


async def first_finished(calls: Iterable[Coroutine[Any, Any, T]], count: int) -> list[T | None]:
    """The results of the first `count` that finish, None for the others, which are canceled.

    The first error before that cancels all and is raised.
    """
    tasks = [asyncio.ensure_future(call) for call in calls]
    finished: list[asyncio.Future[T]] = []
    for task in tasks:
        task.add_done_callback(finished.append)
    try:
        for _, ended in zip(range(count), asyncio.as_completed(tasks), strict=False):
            await ended
    finally:
        await end_all(tasks)
    kept = set(finished[:count])
    return [task.result() if task in kept else None for task in tasks]


async def first_result(*waits: Coroutine[Any, Any, T]) -> T:
    """The result or error of the one that ends first (of several at once, the first argument); the
    others are canceled."""
    tasks = [asyncio.create_task(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task.result() for task in tasks if task in done)
    finally:
        await end_all(tasks)


async def end_all(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel tasks that have not ended. Waits until all have; their errors are left to their
    owner."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# Grace after a deadline: an engine may be loading an update then, and the environment must see the
# last turn.
_GRACE_S = 30.0


class DeadlineError(Exception):
    """The deadline, or the grace after it, is over."""


@asynccontextmanager
async def deadline(limit_s: float, stop: asyncio.Event | None = None) -> AsyncIterator[None]:
    """Limit the time of a block within a task. A block that ends in time leaves no timer; a
    cancellation from elsewhere stays a cancellation.

    Args:
        stop: set at the deadline; the block is then canceled only after the grace. Without it, at
        once.

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


CLOSE_S = 10.0


@asynccontextmanager
async def closed_after(close: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Calls `close` once after the block, even if that was canceled. A `close` that fails hides no
    earlier error, and one that hangs is abandoned after CLOSE_S.

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
    try:
        async with deadline(CLOSE_S):
            await close()
    except DeadlineError:
        log.warning("close of an environment is given up after %g s", CLOSE_S)


MAX_HUNG = 64


class Threads:
    """Calls one function of the user's (a reward, tool, agent or game) in threads that end with the
    process.

    A call that never returns costs only its caller and its thread; in the event loop's own few
    threads it would hold up weight updates and the exit. A thread cannot be ended, so once MAX_HUNG
    hang, further calls are refused at once. Threads are used again, since starting one costs more
    than most rewards.

    Args:
        title: what errors begin with.
        instead: what to do if too many calls hang, as the end of the sentence.
    """

    def __init__(self, title: str, instead: str = "") -> None:
        self._title = title
        self._instead = instead
        self._num_hung = 0
        self._idle: list[_Thread] = []
        weakref.finalize(self, _end, self._idle)

    async def run(self, work: Callable[[], T]) -> T:
        """The call's result. Waits for it, or until canceled.

        Raises:
            RolloutError: too many calls hang already, or the call raised something that would end
                this task or process, such as CancelledError.
            Exception: what the call raised.
        """
        if self._num_hung >= MAX_HUNG:
            raise RolloutError(
                f"{self._title}: {self._num_hung} earlier calls have not returned, and their "
                f"threads cannot be ended{self._instead}"
            )
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        thread = self._idle.pop() if self._idle else _Thread()

        def conclude(outcome: Callable[[], None]) -> None:
            self._idle.append(thread)
            if answer.cancelled():
                self._num_hung -= 1
            else:
                outcome()

        def run() -> None:
            try:
                outcome = partial(answer.set_result, work())
            except Exception as error:
                outcome = partial(answer.set_exception, error)
            except BaseException as error:
                reason = RolloutError(f"{self._title}: {type(error).__name__}: {error}")
                reason.__cause__ = error
                outcome = partial(answer.set_exception, reason)
            with contextlib.suppress(RuntimeError):  # The loop is closed: nobody waits any more.
                loop.call_soon_threadsafe(conclude, outcome)

        context = contextvars.copy_context()
        thread.calls.put(lambda: context.run(run))
        try:
            return await answer
        finally:
            self._num_hung += answer.cancelled()


class _Thread:
    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=_run, args=(self.calls,), name="user code", daemon=True).start()


def _run(calls: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    """Waits for calls; None ends it."""
    while (call := calls.get()) is not None:
        call()
        del call  # What it holds is not kept until the next one.


def _end(idle: list[_Thread]) -> None:
    for thread in idle:
        thread.calls.put(None)
