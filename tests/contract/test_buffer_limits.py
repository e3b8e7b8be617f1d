"""What every backend promises at the edges: many processes, large groups, long lines, dead ends.

A further backend joins by a line in BACKENDS and a case in `serving`. zmq has a journal here;
`test_buffers.py` has it without one, too.
"""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest

from buffers.connect import connect
from buffers.ledger.ledger import Ledger
from buffers.ledger.state import BufferState
from buffers.memory import MemoryBuffer
from streamrl.interfaces import TrajectoryBuffer
from streamrl.types import DropReason, GeneratorStatus, TrajectoryGroup
from tests.contract.limits_config import GROUPS_PER_STEP, limits_config
from tests.contract.test_buffers import zmq_server
from tests.records import lease_one, make_group
from tests.redis_daemon import RedisDaemon
from tests.redis_server import redis_server

Connect = Callable[[], TrajectoryBuffer]
ROOT = Path(__file__).parents[2]
CLIENT = Path(__file__).with_name("buffer_client.py")
SHARED = ["zmq", "redis"]
BACKENDS = ["memory", *SHARED]
TTL_S = 60.0
MANY = 3_000


@contextlib.contextmanager
def serving(backend: str, folder: Path, max_staleness: int) -> Iterator[str]:
    """The URL of a buffer that other processes reach."""
    match backend:
        case "redis":
            with redis_server(folder / "redis") as redis:
                settings = {"groups_per_step": GROUPS_PER_STEP, "lease_ttl_s": TTL_S}
                daemon = RedisDaemon(redis.url, "limits", max_staleness=max_staleness, **settings)
                try:
                    yield redis.url
                finally:
                    daemon.stop()
        case "zmq":
            ledger = Ledger(groups_per_step=GROUPS_PER_STEP, max_staleness=max_staleness)
            with zmq_server(folder, journal=True, lease_ttl_s=TTL_S, ledger=ledger) as server:
                yield server.url
        case _:
            raise NotImplementedError(backend)


@asynccontextmanager
async def clients(backend: str, folder: Path, max_staleness: int) -> AsyncIterator[Connect]:
    """Makes clients of one buffer in this process; they are closed in the end."""
    made: list[TrajectoryBuffer] = []
    with contextlib.ExitStack() as stack:
        if backend == "memory":
            ledger = Ledger(groups_per_step=GROUPS_PER_STEP, max_staleness=max_staleness)
            state = BufferState[TrajectoryGroup](ledger, lease_ttl_s=TTL_S)
            make: Connect = MemoryBuffer(state).client
        else:
            url = stack.enter_context(serving(backend, folder, max_staleness))

            def make() -> TrajectoryBuffer:
                return connect(limits_config(url, max_staleness))

        def remembered() -> TrajectoryBuffer:
            made.append(make())
            return made[-1]

        yield remembered
        for client in made:
            await client.close()


def start_clients(url: str, count: int) -> "subprocess.Popen[bytes]":
    """Processes of their own, and one that ends when they have."""
    names = [f"client-{index}" for index in range(count)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, str(CLIENT), url, *names], env=environment)


@pytest.mark.parametrize("backend", SHARED)
async def test_eight_client_processes_train_each_prompt_once(backend: str, tmp_path: Path):
    num_steps, trained = 20, []
    with serving(backend, tmp_path, max_staleness=2) as url:
        generators = start_clients(url, 8)
        learner = connect(limits_config(url, max_staleness=2))
        await learner.attach(0, None)
        # Who reports and has not left is waited for by a daemon whose run is over.
        stays = GeneratorStatus(generator_id="stays", session="stays", policy_version=0)
        await learner.heartbeat(stays)
        for version in range(num_steps):
            headers = (await learner.take(GROUPS_PER_STEP, version, 60.0)).headers
            groups = await learner.fetch([header.prompt_index for header in headers])
            trained += [group.prompt_index for group in groups]
            assert (await learner.advance(version + 1)).books.balanced
            await learner.acknowledge(version + 1)
        await learner.finish()
        assert await asyncio.to_thread(generators.wait, 120.0) == 0
        books = (await learner.stats()).books
        await learner.close()
    assert len(trained) == len(set(trained)) == num_steps * GROUPS_PER_STEP
    assert (books.leased, books.taken, books.trained, books.balanced) == (0, 0, 0, True)
    assert books.acknowledged == len(trained)
    stale = books.dropped.get(DropReason.STALE, 0)
    assert set(range(books.next_prompt_index)) >= set(trained)
    assert books.next_prompt_index == len(trained) + books.buffered + stale


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_group_of_64_mb_passes_unchanged(backend: str, tmp_path: Path):
    async with clients(backend, tmp_path, max_staleness=1) as make:
        generator, learner = make(), make()
        await learner.attach(0, None)
        # 6 bytes a token; 64 MiB is the default of buffer.max_group_bytes.
        large = make_group(0, lease_id="a", num_response=5_330_000)
        assert await lease_one(generator, "a", "g", 0.0) is not None
        await generator.put("a", large)
        await fill(generator, GROUPS_PER_STEP - 1)
        headers = (await learner.take(GROUPS_PER_STEP, 0, 10.0)).headers
        assert headers[0].lengths == (5_330_003, 5_330_003)
        (back,) = await learner.fetch([0])
        for ours, theirs in zip(large.trajectories, back.trajectories, strict=True):
            assert np.array_equal(ours.token_ids, theirs.token_ids)
            assert np.array_equal(ours.behavior_logprobs, theirs.behavior_logprobs)
        await learner.advance(1)
        await learner.acknowledge(1)
        assert (await learner.stats()).num_bytes == 0


@pytest.mark.parametrize("backend", BACKENDS)
async def test_thousands_of_groups_wait_and_are_lent_oldest_first(backend: str, tmp_path: Path):
    max_staleness = MANY // GROUPS_PER_STEP - 1
    async with clients(backend, tmp_path, max_staleness) as make:
        generator, learner = make(), make()
        await learner.attach(0, None)
        await fill(generator, MANY)
        assert await lease_one(generator, "one too many", "g", 0.0) is None
        books = (await learner.stats()).books
        assert (books.buffered, books.balanced) == (MANY, True)
        for version in range(3):
            headers = (await learner.take(GROUPS_PER_STEP, version, 10.0)).headers
            first = version * GROUPS_PER_STEP
            assert [h.prompt_index for h in headers] == list(range(first, first + GROUPS_PER_STEP))
            assert len(await learner.fetch([h.prompt_index for h in headers])) == GROUPS_PER_STEP
            books = (await learner.advance(version + 1)).books
        assert (books.buffered, books.trained, books.balanced) == (MANY - 30, 30, True)


async def fill(buffer: TrajectoryBuffer, count: int) -> None:
    """So many groups of version 0, a hundred at once."""
    first = make_group(0)
    for start in range(0, count, 100):
        names = [f"fill/{number}" for number in range(start, min(start + 100, count))]
        leases = await buffer.lease(names, "g", 0.0)
        assert len(leases) == len(names)
        groups = [
            msgspec.structs.replace(first, prompt_index=lease.prompt_index, group_id=lease.lease_id)
            for lease in leases
        ]
        await asyncio.gather(*(buffer.put(g.group_id, g) for g in groups))
