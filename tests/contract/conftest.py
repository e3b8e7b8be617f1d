"""One Redis server for all contract tests; each test is a run of its own name there."""

from collections.abc import Iterator

import pytest

from tests.redis_server import RedisServer, redis_server


@pytest.fixture(scope="session")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server
