"""A service on the loopback interface, which answers as a test says."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

Answer = Callable[[dict[str, Any]], tuple[int, Any]]


@dataclass
class Service:
    """`requests` are the paths, headers and bodies that came; `most` ran at a time."""

    answer: Answer
    url: str = ""
    delay_s: float = 0.0
    requests: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)
    running: int = 0
    most: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                await self._reply(head.decode(), reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _reply(
        self, head: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        lines = head.lower().splitlines()
        length = next(int(line[15:]) for line in lines if line.startswith("content-length:"))
        body = json.loads(await reader.readexactly(length))
        self.requests.append((head.split()[1], head, body))
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(self.delay_s)
        self.running -= 1
        status, value = self.answer(body)
        content = json.dumps(value).encode()
        writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(content)}\r\n\r\n".encode())
        writer.write(content)
        await writer.drain()


@asynccontextmanager
async def serving(answer: Answer, delay_s: float = 0.0) -> AsyncIterator[Service]:
    service = Service(answer, delay_s=delay_s)
    server = await asyncio.start_server(service.serve, "127.0.0.1", 0)
    service.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield service
    finally:
        server.close()
