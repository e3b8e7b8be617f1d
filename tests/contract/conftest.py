"""One Redis server for all contract tests, a run of its own name for each; or one to be killed."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from buffers.redis.client import RedisBuffer
from buffers.zmq.client import ZmqBuffer
from tests.redis_daemon import RedisDaemon
from tests.redis_server import RedisServer, redis_server

Connect = Callable[..., RedisBuffer]


@pytest.fixture(scope="session")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisServer]:
    """A server that the test may kill."""
    with redis_server(tmp_path / "redis") as server:
        yield server


@pytest.fixture
async def zmq_client() -> AsyncIterator[Callable[..., ZmqBuffer]]:
    """Makes clients, and closes them in the end."""
    async with contextlib.AsyncExitStack() as stack:

        def make(url: str, **settings: Any) -> ZmqBuffer:
            client = ZmqBuffer(url, **settings)
            stack.push_async_callback(client.close)
            return client

        yield make


CLIENT = {"deadline_s", "retry_s", "max_group_bytes", "quarantine"}


@pytest.fixture
async def redis_client() -> AsyncIterator[Connect]:
    """Makes clients, and the daemon of each run with its first one, unless the test `serves` it
    itself; closes them in the end."""
    daemons: dict[str, RedisDaemon] = {}
    async with contextlib.AsyncExitStack() as stack:

        def make(url: str, run: str = "run", serves: bool = True, **settings: Any) -> RedisBuffer:
            own = {name: settings.pop(name) for name in CLIENT & settings.keys()}
            if serves and run not in daemons:
                daemons[run] = RedisDaemon(url, run, **settings)
                stack.push_async_callback(asyncio.to_thread, daemons[run].stop)
            client = RedisBuffer(url, run, **{"retry_s": 2.0, **own})
            stack.push_async_callback(client.close)
            return client

        yield make
