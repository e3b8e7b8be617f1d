"""Calls in threads that end with the process.

A call that never returns costs its group and its thread, and nothing else; in the event loop's own
few threads it would first hold up weight updates and in the end the exit. A thread cannot be ended,
so that after `MAX_HUNG` of them each further call is refused at once.

Invariant: a thread has one call at a time. One whose call has returned waits for the next, since
starting a thread for each costs more than most rewards; it ends with its `Threads`.
"""

import asyncio
import contextlib
import contextvars
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

from streamrl.errors import RolloutError

MAX_HUNG = 64


class Threads:
    """Of one reward."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._num_hung = 0
        self._idle: list[_Thread] = []
        weakref.finalize(self, _end, self._idle)

    async def run(self, work: Callable[[], Any]) -> Any:
        """The result. Waits for the call, or to be canceled.

        Raises:
            RolloutError: too many calls hang already.
            BaseException: what the call raised.
        """
        if self._num_hung >= MAX_HUNG:
            raise RolloutError(
                f"{self._title}: {self._num_hung} earlier calls have not returned, and their "
                "threads cannot be ended; with isolation: process they would be"
            )
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        thread = self._idle.pop() if self._idle else _Thread()

        def conclude(result: Any, error: BaseException | None) -> None:
            self._idle.append(thread)
            if answer.cancelled():
                self._num_hung -= 1
            elif error is None:
                answer.set_result(result)
            else:
                answer.set_exception(error)

        def run() -> None:
            result, failure = None, None
            try:
                result = work()
            except BaseException as error:
                failure = error
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(conclude, result, failure)

        context = contextvars.copy_context()
        thread.calls.put(lambda: context.run(run))
        try:
            return await answer
        finally:
            self._num_hung += answer.cancelled()


class _Thread:
    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=_run, args=(self.calls,), name="reward", daemon=True).start()


def _run(calls: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    """Waits for calls; None ends it."""
    while (call := calls.get()) is not None:
        call()
        del call  # What it holds is not kept until the next one.


def _end(idle: list[_Thread]) -> None:
    for thread in idle:
        thread.calls.put(None)
