"""A command in a terminal of its own: a pseudo-terminal whose size, keys and state a test has."""

import fcntl
import os
import pty
import select
import signal
import struct
import termios
import time
from collections.abc import Callable, Sequence

DEADLINE_S = 240.0
HIDDEN, CURSOR = "\x1b[?25l", "\x1b[?25h"


class Terminal:
    """`output` is what the command has written so far."""

    def __init__(self, arguments: Sequence[str], *, rows: int = 40, columns: int = 80) -> None:
        self.pid, self._descriptor = pty.fork()
        if self.pid == 0:
            environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
            os.execve(arguments[0], arguments, {**environment, "TERM": "xterm-256color"})
        self.output = ""
        self.resize(rows, columns)

    def resize(self, rows: int, columns: int) -> None:
        size = struct.pack("HHHH", rows, columns, 0, 0)
        fcntl.ioctl(self._descriptor, termios.TIOCSWINSZ, size)

    def until(self, condition: Callable[[str], bool]) -> None:
        """Waits until the condition holds of what was written since the last call."""
        start, deadline = len(self.output), time.monotonic() + DEADLINE_S
        while not condition(self.output[start:]):
            assert time.monotonic() < deadline, self.output[start:]
            assert self._read(), f"it ended: {self.output[start:]}"

    def end(self) -> int:
        """Waits for the command's end; its exit code."""
        deadline = time.monotonic() + DEADLINE_S
        while self._read():
            assert time.monotonic() < deadline, self.output[-2000:]
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def kill(self) -> None:
        """If it still runs."""
        try:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass

    def _read(self) -> bool:
        """False once the command has closed the terminal."""
        if not select.select([self._descriptor], [], [], 1.0)[0]:
            return True
        try:
            data = os.read(self._descriptor, 65_536)
        except OSError:
            return False
        self.output += data.decode(errors="replace")
        return bool(data)


def is_put_back(output: str) -> bool:
    """Whether the cursor was hidden and is there again."""
    return output.rfind(CURSOR) > output.rfind(HIDDEN) >= 0
