"""A process's log as JSON Lines (`run.log_format: json`): each line is one object.

    time       ISO 8601 in UTC, with microseconds
    level      debug, info, warning, error or critical
    role       the process: learner, learner-1, generator-0, buffer, validator, ...
    pid        its id
    logger     the module that logs; stdout or stderr for what was printed; launcher
    message    the text
    exception  the traceback, if there is one

Invariant: everything that Python code of the process logs, prints, warns about or raises without
catching becomes such objects. Lines of native code, or of child processes of libraries, stay as
they are. It is switched on by `streamrl.cli` for a daemon whose launcher asks for it, so that
errors during imports are covered, and by `streamrl.service`. Imports nothing from StreamRL.
"""

import atexit
import io
import json
import logging
import os
import sys
import threading
import time
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, TextIO

FORMAT_VARIABLE = "STREAMRL__RUN__LOG_FORMAT"
"""Sets `run.log_format` of a process, as every setting can be set by the environment."""
_MAX_LINE = 2**16


def json_line(
    role: str, level: str, logger: str, message: str, *, time_s: float, exception: str = ""
) -> str:
    """The object as one line, without the newline."""
    fields: dict[str, Any] = {
        "time": datetime.fromtimestamp(time_s, UTC).isoformat(timespec="microseconds"),
        "level": level,
        "role": role,
        "pid": os.getpid(),
        "logger": logger,
        "message": message,
    }
    return json.dumps({**fields, "exception": exception} if exception else fields)


class JsonFormatter(logging.Formatter):
    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        traceback = self.formatException(record.exc_info) if record.exc_info else ""
        stack = self.formatStack(record.stack_info) if record.stack_info else ""
        return json_line(
            self._role,
            record.levelname.lower(),
            record.name,
            record.getMessage(),
            time_s=record.created,
            exception="\n".join(text for text in (traceback, stack) if text),
        )


class LineWriter(io.TextIOBase):
    """A standard stream that turns each printed line into an object. Libraries do not take it for a
    terminal, and closing it does not close the stream below."""

    def __init__(self, stream: TextIO, role: str, name: str) -> None:
        self.stream = stream
        self._role = role
        self._name = name
        self._lock = threading.RLock()
        self._unfinished = ""

    def write(self, text: str) -> int:
        with self._lock:
            *lines, rest = (self._unfinished + text).replace("\r", "\n").split("\n")
            while len(rest) > _MAX_LINE:
                lines.append(rest[:_MAX_LINE])
                rest = rest[_MAX_LINE:]
            self._unfinished = rest
            for line in lines:
                if line.strip():
                    message = json_line(self._role, "info", self._name, line, time_s=time.time())
                    self.stream.write(message + "\n")
                    self.stream.flush()
        return len(text)

    def finish(self) -> None:
        """Print the unfinished line, if there is one."""
        self.write("\n")

    def flush(self) -> None:
        self.stream.flush()

    def fileno(self) -> int:
        return self.stream.fileno()

    def writable(self) -> bool:
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.stream.encoding

    @property
    def buffer(self) -> Any:
        """The stream for bytes, which stay as they are."""
        return self.stream.buffer


def log_as_json(role: str) -> TextIO:
    """Switch it on, or change the role; returns the standard error for log lines."""
    output, errors = _plain(sys.stdout), _plain(sys.stderr)
    for name, stream in (("stdout", output), ("stderr", errors)):
        writer = LineWriter(stream, role, name)
        setattr(sys, name, writer)
        atexit.register(writer.finish)

    def report(
        kind: type[BaseException], error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        value = error if error is not None else kind()
        record = logging.LogRecord(
            *("uncaught", logging.CRITICAL, "", 0, "%s: %s", (kind.__name__, value)),
            exc_info=(kind, value, traceback),
        )
        errors.write(JsonFormatter(role).format(record) + "\n")
        errors.flush()

    def report_raised(raised: Any) -> None:
        report(raised.exc_type, raised.exc_value, raised.exc_traceback)

    sys.excepthook = report
    threading.excepthook = sys.unraisablehook = report_raised
    logging.captureWarnings(True)
    return errors


def _plain(stream: Any) -> TextIO:
    """The stream below a `LineWriter`, whose last line is finished first."""
    if not isinstance(stream, LineWriter):
        plain: TextIO = stream
        return plain
    stream.finish()
    return stream.stream
