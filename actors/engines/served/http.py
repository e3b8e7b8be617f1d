"""HTTP client for inference servers, which may be broken: JSON both ways, and an error for each
kind of failure.

Invariant: every call ends by its deadline, counted from the first byte sent to the last one read,
and reads no more than its limit; answers are not decompressed, redirects not followed, cookies not
kept. Calls that may be repeated go through `retry_lost`.

`readings` gives the gauges of a server's Prometheus page, finite and not negative whatever the page
contains.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any, TypeAlias, TypeVar

import httpx2
import msgspec

from streamrl.errors import StreamRLError, TransportError

T = TypeVar("T")
MAX_ANSWER_BYTES = 16 * 2**20
_MAX_MESSAGE = 500
_CONNECT_S = 10.0
_GET_S = 10.0
# How long an idle connection is reused. vLLM's and SGLang's servers close it after 5 s, and a
# request that meets the close is lost.
KEPT_S = 2.5
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.05, 2.0
# A server that breaks an answer this often will break it again; each try may cost it a whole
# completion.
_MOST_BROKEN = 4
_BUSY = (429, 502, 503, 504)


class RefusedError(StreamRLError):
    """The server answered with an error, with its HTTP status, or with something that is not an
    answer."""

    def __init__(self, path: str, status: int, message: str) -> None:
        super().__init__(f"{path} was answered with {status}: {message}")
        self.status = status


class BusyError(RefusedError):
    """The server takes no requests at present; `wait_s` is how long it asks to wait, 0 if it does
    not say."""

    def __init__(self, path: str, status: int, message: str, wait_s: float) -> None:
        super().__init__(path, status, message)
        self.wait_s = wait_s


class ConnectionLostError(TransportError):
    """No connection was made, or a kept one is gone."""


class BrokenAnswerError(ConnectionLostError):
    """The connection was made, but the answer is incomplete or not HTTP."""


class SlowAnswerError(TransportError):
    """The connection holds, but no complete answer came in time."""


class Http:
    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 60.0) -> None:
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._headers = {"content-type": "application/json", "accept-encoding": "identity"}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._client = httpx2.AsyncClient(
            # The engine limits the number of requests, so none waits for a free connection.
            limits=httpx2.Limits(
                max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEPT_S
            ),
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
            trust_env=False,
        )

    async def post(
        self,
        path: str,
        body: Any,
        answer: type[T],
        *,
        timeout_s: float | None = None,
        max_bytes: int = MAX_ANSWER_BYTES,
    ) -> T:
        """Post a request and return the decoded answer. Waits for it, at most `timeout_s` (by
        default the client's timeout).

        Raises:
            RefusedError: any status but 2xx, or an answer of another shape or of more bytes.
            ConnectionLostError, SlowAnswerError: the server may or may not have done it.
        """
        content = await self._request("POST", path, body, timeout_s, max_bytes)
        return decoded(path, content, answer)

    async def send(self, path: str, body: Any, *, timeout_s: float | None = None) -> None:
        """Like `post`, but the answer is ignored unless it is an error."""
        await self._request("POST", path, body, timeout_s)

    async def get(self, path: str, answer: type[T], *, timeout_s: float = _GET_S) -> T:
        """The decoded answer; raises as `post` does."""
        content = await self._request("GET", path, timeout_s=timeout_s)
        return decoded(path, content, answer)

    async def text(self, path: str) -> str:
        """The text of an answer; raises as `post` does."""
        return (await self._request("GET", path, timeout_s=_GET_S)).decode(errors="replace")

    async def close(self) -> None:
        await self._client.aclose()

    async def _request(
        self,
        method: str,
        path: str,
        body: Any = None,
        timeout_s: float | None = None,
        max_bytes: int = MAX_ANSWER_BYTES,
    ) -> bytes:
        where, timeout_s = self.url + path, timeout_s or self._timeout_s
        content = b"" if body is None else msgspec.json.encode(body)
        timeout = httpx2.Timeout(timeout_s, connect=_CONNECT_S)
        request = self._client.stream(
            method, where, content=content, headers=self._headers, timeout=timeout
        )
        try:
            async with asyncio.timeout(timeout_s), request as response:
                content = await _read(path, response, max_bytes)
        except (TimeoutError, httpx2.ReadTimeout, httpx2.WriteTimeout) as error:
            raise SlowAnswerError(f"{where} has not answered within {timeout_s:g} s") from error
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            raise ConnectionLostError(_sentence(where, error)) from error
        except httpx2.RequestError as error:
            raise BrokenAnswerError(_sentence(where, error)) from error
        _require_success(path, response, content)
        return content


def decoded(path: str, content: bytes, answer: type[T]) -> T:
    """Raise RefusedError if the answer has another shape."""
    try:
        return msgspec.json.decode(content, type=answer)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        begins = _shown(content[:60].decode(errors="replace"))
        message = f"unexpected answer: {error} (it begins with {begins!r})"
        raise RefusedError(path, 200, message) from error


async def retry_lost(call: Callable[[], Awaitable[T]], retry_timeout_s: float) -> T:
    """Repeat the call while the connection is lost or the server busy. Waits for an answer, until
    `retry_timeout_s` after the first failure.

    Raises:
        TransportError: no connection is made any more: the server is gone.
        BusyError: it is busy for too long.
        BrokenAnswerError: it breaks each answer.
    """
    wait_s, until_s, num_broken = _FIRST_WAIT_S, None, 0
    while True:
        try:
            return await call()
        except (BusyError, ConnectionLostError) as error:
            until_s = until_s or time.monotonic() + retry_timeout_s
            pause_s = max(wait_s, error.wait_s) if isinstance(error, BusyError) else wait_s
            is_late = time.monotonic() + pause_s > until_s
            num_broken += isinstance(error, BrokenAnswerError)
            is_there = isinstance(error, BusyError | BrokenAnswerError)
            if num_broken == _MOST_BROKEN or (is_late and is_there):
                raise
            if is_late:
                raise TransportError(
                    f"the inference server is gone (no answer for {retry_timeout_s:g} s): {error}"
                ) from error
        await asyncio.sleep(pause_s)
        wait_s = min(2 * wait_s, _LONGEST_WAIT_S)


async def _read(path: str, response: httpx2.Response, max_bytes: int) -> bytes:
    """The body as sent. Waits for its end, or for more than `max_bytes`."""
    if (encoding := response.headers.get("content-encoding", "identity")) != "identity":
        message = f"a body that is compressed ({_shown(encoding)}), which was not asked for"
        raise RefusedError(path, response.status_code, message)
    content = bytearray()
    async for part in response.aiter_raw():
        content += part
        if len(content) > max_bytes:
            message = f"a body of more than {max_bytes} bytes"
            raise RefusedError(path, response.status_code, message)
    return bytes(content)


def _require_success(path: str, response: httpx2.Response, content: bytes) -> None:
    status = response.status_code
    if response.is_success:
        return
    if response.is_redirect:
        target = _shown(response.headers.get("location", ""))
        raise RefusedError(path, status, f"a redirect to {target}, which is not followed")
    if status in _BUSY:
        raise BusyError(path, status, _message(content), _seconds(response))
    raise RefusedError(path, status, _message(content))


def _seconds(response: httpx2.Response) -> float:
    """The wait that Retry-After asks for; 0 if it is missing or a date."""
    text = response.headers.get("retry-after", "")
    return float(text) if text.isascii() and text.isdigit() else 0.0


def _message(content: bytes) -> str:
    """The message of an error answer, from whichever usual field holds it."""
    try:
        body = msgspec.json.decode(content)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return _shown(content.decode(errors="replace"))
    while isinstance(body, dict):
        body = next((body[k] for k in ("message", "error", "detail") if k in body), str(body))
    return _shown(str(body))


def _sentence(where: str, error: httpx2.RequestError) -> str:
    return f"{where}: {type(error).__name__} {_shown(str(error))}".rstrip()


def _shown(text: str) -> str:
    """A text on one line, shortened, without terminal control characters."""
    printable = "".join(c if c.isprintable() else " " for c in text[: 4 * _MAX_MESSAGE])
    return " ".join(printable.split())[:_MAX_MESSAGE]


# Our gauge: the server's name for it, and a label that must be in the braces ("" for any).
Names: TypeAlias = Mapping[str, tuple[str, str]]
LARGEST = 2.0**53
"""The largest reading: beyond it floats are not exact, and a status has integers of 64 bits."""


def readings(page: str, names: Names) -> dict[str, float]:
    """Our gauges, each the sum over the lines that match its name; 0 without such a line.

    >>> page = 'vllm:num_requests_running{engine="0"} 3.0'
    >>> readings(page, {"num_active": ("vllm:num_requests_running", "")})
    {'num_active': 3.0}
    """
    sums = dict.fromkeys(names, 0.0)
    for line in page.splitlines():
        series, _, value = line.rpartition(" ")
        name, _, labels = series.partition("{")
        for gauge, (wanted, label) in names.items():
            if name == wanted and label in labels:
                sums[gauge] += _number(value)
    return {gauge: min(total, LARGEST) for gauge, total in sums.items()}


def _number(text: str) -> float:
    """Parse a reading; 0 for anything that no gauge can have."""
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return min(value, LARGEST) if value > 0 else 0.0
