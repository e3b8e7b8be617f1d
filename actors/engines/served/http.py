"""HTTP to an inference server: JSON both ways, and three kinds of failure kept apart.

    RefusedError          the server answered with an error; the request is not repeated
    ConnectionLostError   no answer; the caller knows whether the request may be repeated
    TransportError        no answer until the retry timeout: the server is gone

Invariant: every call ends by its deadline. Calls that may be repeated go through `retry_lost`.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, cast

import httpx2
import msgspec

from streamrl.errors import StreamRLError, TransportError

T = TypeVar("T")
_CONNECT_S = 10.0
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.05, 2.0


class RefusedError(StreamRLError):
    """An error that the server answered with, its HTTP status and its message."""

    def __init__(self, path: str, status: int, message: str) -> None:
        super().__init__(f"{path} was answered with {status}: {message}")
        self.status = status


class ConnectionLostError(TransportError):
    """The connection broke, or none was made."""


class SlowAnswerError(TransportError):
    """The connection stands, but no answer came in time."""


class Http:
    """One server's address. `request_sync` is for the start of an engine."""

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 60.0) -> None:
        self.url = url.rstrip("/")
        self._timeout = httpx2.Timeout(timeout_s, connect=_CONNECT_S)
        self._headers = {"content-type": "application/json"}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"
        # The engine limits the number of requests, so none waits for a free connection.
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        self._client = httpx2.AsyncClient(limits=limits, trust_env=False)

    async def post(
        self, path: str, body: Any, answer: type[T], *, timeout_s: float | None = None
    ) -> T:
        """The decoded answer. Waits for it, at most `timeout_s` (else the client's timeout).

        Raises:
            RefusedError: any status but 2xx, or an answer of another shape.
            ConnectionLostError, SlowAnswerError: the server may or may not have done it.
        """
        content = msgspec.json.encode(body)
        return cast(T, await self._request("POST", path, content, answer, timeout_s))

    async def send(self, path: str, body: Any, *, timeout_s: float | None = None) -> None:
        """As `post`; the answer is ignored unless it is an error."""
        await self._request("POST", path, msgspec.json.encode(body), Any, timeout_s)

    async def get(self, path: str) -> str:
        """The text of an answer; raises as `post` does."""
        return cast(str, await self._request("GET", path, b"", str, None))

    async def _request(
        self, method: str, path: str, content: bytes, answer: Any, timeout_s: float | None
    ) -> Any:
        timeout = httpx2.Timeout(timeout_s, connect=_CONNECT_S) if timeout_s else self._timeout
        try:
            response = await self._client.request(
                method, self.url + path, content=content, headers=self._headers, timeout=timeout
            )
        except httpx2.RequestError as error:
            raise self._lost(path, error) from error
        return _decoded(path, response, answer)

    def request_sync(
        self, method: str, path: str, body: Any = None, answer: Any = Any, timeout_s: float = 30.0
    ) -> Any:
        """As `post`, blocking the thread."""
        content = b"" if body is None else msgspec.json.encode(body)
        timeout = httpx2.Timeout(timeout_s, connect=_CONNECT_S)
        try:
            with httpx2.Client(timeout=timeout, trust_env=False) as client:
                response = client.request(
                    method, self.url + path, content=content, headers=self._headers
                )
        except httpx2.RequestError as error:
            raise self._lost(path, error) from error
        return _decoded(path, response, answer)

    async def close(self) -> None:
        await self._client.aclose()

    def _lost(self, path: str, error: httpx2.RequestError) -> TransportError:
        message = f"{self.url}{path}: {type(error).__name__} {error}".rstrip()
        if isinstance(error, httpx2.ReadTimeout):
            return SlowAnswerError(message)
        return ConnectionLostError(message)


async def retry_lost(call: Callable[[], Awaitable[T]], retry_timeout_s: float) -> T:
    """Repeats the call while the connection is lost. Waits for an answer, or until
    `retry_timeout_s` after the first loss.

    Raises:
        TransportError: the server is gone.
    """
    wait_s, until_s = _FIRST_WAIT_S, None
    while True:
        try:
            return await call()
        except ConnectionLostError as error:
            until_s = until_s or time.monotonic() + retry_timeout_s
            if time.monotonic() + wait_s > until_s:
                raise TransportError(
                    f"the inference server is gone (no answer for {retry_timeout_s:g} s): {error}"
                ) from error
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)


def _decoded(path: str, response: httpx2.Response, answer: Any) -> Any:
    if not response.is_success:
        raise RefusedError(path, response.status_code, _message(response))
    if answer is str:
        return response.text
    try:
        return msgspec.json.decode(response.content or b"null", type=answer)
    except msgspec.DecodeError as error:
        # Some routes answer with plain text.
        if answer is Any:
            return response.text
        raise RefusedError(path, response.status_code, f"unexpected answer: {error}") from error


def _message(response: httpx2.Response) -> str:
    """The message of an error answer, from whichever of the usual fields holds it."""
    try:
        body = response.json()
    except ValueError:
        return response.text.strip()[:500]
    while isinstance(body, dict):
        body = next((body[k] for k in ("message", "error", "detail") if k in body), str(body))
    return str(body)[:500]
