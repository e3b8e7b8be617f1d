"""The screen of `streamrl top`: drawn again as the run goes on, left by q, and put back as it was.

Invariant: however it ends, by a key, a signal or an error, the terminal has its lines, its cursor
and its echo again; while the command is suspended (Ctrl-Z) as well.
Waits for a key, a signal, a new size of the terminal, or the time of the next reading.
"""

import asyncio
import os
import signal
import sys
import termios
import tty
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live

from streamrl.errors import Interrupted

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Screen:
    """`draw` renders what was read last, for the width of the terminal."""

    def __init__(self, console: Console, draw: Callable[[int], RenderableType]) -> None:
        self._console = console
        self._draw = draw
        self._live = Live(console=console, screen=True, auto_refresh=False)
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[signal.Signals | None] = self._loop.create_future()
        self._terminal: list[Any] | None = None

    async def run(self, read: Callable[[], Awaitable[None]], interval_s: float) -> None:
        """Read and draw until a person leaves.

        Raises:
            Interrupted: a signal ended it.
        """
        with self._shown():
            reading = asyncio.create_task(self._read(read, interval_s))
            waited: set[asyncio.Future[Any]] = {self._ended, reading}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                await reading
            reading.cancel()
        if (number := self._ended.result()) is not None:
            raise Interrupted(number)

    async def _read(self, read: Callable[[], Awaitable[None]], interval_s: float) -> None:
        while True:
            await read()
            self._refresh()
            await asyncio.sleep(interval_s)

    def _refresh(self) -> None:
        self._live.update(self._draw(self._console.width), refresh=True)

    @contextmanager
    def _shown(self) -> Iterator[None]:
        handlers: Mapping[signal.Signals, Callable[[], None]] = {
            **{number: partial(self._end, number) for number in _ENDING},
            signal.SIGWINCH: self._refresh,
            signal.SIGTSTP: self._suspend,
        }
        for number, handler in handlers.items():
            self._loop.add_signal_handler(number, handler)
        try:
            self._start()
            yield
        finally:
            self._stop()
            for number in handlers:
                self._loop.remove_signal_handler(number)

    def _start(self) -> None:
        """Keys come at once and are not echoed; without a terminal as input there are none."""
        if sys.stdin.isatty():
            self._terminal = termios.tcgetattr(sys.stdin)
            tty.setcbreak(sys.stdin)
            self._loop.add_reader(sys.stdin, self._on_keys)
        self._live.start()
        self._refresh()

    def _stop(self) -> None:
        self._live.stop()
        if self._terminal is not None:
            self._loop.remove_reader(sys.stdin)
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._terminal)

    def _on_keys(self) -> None:
        try:
            keys = os.read(sys.stdin.fileno(), 64).decode(errors="replace")
        except OSError:
            keys = ""
        has_gone, is_escape = not keys, keys == "\x1b"
        # A key of several characters, such as an arrow, begins with Escape.
        is_quit = "q" in keys.lower() and not keys.startswith("\x1b")
        if has_gone or is_escape or is_quit:
            self._end(None)

    def _end(self, number: signal.Signals | None) -> None:
        if not self._ended.done():
            self._ended.set_result(number)

    def _suspend(self) -> None:
        """Stop, as Ctrl-Z asks for; goes on with SIGCONT."""
        self._stop()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._start()
