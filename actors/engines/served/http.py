"""HTTP to an inference server: JSON both ways, and three kinds of trouble kept apart.

    RefusedError          the server answered, and the answer is no; nothing is repeated
    ConnectionLostError   no answer; whoever asked knows whether asking again is harmless
    TransportError        no answer for as long as anybody waits: the server is gone

Invariant: every call ends by its deadline. Calls that are safe to repeat go through `patiently`.
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
    """The server's own no, with its HTTP status and its words."""

    def __init__(self, path: str, status: int, words: str) -> None:
        super().__init__(f"{path} was answered with {status}: {words}")
        self.status = status
        self.words = words


class ConnectionLostError(TransportError):
    """The connection broke or none came about."""


class SlowAnswerError(TransportError):
    """The connection stands, but no answer came in time."""


class Http:
    """One server's address. `now` is for before the event loop has anything else to do."""

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 60.0) -> None:
        self.url = url.rstrip("/")
        self._timeout = httpx2.Timeout(timeout_s, connect=_CONNECT_S)
        self._headers = {"content-type": "application/json"}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"
        # Nothing here may wait for a free connection: who may ask is decided by the engine.
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        self._client = httpx2.AsyncClient(limits=limits, trust_env=False)

    async def post(
        self, path: str, body: Any, answer: type[T], *, timeout_s: float | None = None
    ) -> T:
        """The decoded answer. Waits for it, at most `timeout_s` (else the client's timeout).

        Raises:
            RefusedError: any status but 2xx, or an answer of another shape.
            ConnectionLostError: it is not known whether the server has done what was asked.
            SlowAnswerError: nor here.
        """
        content = msgspec.json.encode(body)
        return cast(T, await self._ask("POST", path, content, answer, timeout_s))

    async def tell(self, path: str, body: Any, *, timeout_s: float | None = None) -> None:
        """As `post`, where no answer is wanted but that it was done."""
        await self._ask("POST", path, msgspec.json.encode(body), Any, timeout_s)

    async def get(self, path: str) -> str:
        """As `post`; the text as it is."""
        return cast(str, await self._ask("GET", path, b"", str, None))

    async def _ask(
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

    def now(
        self, method: str, path: str, body: Any = None, answer: Any = Any, timeout_s: float = 30.0
    ) -> Any:
        """As `post`, blocking; for the start, when nothing else is to be served."""
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
        words = f"{self.url}{path}: {type(error).__name__} {error}".rstrip()
        if isinstance(error, httpx2.ReadTimeout):
            return SlowAnswerError(words)
        return ConnectionLostError(words)


async def patiently(ask: Callable[[], Awaitable[T]], retry_timeout_s: float) -> T:
    """Ask again while the connection is lost. Waits for an answer, or for `retry_timeout_s` since
    the first loss.

    Raises:
        TransportError: the server is gone.
    """
    wait_s, until_s = _FIRST_WAIT_S, None
    while True:
        try:
            return await ask()
        except ConnectionLostError as error:
            until_s = until_s or time.monotonic() + retry_timeout_s
            if time.monotonic() + wait_s > until_s:
                words = (
                    f"the inference server is gone (no answer for {retry_timeout_s:g} s): {error}"
                )
                raise TransportError(words) from error
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)


def _decoded(path: str, response: httpx2.Response, answer: Any) -> Any:
    if not response.is_success:
        raise RefusedError(path, response.status_code, _words(response))
    if answer is str:
        return response.text
    try:
        return msgspec.json.decode(response.content or b"null", type=answer)
    except msgspec.DecodeError as error:
        # Some verbs are answered with a sentence; who expects no shape does not mind.
        if answer is Any:
            return response.text
        raise RefusedError(path, response.status_code, f"unexpected answer: {error}") from error


def _words(response: httpx2.Response) -> str:
    """The message inside an error answer, whichever of the usual places it stands in."""
    try:
        told = response.json()
    except ValueError:
        return response.text.strip()[:500]
    while isinstance(told, dict):
        told = next((told[k] for k in ("message", "error", "detail") if k in told), str(told))
    return str(told)[:500]
