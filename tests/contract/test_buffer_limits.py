"""A buffer that other processes reach, and many of them at once."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from buffers.connect import connect
from streamrl.types import DropReason
from tests.contract.limits_config import GROUPS_PER_STEP, limits_config
from tests.contract.test_zmq import zmq_server
from tests.records import make_status
from tests.redis_daemon import RedisDaemon
from tests.redis_server import redis_server

ROOT = Path(__file__).parents[2]
CLIENT = Path(__file__).with_name("buffer_client.py")
SHARED = ["zmq", "redis"]
# A hang is a hang; eight processes take a busy machine a while to start.
DEADLINE_S = 300.0


@contextlib.contextmanager
def serving(backend: str, folder: Path) -> Iterator[str]:
    """The URL of a buffer that other processes reach."""
    settings = {"groups_per_step": GROUPS_PER_STEP, "max_staleness": 2, "lease_ttl_s": 60.0}
    if backend == "zmq":
        with zmq_server(folder, journal=True, **settings) as server:
            yield server.url
    else:
        with redis_server(folder / "redis") as redis:
            daemon = RedisDaemon(redis.url, "limits", **settings)
            try:
                yield redis.url
            finally:
                daemon.stop()


def start_clients(url: str, count: int) -> "subprocess.Popen[bytes]":
    """Processes of their own, and one that ends when they have."""
    names = [f"client-{index}" for index in range(count)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, str(CLIENT), url, *names], env=environment)


@pytest.mark.parametrize("backend", SHARED)
async def test_eight_client_processes_train_each_prompt_once(backend: str, tmp_path: Path):
    num_steps, trained = 20, []
    with serving(backend, tmp_path) as url:
        generators = start_clients(url, 8)
        learner = connect(limits_config(url))
        await learner.attach(0, None)
        for version in range(num_steps):
            headers = (await learner.take(GROUPS_PER_STEP, version, DEADLINE_S)).headers
            groups = await learner.fetch([header.prompt_index for header in headers])
            trained += [group.prompt_index for group in groups]
            assert (await learner.advance(version + 1)).books.balanced
            await learner.acknowledge(version + 1)
        # Who reports and has not left is waited for by a daemon whose run is over.
        await learner.heartbeat(make_status("stays"))
        await learner.finish()
        assert await asyncio.to_thread(generators.wait, DEADLINE_S) == 0
        books = (await learner.stats()).books
        await learner.close()
    assert len(trained) == len(set(trained)) == num_steps * GROUPS_PER_STEP
    assert (books.leased, books.taken, books.trained, books.balanced) == (0, 0, 0, True)
    assert books.acknowledged == len(trained)
    stale = books.dropped.get(DropReason.STALE, 0)
    assert set(range(books.next_prompt_index)) >= set(trained)
    assert books.next_prompt_index == len(trained) + books.buffered + stale
