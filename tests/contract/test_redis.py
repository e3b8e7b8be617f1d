"""What `redis://` promises beyond the contract: about its server's death, waiting, and runs."""

import asyncio
import shutil
import signal
import time
from argparse import Namespace
from functools import partial
from pathlib import Path

import msgspec
import pytest
from redis import Redis

from buffers.ledger.entries import LedgerSnapshot
from buffers.redis.client import RedisBuffer
from buffers.redis.connection import RedisConnection
from buffers.redis.journal_storage import forget, read_snapshot
from buffers.redis.leadership import LEASE_S
from streamrl.cli.buffer import running
from streamrl.errors import (
    ConfigError,
    LedgerError,
    OtherReleaseError,
    StorageError,
    TransportError,
    UnknownLeaseError,
)
from streamrl.types import DropReason
from tests.contract.conftest import Connect
from tests.records import fill, lease_one, make_group, make_status
from tests.redis_daemon import RedisDaemon
from tests.redis_server import RedisServer, redis_server


async def test_a_server_killed_with_its_memory_loses_nothing(
    own_redis: RedisServer, redis_client: Connect
):
    buffer = redis_client(own_redis.url)
    await buffer.attach(0, None)
    await fill(buffer, "a", "b", "c")
    held = await lease_one(buffer, "d", "g", 0.0)
    headers = (await buffer.take(2, 0, 0.0)).headers
    before = await buffer.stats()
    own_redis.kill()
    own_redis.start()
    after = await buffer.stats()
    aside = {"last_heartbeat_age_s": 0.0}
    assert msgspec.structs.replace(after, **aside) == msgspec.structs.replace(before, **aside)
    assert await lease_one(buffer, "d", "g", 0.0) == held
    assert (await buffer.take(2, 0, 0.0)).headers == headers
    assert [group.prompt_index for group in await buffer.fetch([0, 1])] == [0, 1]
    books = (await buffer.advance(1)).books
    assert (books.trained, books.buffered, books.leased, books.balanced) == (2, 1, 1, True)


async def test_calls_that_wait_live_through_a_restart(
    own_redis: RedisServer, redis_client: Connect
):
    learner, generator = redis_client(own_redis.url), redis_client(own_redis.url)
    await learner.attach(0, None)
    await fill(generator, "a", "b", "c")
    await lease_one(generator, "d", "g", 0.0)
    taking = asyncio.create_task(learner.take(4, 0, 60.0))
    leasing = asyncio.create_task(lease_one(generator, "e", "g", 60.0))
    await asyncio.sleep(0.1)
    own_redis.kill()
    beating = asyncio.create_task(generator.heartbeat(make_status(lease_ids=("d",))))
    await asyncio.sleep(0.3)
    putting = asyncio.create_task(generator.put("d", make_group(3, lease_id="d")))
    await asyncio.sleep(0.3)
    assert not any(call.done() for call in (taking, leasing, putting))
    own_redis.start()
    assert (await beating).lost_lease_ids == ()
    await putting
    assert [header.prompt_index for header in (await taking).headers] == [0, 1, 2, 3]
    await learner.advance(1)
    lease = await leasing
    assert lease.prompt_index == 4


async def test_a_server_that_stands_still_is_waited_for(
    own_redis: RedisServer, redis_client: Connect
):
    buffer = redis_client(own_redis.url, retry_s=0.2)
    await buffer.attach(0, None)
    own_redis.signal(signal.SIGSTOP)
    filling = asyncio.create_task(fill(buffer, "a", "b"))
    taking = asyncio.create_task(buffer.take(2, 0, 60.0))
    await asyncio.sleep(1.0)
    assert not any(call.done() for call in (filling, taking))
    own_redis.signal(signal.SIGCONT)
    await filling
    assert len((await taking).headers) == 2
    assert (await buffer.stats()).books.granted == 2


async def test_the_time_for_which_a_client_was_stopped_is_none_for_redis_to_answer(
    redis: RedisServer,
):
    connection = RedisConnection(redis.url, "run", deadline_s=5.0, retry_s=5.0)
    await connection.call("ping", ("PING",))
    asked = asyncio.create_task(connection.call("ping", ("PING",)))
    await asyncio.sleep(0)
    time.sleep(8.0)  # noqa: ASYNC251
    assert await asked == [True]
    await connection.close()


async def test_a_server_that_is_not_there_is_an_error_at_the_deadline(redis_client: Connect):
    buffer = redis_client("redis://:secret@127.0.0.1:9/0", deadline_s=0.4, retry_s=0.1)
    with pytest.raises(TransportError, match=r"not answered StatsRequest for 0\.4 s") as caught:
        await buffer.stats()
    assert "secret" not in str(caught.value)


async def test_a_server_whose_disk_fails_is_waited_for(
    tmp_path: Path, redis_client: Connect, caplog: pytest.LogCaptureFixture
):
    with redis_server(tmp_path / "redis", "appendonly no", "save 9999 9999") as server:
        buffer = redis_client(server.url)
        await buffer.attach(0, None)
        await fill(buffer, "a")
        shutil.rmtree(server.folder)
        admin = Redis.from_url(server.url)
        admin.bgsave()
        while admin.info("persistence")["rdb_last_bgsave_status"] == "ok":
            await asyncio.sleep(0.01)
        filling = asyncio.create_task(fill(buffer, "b"))
        with pytest.raises(StorageError, match="cannot be written"):
            await redis_client(server.url, deadline_s=5.0).release("a", DropReason.FAILED)
        # Of several attempts; a slow server may not have answered the last one.
        assert "MISCONF" in caplog.text
        assert not filling.done()
        server.folder.mkdir()
        admin.config_set("dir", str(server.folder))
        admin.bgsave()
        await filling
        assert (await buffer.stats()).books.buffered == 2
        admin.close()


async def test_runs_on_one_server_do_not_see_each_other(redis: RedisServer, redis_client: Connect):
    one, other = redis_client(redis.url, "one"), redis_client(redis.url, "other")
    await one.attach(0, None)
    assert await lease_one(other, "a", "g", 0.0) is None
    await other.attach(0, None)
    await fill(one, "a", "b")
    await fill(other, "a")
    assert [header.prompt_index for header in (await one.take(2, 0, 0.0)).headers] == [0, 1]
    assert (await one.advance(1)).books.learner_term == 1
    assert (await other.stats()).books.buffered == 1
    assert await forget(redis.url, "one") > 0
    assert await read_snapshot(redis.url, "one") == LedgerSnapshot()
    assert (await other.stats()).books.buffered == 1


def of_run(folder: Path, url: str, name: str) -> partial[Namespace]:
    """What `streamrl buffer books` is given of a run, but for what it is to do."""
    path = folder / "run.yaml"
    path.write_text("model: {path: some-model}\ndata: {source: addition}\n")
    overrides = [f"buffer.url={url}", f"run.name={name}"]
    return partial(Namespace, file=str(path), config=None, overrides=overrides)


async def test_a_run_that_is_under_way_is_not_deleted_for_a_new_one(
    redis: RedisServer, redis_client: Connect, tmp_path: Path
):
    given = of_run(tmp_path, redis.url, "busy")
    daemon = RedisDaemon(redis.url, "busy")
    buffer = RedisBuffer(redis.url, "busy")
    await buffer.attach(0, None)
    with pytest.raises(ConfigError, match=r"a buffer daemon serves a run busy at zmq://127"):
        await running.books(given(require_none=False))
    with pytest.raises(ConfigError, match=r"holds a run busy at version 0 already"):
        await running.books(given(require_none=True))
    await asyncio.to_thread(daemon.stop)
    await running.books(given(require_none=False))
    await running.books(given(require_none=True))
    await buffer.close()


async def test_sentinels_tell_where_the_server_is(
    own_redis: RedisServer, tmp_path: Path, redis_client: Connect
):
    sentinel = RedisServer(tmp_path / "sentinel")
    (tmp_path / "sentinel").mkdir()
    monitor = f"sentinel monitor ours 127.0.0.1 {own_redis.port} 1"
    sentinel.start_sentinel(monitor)
    try:
        buffer = redis_client(f"redis+sentinel://127.0.0.1:9,127.0.0.1:{sentinel.port}/ours")
        await buffer.attach(0, None)
        await fill(buffer, "a")
        assert (await redis_client(own_redis.url).stats()).books.buffered == 1
        unknown = f"redis+sentinel://127.0.0.1:{sentinel.port}/theirs"
        with pytest.raises(TransportError, match=r"\(No master found for 'theirs'\)"):
            await redis_client(unknown, deadline_s=3.0).stats()
    finally:
        sentinel.kill()


@pytest.mark.parametrize("own", ["", "requirepass secret"])
async def test_sentinels_may_have_the_password_of_the_server(own: str, tmp_path: Path):
    sentinel = RedisServer(tmp_path / "sentinel")
    with redis_server(tmp_path / "server", "requirepass secret") as server:
        monitor = f"sentinel monitor ours 127.0.0.1 {server.port} 1"
        sentinel.start_sentinel(f"{monitor}\nsentinel auth-pass ours secret\n{own}")
        url = f"redis+sentinel://:secret@127.0.0.1:{sentinel.port}/ours"
        connection = RedisConnection(url, "run", deadline_s=120.0, retry_s=2.0)
        try:
            assert await connection.call("PING", ("PING",)) == [True]
        finally:
            await connection.close()
            sentinel.kill()


async def test_a_server_that_comes_back_blank_shows_it_to_everybody(
    tmp_path: Path, redis_client: Connect
):
    with redis_server(tmp_path, "appendonly no") as server:
        learner, generator = redis_client(server.url), redis_client(server.url)
        await learner.attach(0, None)
        await fill(generator, "a", "b", "c")
        await lease_one(generator, "d", "g", 0.0)
        await learner.take(2, 0, 0.0)
        books = (await learner.advance(1)).books
        server.kill()
        server.start()
        with pytest.raises(LedgerError, match="lost memory"):
            await learner.take(2, 1, 5.0)
        assert (await generator.heartbeat(make_status(lease_ids=("d",)))).lost_lease_ids == ("d",)
        with pytest.raises(UnknownLeaseError):
            await generator.put("d", make_group(3, lease_id="d"))
        stats = await redis_client(server.url).attach(1, books)
        assert stats.books.balanced
        assert (stats.books.acknowledged, stats.books.dropped) == (2, {DropReason.ORPHANED: 2})
        lease = await lease_one(generator, "e", "g", 0.0)
        assert lease.prompt_index == 2


async def test_a_run_of_another_release_is_refused_and_left_as_it_is(
    redis: RedisServer, redis_client: Connect, tmp_path: Path
):
    name = "of-another-release"
    with Redis.from_url(redis.url) as server:
        key = f"streamrl:{{{name}}}:state"
        server.hset(key, mapping={"version": 3, "epoch": 2, "next_sequence": 9, "granted": 9})
        before = server.hgetall(key)
        buffer = redis_client(redis.url, name)
        calls = (
            lambda: buffer.stats(),
            lambda: buffer.attach(3, None),
            lambda: buffer.lease(["a"], "g", 0.0),
            lambda: buffer.put("a", make_group(0, lease_id="a")),
            lambda: read_snapshot(redis.url, name),
        )
        for call in calls:
            with pytest.raises(OtherReleaseError) as refusal:
                await call()
            assert str(refusal.value) == (
                f"run.name: the run {name} at {redis.url} has format 6, and this release knows "
                "format 10: another release of StreamRL wrote it; start the run anew with --new "
                "(or streamrl buffer books --forget), or go on with that release"
            )
        assert server.hgetall(key) == before
        keys = {name.rpartition(b":")[2] for name in server.keys(f"streamrl:{{{name}}}:*")}
        assert keys <= {b"state", b"daemon"}
        given = of_run(tmp_path, redis.url, name)
        with pytest.raises(OtherReleaseError, match="--new"):
            await running.books(given(require_none=True))
        await asyncio.sleep(LEASE_S)
        await running.books(given(require_none=False))
        assert not server.keys(f"streamrl:{{{name}}}:*")
