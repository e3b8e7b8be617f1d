"""Limits on a reward's calls: how many at a time, how long each may take, how often it is retried,
and how much it may print.

Invariant: a call ends by its time-out; whatever goes wrong becomes one RolloutError that begins
with the reward's name.

`OutputLimit` covers `print`, `sys.stdout`, `sys.stderr` and `logging` where the function runs, and
does not affect the daemon's other output. It does not cover threads that the function starts and
output of C code; a separate process (`isolation: process`) does.
"""

import asyncio
import contextlib
import contextvars
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

from actors.concurrency import DeadlineError, deadline
from streamrl.errors import RolloutError

log = logging.getLogger(__name__)
T = TypeVar("T")
MAX_BYTES, WINDOW_S = 64 * 2**10, 60.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 15.0


class FinalError(RolloutError):
    """A call that would fail again if repeated."""


class RewardLimits:
    """The limits of one reward, for all groups of this process."""

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
        """Make a call and return its result. Waits for a slot, for `prepare` (not counted in the
        call's time), for the call, and before each retry.

        Raises:
            RolloutError: the last try failed or took too long.
        """
        num_failed = 0
        cause: BaseException | None
        while True:
            try:
                async with self._slots:
                    if prepare is not None:
                        await prepare()
                    async with deadline(self._timeout_s):
                        return await begin()
            except DeadlineError as error:
                limit = f"timeout_s, which is {self._timeout_s:g} s"
                reason, cause = f"{self._title} has not answered within {limit}", error
                is_last = num_failed == self._retries
            except RolloutError as error:
                reason, cause = str(error), error.__cause__
                is_last = num_failed == self._retries or isinstance(error, FinalError)
            if is_last:
                tries = f" (tried {num_failed + 1} times)" if num_failed else ""
                raise RolloutError(reason + tries) from cause
            await asyncio.sleep(min(_FIRST_PAUSE_S * 2**num_failed, _LONGEST_PAUSE_S))
            num_failed += 1


_applied: contextvars.ContextVar["OutputLimit | None"] = contextvars.ContextVar(
    "reward_output", default=None
)


class OutputLimit:
    """Limits the output of one reward to `MAX_BYTES` within `WINDOW_S`; the rest is suppressed."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._began_s = 0.0
        self._num_bytes = 0
        self._num_suppressed = 0
        self._has_warned = False

    def admits(self, num_bytes: int) -> bool:
        """Whether so many more bytes may be written; they are counted either way."""
        now_s = time.monotonic()
        if now_s - self._began_s > WINDOW_S:
            self._began_s, self._num_bytes, self._has_warned = now_s, 0, False
        self._num_bytes += num_bytes
        if self._num_bytes <= MAX_BYTES:
            return True
        self._num_suppressed += num_bytes
        return False

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Apply the limit during a call, in the thread or task that it runs in."""
        _install()
        token = _applied.set(self)
        try:
            yield
        finally:
            _applied.reset(token)

    def take_suppressed(self) -> int:
        """Return the number of bytes suppressed since the last call; warn once per window."""
        num, self._num_suppressed = self._num_suppressed, 0
        if num and not self._has_warned:
            self._has_warned = True
            log.warning(
                "%s prints more than %d KiB within %g s; the rest is suppressed, %d bytes so far",
                self._title,
                MAX_BYTES // 2**10,
                WINDOW_S,
                num,
            )
        return num


class _LimitedStream:
    """A text stream that asks the applied limit, if any, before it writes."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        limit = _applied.get()
        if limit is None or limit.admits(len(text)):
            self._stream.write(text)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _LimitedLog(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        limit = _applied.get()
        return limit is None or limit.admits(len(str(record.msg)))


def _install() -> None:
    """Wrap the streams and log handlers that the process has now."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, _LimitedStream):
            setattr(sys, name, _LimitedStream(stream))
    for handler in logging.getLogger().handlers:
        if not any(isinstance(known, _LimitedLog) for known in handler.filters):
            handler.addFilter(_LimitedLog())
