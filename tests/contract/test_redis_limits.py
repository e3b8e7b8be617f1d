"""What `redis://` refuses and how it says so: too little memory, wrong users, wrong groups."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from redis import Redis

from buffers.ledger.state import GROUP
from buffers.redis.memory_limit import RESERVE_BYTES
from streamrl import wire
from streamrl.errors import (
    BufferFullError,
    ConfigError,
    CorruptMessageError,
)
from streamrl.types import DropReason, pack
from tests.contract.conftest import Connect
from tests.records import damaged, fill, lease_one, make_group, make_sibling, make_status
from tests.redis_daemon import RedisDaemon
from tests.redis_server import RedisServer, named_payloads, redis_server


async def test_a_full_server_holds_puts_back_until_a_checkpoint_frees_groups(
    tmp_path: Path, redis_client: Connect
):
    with redis_server(tmp_path, "maxmemory 8mb", "appendonly no") as server:
        buffer = redis_client(server.url, deadline_s=6.0)
        await buffer.attach(0, None)
        await fill(buffer, "a", "b", num_response=174_000)
        assert len((await buffer.take(2, 0, 0.0)).headers) == 2
        await buffer.advance(1)
        with pytest.raises(BufferFullError, match=r"maxmemory is 8\.389 MB.*raise it"):
            await fill(buffer, "c", "d", "e", "f", num_response=174_000)
        stats = await buffer.stats()
        assert (stats.books.leased, stats.books.trained) == (1, 2)
        patient = redis_client(server.url)
        lease_id = "cdef"[stats.books.buffered]
        lease = await lease_one(patient, lease_id, "g", 0.0)
        group = make_group(lease.prompt_index, lease_id=lease_id, num_response=174_000)
        waiting = asyncio.create_task(patient.put(lease_id, group))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        await buffer.acknowledge(1)
        await waiting
        books = (await buffer.stats()).books
        assert (books.acknowledged, books.buffered, books.balanced) == (
            *(2, stats.books.buffered + 1),
            True,
        )


async def test_a_group_is_put_though_its_siblings_have_filled_the_server(
    tmp_path: Path, redis_client: Connect
):
    """Which only its put frees. They themselves wait for no room, and keep no group waiting."""
    with redis_server(tmp_path / "redis") as server:
        buffer = redis_client(server.url, "siblings", deadline_s=600.0)
        await buffer.attach(0, None)
        await lease_one(buffer, "a", "g", 0.0)
        settings = Redis.from_url(server.url)
        size = 400_000
        used = settings.info("memory")["used_memory"]
        settings.config_set("maxmemory", used + RESERVE_BYTES + 5 * size // 2)
        siblings = [make_sibling("a", number) for number in range(3)]
        await buffer.put_sibling(siblings[0], bytes(size))
        await buffer.put_sibling(siblings[1], bytes(size))
        async with asyncio.timeout(120.0):
            with pytest.raises(BufferFullError):
                await buffer.put_sibling(siblings[2], bytes(size))
        await buffer.put("a", make_group(0, lease_id="a", num_response=54_000))
        await buffer.stats()
        assert list(named_payloads(settings, "siblings")) == [(0, GROUP)]
        settings.close()


async def test_the_ledger_works_on_a_server_that_refuses_every_payload(
    own_redis: RedisServer, redis_client: Connect
):
    buffer, hasty = redis_client(own_redis.url), redis_client(own_redis.url, deadline_s=6.0)
    await buffer.attach(0, None)
    await fill(buffer, "a", "b")
    await lease_one(buffer, "c", "g", 0.0)
    server = Redis.from_url(own_redis.url)
    used = server.info("memory")["used_memory"]
    server.config_set("maxmemory", used + RESERVE_BYTES // 2)
    with pytest.raises(BufferFullError, match="a group of"):
        await hasty.put("c", make_group(2, lease_id="c"))
    assert "does not fit into Redis" in (await buffer.stats()).refusal
    await buffer.heartbeat(make_status(lease_ids=("c",)))
    await buffer.take(2, 0, 0.0)
    await buffer.advance(1)
    await buffer.acknowledge(1)
    assert (await buffer.stats()).books.acknowledged == 2
    assert await lease_one(buffer, "d", "g", 0.0) is not None


async def test_a_server_that_may_throw_keys_away_is_refused(tmp_path: Path, redis_client: Connect):
    policy = ("maxmemory 8mb", "maxmemory-policy allkeys-lru")
    refused = pytest.raises(ConfigError, match=r"allkeys-lru .* must be noeviction")
    with redis_server(tmp_path, *policy) as server:
        with refused:
            await redis_client(server.url).attach(0, None)
        daemon = RedisDaemon(server.url, "another")
        await asyncio.to_thread(daemon.wait)
        assert "must be noeviction" in str(daemon.error)


STRANGER = "user stranger on >pw ~elsewhere:* +@all"
USER = "user ours on >s3cret ~streamrl:* resetchannels &streamrl:* +@all -@admin"


async def test_a_user_with_a_password_needs_only_the_keys_of_the_runs(
    tmp_path: Path, redis_client: Connect
):
    with redis_server(tmp_path, USER, STRANGER, "user default off") as server:
        place = server.url.removeprefix("redis://")
        buffer = redis_client(f"redis://ours:s3cret@{place}")
        await buffer.attach(0, None)
        taking = asyncio.create_task(buffer.take(2, 0, 60.0))
        await fill(buffer, "a", "b")
        assert len((await taking).headers) == 2
        assert len(await buffer.fetch([0, 1])) == 2
        await buffer.advance(1)
        await buffer.acknowledge(1)
        assert (await buffer.stats()).incarnation
        for wrong in ("ours:guessed@", "nobody:s3cret@", "stranger:pw@", ""):
            with pytest.raises(ConfigError, match="Redis refuses this user") as caught:
                await redis_client(f"redis://{wrong}{place}").stats()
            assert "guessed" not in str(caught.value)
            assert "s3cret" not in str(caught.value)


async def test_a_malformed_group_is_quarantined_and_its_prompt_dropped(
    redis: RedisServer, redis_client: Connect, tmp_path: Path
):
    buffer = redis_client(redis.url, "malformed", quarantine=tmp_path / "quarantine")
    await buffer.attach(0, None)
    await lease_one(buffer, "s/1", "g", 0.0)
    group = damaged(make_group(0), behavior_logprobs=np.full(7, np.nan, np.float32))
    with pytest.raises(CorruptMessageError, match="NaN"):
        await buffer.put("s/1", group)
    assert (await buffer.stats()).books.dropped == {DropReason.MALFORMED: 1}
    (kept,) = (tmp_path / "quarantine").iterdir()
    assert kept.read_bytes() == wire.encode(pack(group))
    with pytest.raises(CorruptMessageError):
        await buffer.put("s/1", group)
