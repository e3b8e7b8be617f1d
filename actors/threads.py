"""Calls of the user's functions (rewards, tools, agents) in threads that end with the process.

A call that never returns costs who waits for it and its thread, and nothing else; in the event
loop's own few threads it would first hold up weight updates and in the end the exit. A thread
cannot be ended, so that after `MAX_HUNG` of them each further call is refused at once.

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
from functools import partial
from typing import TypeVar

from streamrl.errors import RolloutError

T = TypeVar("T")
MAX_HUNG = 64


class Threads:
    """Of one function.

    Args:
        title: what errors begin with.
        instead: what to do where too many calls hang, as the end of the sentence.
    """

    def __init__(self, title: str, instead: str = "") -> None:
        self._title = title
        self._instead = instead
        self._num_hung = 0
        self._idle: list[_Thread] = []
        weakref.finalize(self, _end, self._idle)

    async def run(self, work: Callable[[], T]) -> T:
        """The result. Waits for the call, or to be canceled.

        Raises:
            RolloutError: too many calls hang already, or the call raised what would end this task
                or the process, such as CancelledError.
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
