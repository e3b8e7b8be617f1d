"""How a daemon ends at a signal: it is first asked to, and killed if it does not.

    the first SIGTERM or SIGINT   `requested` is set: the daemon saves, gives back what it holds,
                                  and ends; if it holds nothing yet, it ends immediately
    the second one                the process ends at once
    SIGHUP                        counts as the first, unless nohup ignores it; never as the second
                                  (see `Orders`)
    `force_s` after the first, or EXIT_S after the work is over
                                  the process ends, whatever its threads wait for

A separate thread watches signals and time, so neither a call that blocks the event loop nor a
thread that never returns can keep the process alive.

Invariant: once the work is over, the exit code is that of the work.
"""

import asyncio
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from streamrl.errors import EXIT_CRASHED, StreamRLError, leave_record

FORWARDED_S = 1.0
FORCE_S = 12.0
EXIT_S = 4.0
"""Time for threads and connections to end when the work is over."""
EMPTY_HANDED_S = 3.0
_LOG_S = 1.0
_WAKE = 0

log = logging.getLogger(__name__)
T = TypeVar("T")


def in_thread(call: Callable[[], T], name: str) -> "Future[T]":
    """Run the call in a daemon thread; the future has its result. The thread keeps no process from
    ending, so it may be abandoned."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:  # It belongs to the caller.
            result.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return result


def ending_signals() -> tuple[signal.Signals, ...]:
    """The signals at which a process ends in order."""
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    hang_up = () if is_ignored else (signal.SIGHUP,)
    return (signal.SIGTERM, signal.SIGINT, *hang_up)


class Orders:
    """Decides which signals count as orders to end. A closing terminal sends SIGHUP twice, and an
    ending session SIGTERM after it: together they are one order."""

    def __init__(self) -> None:
        self._last: signal.Signals | None = None

    def count(self, number: signal.Signals) -> bool:
        """Whether this signal is a new order."""
        follows = self._last is signal.SIGHUP and number is signal.SIGTERM
        is_own = self._last is None or not (follows or number is signal.SIGHUP)
        if self._last is None or number is not signal.SIGHUP:
            self._last = number
        return is_own


class Stopped(BaseException):
    """A signal came while the daemon held nothing that could be lost."""


class Shutdown:
    """The shutdown of one daemon; call `install` before its work and `uninstall` after it.

    A learner rank may get one order to stop twice: from a terminal or Slurm, which signal every
    process, and from torchrun, which forwards it. Within FORWARDED_S they count once.
    """

    def __init__(self, force_s: float = FORCE_S) -> None:
        self.requested = asyncio.Event()
        self._force_s = force_s
        self._is_rank = "RANK" in os.environ
        self._first_s: float | None = None
        self._ends_by_s: float | None = None
        self._order, self._orders = "", Orders()
        self._is_asked = self._is_empty_handed = False
        self._exit_code: int | None = None
        self._signals: tuple[signal.Signals, ...] = ()
        self._pipe = (-1, -1)

    def install(self) -> None:
        """Call in the main thread, in the event loop that runs the daemon."""
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        self._main = threading.get_ident()
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        self._signals = ending_signals()
        for number in self._signals:
            signal.signal(number, self._on_signal)
        # The pipe gets a byte for each signal as soon as it arrives.
        signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name="shutdown", daemon=True).start()

    def uninstall(self) -> None:
        """Ignore one more signal of each kind: the work is done, and its exit code stands."""
        for number in self._signals:
            signal.signal(number, lambda late, _: signal.signal(late, signal.SIG_DFL))
        signal.set_wakeup_fd(-1)
        os.close(self._pipe[1])
        self._pipe = (-1, -1)

    def ask(self, order: str) -> None:
        """Ask the daemon to end because of `order`; the next signal still counts as the first."""
        if self.requested.is_set():
            return
        log.info("%s: draining", order)
        self._order = order
        self._end_within(self._force_s)
        self.requested.set()

    def allow(self, more_s: float) -> None:
        """Give the process this much more time before it is killed."""
        self._force_s += more_s
        if self._ends_by_s is not None:
            self._ends_by_s += more_s

    def conclude(self, exit_code: int) -> None:
        """The work is over: the process ends with this code, after EXIT_S at most."""
        self._exit_code = exit_code
        self._end_within(EXIT_S)

    @contextmanager
    def empty_handed(self) -> Iterator[None]:
        """For a block that runs without the event loop before the daemon holds anything that could
        be lost, such as loading a model. A signal ends the block.

        Raises:
            Stopped: a signal has come.
        """
        self._is_empty_handed = True
        try:
            if not (self._is_asked or self.requested.is_set()):
                yield
            if self._is_asked or self.requested.is_set():
                raise Stopped
        finally:
            self._is_empty_handed = False

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        """Runs in the main thread, between two bytecode instructions."""
        if self._exit_code is not None or self._is_asked:
            return
        self._is_asked = True
        if self._is_empty_handed:
            raise Stopped
        self._loop.call_soon_threadsafe(self._request, signal.Signals(number).name)

    def _request(self, name: str) -> None:
        log.info("%s: draining; a second one stops at once", name)
        self.requested.set()

    def _end_within(self, seconds: float) -> None:
        """End within this time from now; an earlier deadline stands."""
        by_s = time.monotonic() + seconds
        self._ends_by_s = by_s if self._ends_by_s is None else min(by_s, self._ends_by_s)
        with suppress(OSError):
            os.write(self._pipe[1], bytes([_WAKE]))

    def _watch(self) -> None:
        """Waits for a signal, the deadline, or `uninstall`."""
        reader = self._pipe[0]
        while True:
            left_s = None if self._ends_by_s is None else self._ends_by_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                self._force()
            elif select.select([reader], [], [], left_s)[0]:
                numbers = os.read(reader, 64)
                if not numbers:
                    os.close(reader)
                    return
                for number in numbers:
                    if number in self._signals:
                        self._count(signal.Signals(number))

    def _count(self, number: signal.Signals) -> None:
        now_s, name = time.monotonic(), number.name
        if not self._orders.count(number):
            return
        if self._first_s is None:
            self._first_s, self._order = now_s, name
            if self._exit_code is None:
                self._end_within(EMPTY_HANDED_S if self._is_empty_handed else self._force_s)
        elif not self._is_rank or now_s - self._first_s >= FORWARDED_S:
            _in_time(lambda: log.warning("second %s: stopping at once", name))
            os._exit(EXIT_CRASHED if self._exit_code is None else self._exit_code)

    def _force(self) -> None:
        """Kill the process, which has not ended by itself."""
        if self._exit_code is not None:
            names = ", ".join(sorted(t.name for t in threading.enumerate() if not t.daemon))
            _in_time(lambda: log.warning("ending without waiting for these threads: %s", names))
            os._exit(self._exit_code)
        if self._is_empty_handed:
            _in_time(lambda: log.info("%s: ending; nothing is lost", self._order))
            os._exit(0)
        seconds = self._force_s
        sentence = f"{self._order}: ended by force after {seconds:g} s, in {self._place()}"
        _in_time(lambda: self._say(sentence))
        os._exit(EXIT_CRASHED)

    def _place(self) -> str:
        """FILE:LINE (FUNCTION) that the event loop executes, otherwise that the work awaits."""
        frame: FrameType | None = sys._current_frames()[self._main]
        assert frame is not None, "the main thread has one"
        if frame.f_globals.get("__name__") == "selectors" and self._task is not None:
            awaited: Any = self._task.get_coro()
            while (inner := getattr(awaited, "cr_frame", None)) is not None:
                if not inner.f_globals["__name__"].startswith("asyncio."):
                    frame = inner
                awaited = awaited.cr_await
        code = frame.f_code
        return f"{Path(code.co_filename).name}:{frame.f_lineno} ({code.co_name})"

    def _say(self, sentence: str) -> None:
        leave_record(StreamRLError(sentence))
        log.critical("%s", sentence)


def _in_time(say: Callable[[], object]) -> None:
    """Log with a time limit: a hanging thread may hold the log's lock."""
    wait([in_thread(say, "log")], _LOG_S)
    sys.stderr.flush()


def _forget_signals() -> None:
    """In a forked child: its signals must not be written to the parent's pipe."""
    with suppress(ValueError):
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_forget_signals)
