"""The thread of a daemon that answers scrapes: GET /metrics over HTTP.

Invariant: it takes no lock of the daemon, renders at most once in RENDER_S, and spends at most
SHARE of a core, however many ask; the next ones wait in the socket's queue. Who does not send its
request or read its answer within ANSWER_S is cut off.
"""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

POLL_S = 0.2
RENDER_S = 1.0
ANSWER_S = 1.0
SHARE = 0.05
_MAX_QUEUED = 32
_MAX_REQUEST_BYTES = 8192
_TEXT = "text/plain; version=0.0.4; charset=utf-8"


class Endpoint:
    """Serves what `render` returns at `address` until `close`; `listening` is bound already."""

    def __init__(self, listening: socket.socket, render: Callable[[], bytes]) -> None:
        self._listening = listening
        self._render = render
        self._page, self._rendered_s = b"", -RENDER_S
        self._stop = threading.Event()
        listening.settimeout(POLL_S)
        listening.listen(_MAX_QUEUED)
        self.address: tuple[str, int] = listening.getsockname()[:2]
        self._thread = threading.Thread(target=self._serve, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Waits ANSWER_S at most."""
        self._stop.set()
        self._thread.join(ANSWER_S + POLL_S)

    def _serve(self) -> None:
        """Waits for a connection, POLL_S at most, and rests after each."""
        with self._listening:
            while not self._stop.is_set():
                try:
                    connection, _ = self._listening.accept()
                except TimeoutError:
                    continue
                except OSError as error:
                    log.warning("metrics: %s", error)
                    self._stop.wait(POLL_S)
                    continue
                start = time.thread_time()
                with connection, contextlib.suppress(OSError):
                    self._answer(connection)
                self._stop.wait((time.thread_time() - start) * (1 / SHARE - 1))

    def _answer(self, connection: socket.socket) -> None:
        """
        Raises:
            OSError: the other side is too slow, or has gone.
        """
        until_s = time.monotonic() + ANSWER_S
        request = b""
        while b"\r\n\r\n" not in request and len(request) < _MAX_REQUEST_BYTES:
            connection.settimeout(max(0.001, until_s - time.monotonic()))
            received = connection.recv(_MAX_REQUEST_BYTES)
            if not received or time.monotonic() > until_s:
                return
            request += received
        connection.settimeout(max(0.001, until_s - time.monotonic()))
        connection.sendall(self._response(request))
        connection.shutdown(socket.SHUT_WR)

    def _response(self, request: bytes) -> bytes:
        method, path = [*request.partition(b"\r\n")[0].split(b" "), b"", b""][:2]
        if method not in (b"GET", b"HEAD"):
            return _message("405 Method Not Allowed", b"only GET\n", with_body=True)
        with_body = method == b"GET"
        if path.partition(b"?")[0] != b"/metrics":
            return _message("404 Not Found", b"see /metrics\n", with_body=with_body)
        return _message("200 OK", self._newest_page(), with_body=with_body)

    def _newest_page(self) -> bytes:
        now_s = time.monotonic()
        if now_s - self._rendered_s >= RENDER_S:
            self._page, self._rendered_s = self._render(), now_s
        return self._page


def _message(status: str, body: bytes, *, with_body: bool) -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {_TEXT}\r\nContent-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + (body if with_body else b"")
