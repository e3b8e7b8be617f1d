"""Calls in threads of their own, which end with the process.

A call that never returns costs its group and its thread, and nothing else; in the event loop's own
few threads it would first hold up weight updates and in the end the exit. A thread cannot be ended,
so that after `MAX_HUNG` of them each further call is refused at once.
"""

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from typing import Any

from streamrl.errors import RolloutError

MAX_HUNG = 64


class Threads:
    """Of one reward."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._num_hung = 0

    async def run(self, work: Callable[[], Any]) -> Any:
        """The result. Waits for the call, or to be canceled.

        Raises:
            RolloutError: too many calls hang already.
            Exception: what the call raised.
        """
        if self._num_hung >= MAX_HUNG:
            raise RolloutError(
                f"{self._title}: {self._num_hung} earlier calls have not returned, and their "
                "threads cannot be ended; with isolation: process they would be"
            )
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()

        def conclude(result: Any, error: Exception | None) -> None:
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
            except Exception as error:
                failure = error
            except BaseException as error:
                failure = RuntimeError(f"{type(error).__name__}({error}), which ends a thread")
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(conclude, result, failure)

        context = contextvars.copy_context()
        threading.Thread(target=context.run, args=(run,), name="reward", daemon=True).start()
        try:
            return await answer
        finally:
            self._num_hung += answer.cancelled()
