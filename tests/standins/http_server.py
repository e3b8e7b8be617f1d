"""The least of an HTTP/1.1 server: JSON bodies, kept connections, one handler per path."""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

Handler = Callable[[Any], Awaitable[tuple[int, Any]]]


async def serve(handlers: Mapping[str, Handler], host: str, port: int) -> asyncio.Server:
    """Serves until the returned server is closed. A handler's second value is JSON, or text."""

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Waits for the next request on this connection; its end unblocks."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                path = urlsplit(head[0].split(" ")[1]).path
                fields = dict(line.lower().split(": ", 1) for line in head[1:] if line)
                body = await reader.readexactly(int(fields.get("content-length", 0)))
                status, answer = await _answer(handlers, path, body)
                text = answer if isinstance(answer, str) else json.dumps(answer)
                writer.write(f"HTTP/1.1 {status} -\r\ncontent-length: {len(text)}\r\n\r\n".encode())
                writer.write(text.encode())
                await writer.drain()
        writer.close()

    return await asyncio.start_server(converse, host, port)


async def _answer(handlers: Mapping[str, Handler], path: str, body: bytes) -> tuple[int, Any]:
    if path not in handlers:
        return 404, {"detail": "Not Found"}
    try:
        return await handlers[path](json.loads(body) if body else None)
    except (ValueError, KeyError, TypeError) as error:
        return 400, {"error": {"message": f"{type(error).__name__}: {error}"}}
