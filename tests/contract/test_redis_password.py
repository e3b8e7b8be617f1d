"""A Redis with a password, which comes from each of the places where it may be kept."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from buffers.connect import connect
from streamrl.config import load_config
from streamrl.config.secrets import REDIS_PASSWORD
from streamrl.errors import ConfigError
from tests.redis_daemon import RedisDaemon
from tests.redis_server import RedisServer, redis_server

PASSWORD = "p@ss w/rd"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis"), f'requirepass "{PASSWORD}"') as server:
        yield server


async def version(folder: Path, *overrides: str) -> int:
    """The buffer's policy version, read as the daemons read it."""
    file = folder / "run.yaml"
    file.write_text("model: {path: some-model}\ndata: {source: addition}\n")
    buffer = connect(load_config(file, [*overrides, "run.name=run"], {}).config)
    try:
        return (await buffer.stats()).policy_version
    finally:
        await buffer.close()


async def test_a_password_is_accepted_from_each_of_its_places(server, tmp_path, monkeypatch):
    (tmp_path / "password").write_text(f"{PASSWORD}\n")
    bare, user = f"buffer.url={server.url}", server.url.replace("://", "://default@")
    given = server.url.replace("://", f"://:{PASSWORD}@")
    monkeypatch.delenv(REDIS_PASSWORD, raising=False)
    daemon = RedisDaemon(given, "run")
    assert await version(tmp_path, f"buffer.url={given}") == 0
    assert await version(tmp_path, bare, f"buffer.password_file={tmp_path / 'password'}") == 0
    monkeypatch.setenv(REDIS_PASSWORD, PASSWORD)
    assert await version(tmp_path, bare) == 0
    assert await version(tmp_path, f"buffer.url={user}") == 0
    await asyncio.to_thread(daemon.stop)


async def test_who_lacks_it_is_told_where_it_belongs(server, tmp_path, monkeypatch):
    monkeypatch.delenv(REDIS_PASSWORD, raising=False)
    places = f"right password \\({REDIS_PASSWORD} or buffer.password_file\\)"
    with pytest.raises(ConfigError, match=places):
        await version(tmp_path, f"buffer.url={server.url}")
