"""What the gateway logs of bytes that are no HTTP request.

Invariant: whoever reaches the port can send them without end, so there is a line each LOG_S at
most, without a traceback and without the bytes, which may hold an episode's key. What else the
server logs stays as it is.
"""

import logging
import time

from aiohttp.http_exceptions import HttpProcessingError

LOG_S = 10.0


class StrangerFilter(logging.Filter):
    """Of aiohttp's server logger, which writes a traceback for each."""

    def __init__(self) -> None:
        super().__init__()
        self._logged_s = -LOG_S
        self._num_refused = 0

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, HttpProcessingError):
            return True
        self._num_refused += 1
        now_s = time.monotonic()
        if now_s - self._logged_s < LOG_S:
            return False
        self._logged_s = now_s
        reason = error.message.partition("\n")[0].rstrip(":")
        record.msg = f"refused a request that is no HTTP: {reason} ({self._num_refused} so far)"
        record.args = ()
        record.exc_info = record.exc_text = None
        record.levelno, record.levelname = logging.WARNING, "WARNING"
        return True


def server_log() -> logging.Logger:
    """For one server."""
    log = logging.Logger(__name__)
    log.parent = logging.getLogger("actors.gateway")
    log.addFilter(StrangerFilter())
    return log
