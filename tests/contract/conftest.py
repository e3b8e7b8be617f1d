"""One Redis server for all contract tests, a run of its own name for each; or one to be killed."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from buffers.redis.client import RedisBuffer
from streamrl.types import GeneratorStatus
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


LEDGER = {"groups_per_step", "max_staleness", "final_version", "lease_ttl_s", "max_group_bytes"}


@pytest.fixture
async def redis_client() -> AsyncIterator[Connect]:
    """Makes clients, and the daemon of each run with its first one; closes them in the end."""
    clients: list[RedisBuffer] = []
    daemons: dict[str, RedisDaemon] = {}

    def make(url: str, run: str = "run", **settings: Any) -> RedisBuffer:
        if run not in daemons:
            ledger = {name: settings[name] for name in LEDGER & settings.keys()}
            daemons[run] = RedisDaemon(url, run, **ledger)
        own = {name: value for name, value in settings.items() if name not in LEDGER}
        if "max_group_bytes" in settings:
            own["max_group_bytes"] = settings["max_group_bytes"]
        clients.append(RedisBuffer(url, run, **{"deadline_s": 60.0, "retry_s": 2.0, **own}))
        return clients[-1]

    yield make
    for client in clients:
        await client.close()
    for daemon in daemons.values():
        await asyncio.to_thread(daemon.stop)


def status(**fields: object) -> GeneratorStatus:
    return GeneratorStatus(generator_id="g", session="g", policy_version=0, **fields)
