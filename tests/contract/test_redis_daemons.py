"""`redis://`: daemons that are killed, stopped and followed by another one; what Redis loses."""

import asyncio
import contextlib
import itertools
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from redis import Redis

from buffers.audit import audit_redis
from buffers.journal.journal import Journal
from buffers.ledger.state import GROUP, BufferState
from buffers.redis.client import RedisBuffer
from buffers.redis.connection import Command, RedisConnection
from buffers.redis.journal_storage import RedisStorage
from buffers.redis.leadership import Leadership, served_at
from learners.session import LearnerSession, LearnerState
from streamrl.errors import (
    HandedOverError,
    LedgerError,
    LostMemoryError,
    StorageError,
    UnknownLeaseError,
)
from streamrl.types import DropReason, GroupHeader, TakenBatch
from tests.contract.conftest import Connect
from tests.contract.test_buffer_daemon import Daemon
from tests.contract.test_zmq import make_state
from tests.records import fill, lease_one, make_group, make_sibling, make_status
from tests.redis_daemon import RedisDaemon
from tests.redis_server import RedisServer, named_payloads, redis_server
from tests.training import make_config
from tests.unit.test_session import Reporter
from tests.waiting import DEADLINE_S, until


class Daemons:
    """`streamrl buffer`, several times for one run."""

    def __init__(self, folder: Path, url: str, make: Connect) -> None:
        self.url, self._folder, self._make = url, folder, make
        self.all: list[Daemon] = []

    async def start(self) -> None:
        """Waits until a daemon serves the run."""
        self.all.append(Daemon(self._folder, self.url))
        self.all[-1].start()
        async with asyncio.timeout(DEADLINE_S):
            while not await self._serves():
                await asyncio.sleep(0.1)

    async def _serves(self) -> bool:
        found = await served_at(self.url, "run", deadline_s=DEADLINE_S)
        return found is not None and found.startswith("zmq://")

    def client(self) -> RedisBuffer:
        return self._make(self.url, serves=False, retry_s=0.5, deadline_s=DEADLINE_S)


@pytest.fixture
def daemons(own_redis: RedisServer, tmp_path: Path, redis_client: Connect) -> Iterator[Daemons]:
    daemons = Daemons(tmp_path, own_redis.url, redis_client)
    yield daemons
    for daemon in daemons.all:
        daemon.kill()


async def test_another_daemon_takes_over_from_one_that_is_killed(daemons: Daemons):
    await daemons.start()
    await daemons.start()
    learner, generator = daemons.client(), daemons.client()
    await learner.attach(0, None)
    await fill(generator, "a", "b", "c")
    held = await lease_one(generator, "d", "g", 0.0)
    headers = (await learner.take(2, 0, 5.0)).headers
    incarnation = (await learner.stats()).incarnation
    daemons.all[0].kill()
    assert (await learner.take(2, 0, 5.0, with_payloads=True)).headers == headers
    assert (await learner.stats()).incarnation != incarnation
    kept = await lease_one(generator, "d", "g", 0.0)
    assert (kept.prompt_index, kept.min_policy_version) == (3, held.min_policy_version)
    await generator.put("d", make_group(3, lease_id="d"))
    await learner.advance(1)
    assert len((await learner.take(2, 1, 5.0)).headers) == 2
    await learner.advance(2)
    await learner.acknowledge(2)
    books = (await learner.stats()).books
    assert (books.granted, books.acknowledged, books.balanced) == (4, 4, True)
    audit = await audit_redis(daemons.url, "run")
    assert audit.faults == ()


async def test_a_daemon_that_stood_still_writes_nothing_over_its_successor(daemons: Daemons):
    await daemons.start()
    await daemons.start()
    learner, generator = daemons.client(), daemons.client()
    await learner.attach(0, None)
    await fill(generator, "a")
    daemons.all[0].process.send_signal(signal.SIGSTOP)
    await fill(generator, "b")
    daemons.all[0].process.send_signal(signal.SIGCONT)
    await until(lambda: "taken over" in daemons.all[0].log)
    await fill(generator, "c", "d")
    assert len((await learner.take(4, 0, 5.0, with_payloads=True)).groups) == 4
    assert (await audit_redis(daemons.url, "run")).faults == ()
    daemons.all[1].kill()
    assert (await learner.advance(1)).books.trained == 4


LOST = r"lost the groups of the prompts \[1\]"


async def take_and_lose(learner: RedisBuffer, url: str, run: str, cut: int | None = None) -> None:
    """Two groups are taken, and Redis loses the payload of prompt 1, or the bytes from `cut` on."""
    await learner.attach(0, None)
    await fill(learner, "a", "b")
    assert len((await learner.take(2, 0, 1.0)).headers) == 2
    with Redis.from_url(url) as server:
        key = named_payloads(server, run)[1, GROUP]
        if cut is None:
            server.delete(key)
        else:
            server.set(key, server.get(key)[:cut])


async def test_a_payload_whose_loss_another_rank_finds_is_sampled_again(
    redis: RedisServer, redis_client: Connect
):
    """Each rank fetches its share, and the first one alone has attached."""
    first, second = (redis_client(redis.url, "rank") for _ in range(2))
    await take_and_lose(first, redis.url, "rank")
    with pytest.raises(LostMemoryError, match=LOST):
        await second.fetch([1])
    await first.attach(0, None)
    books = (await first.stats()).books
    assert (books.buffered, books.dropped) == (1, {DropReason.ORPHANED: 1})


@pytest.mark.parametrize("cut", [None, 0, 10, -1])
async def test_a_payload_that_redis_lost_or_has_in_part_is_sampled_again(
    redis: RedisServer, redis_client: Connect, cut: int | None
):
    """A learner that ended for it would meet it again, and end each time."""
    run = f"lost-{cut}"
    buffer = redis_client(redis.url, run)
    await take_and_lose(buffer, redis.url, run, cut)
    with pytest.raises(LostMemoryError, match=LOST):
        await buffer.fetch([0, 1])
    await buffer.attach(0, None)
    books = (await buffer.stats()).books
    assert (books.buffered, books.dropped) == (1, {DropReason.ORPHANED: 1})
    lease = await lease_one(buffer, "c", "g", 0.0)
    assert lease.prompt_index == 1
    await buffer.put("c", make_group(1, lease_id="c"))
    assert len((await buffer.take(2, 0, 1.0, with_payloads=True)).groups) == 2
    assert (await audit_redis(redis.url, run)).faults == ()


async def test_a_payload_that_is_gone_before_its_header_is_sampled_again(
    redis: RedisServer, redis_client: Connect, monkeypatch: pytest.MonkeyPatch
):
    """By a failover in mid-put, or by its expiry: a slow writer, or a clock that jumps ahead."""
    buffer = redis_client(redis.url, "between")
    await buffer.attach(0, None)
    server = Redis.from_url(redis.url)
    write = buffer._write

    async def lose(payload: bytes) -> bytes:
        key = await write(payload)
        server.delete(key)
        return key

    monkeypatch.setattr(buffer, "_write", lose)
    await fill(buffer, "a")
    lease = await lease_one(buffer, "b", "g", 0.0)
    sibling = make_sibling("b")
    await buffer.put_sibling(sibling, b"a sibling")
    monkeypatch.setattr(buffer, "_write", write)
    assert await buffer.fetch_siblings("b") == ()
    await buffer.put("b", make_group(lease.prompt_index, lease_id="b"))
    await fill(buffer, *"c")
    batch = await buffer.take(2, 0, 1.0, with_payloads=True)
    assert sorted(header.prompt_index for header in batch.headers) == [0, 1]
    assert named_payloads(server, "between").keys() == {(0, GROUP), (1, GROUP)}
    assert (await audit_redis(redis.url, "between")).faults == ()


async def test_a_server_that_comes_back_without_its_last_commits_costs_those_only(
    tmp_path: Path, redis_client: Connect
):
    """As after a failover, whose replica lacked them; here from a snapshot."""
    with redis_server(tmp_path / "snapshot", "appendonly no") as server:
        buffer = redis_client(server.url, "snapshot", lease_ttl_s=60.0)
        await buffer.attach(0, None)
        await fill(buffer, "a")
        held = await lease_one(buffer, "b", "g", 0.0)
        sibling = make_sibling("b")
        await buffer.put_sibling(sibling, b"kept")
        Redis.from_url(server.url).save()
        incarnation = (await buffer.stats()).incarnation
        await buffer.put("b", make_group(held.prompt_index, lease_id="b"))
        assert len((await buffer.take(2, 0, 1.0)).headers) == 2
        await buffer.advance(1)
        server.kill()
        server.start()
        # The first change that the daemon would write shows it.
        assert await lease_one(buffer, "c", "g", 0.0) is not None
        await buffer.release("c", DropReason.RELEASED)
        assert (await buffer.stats()).incarnation != incarnation
        assert await buffer.fetch_siblings("b") == (b"kept",)
        # The step that used both is lost to the ledger: the learner goes back to its checkpoint.
        with pytest.raises(LedgerError):
            await buffer.advance(2)
        await buffer.attach(0, None)
        await buffer.put("b", make_group(held.prompt_index, lease_id="b"))
        assert len((await buffer.take(2, 0, 1.0, with_payloads=True)).groups) == 2
        for version in (1, 1):
            await buffer.advance(version)
        await buffer.acknowledge(1)
        books = (await buffer.stats()).books
        assert (books.granted, books.acknowledged, books.balanced) == (3, 2, True)
        audit = await audit_redis(server.url, "snapshot")
        assert audit.faults == ()


async def test_siblings_outlast_their_daemon_and_one_that_redis_lost_is_sampled_again(
    daemons: Daemons,
):
    await daemons.start()
    learner, generator = daemons.client(), daemons.client()
    await learner.attach(0, None)
    await generator.heartbeat(make_status("dead"))
    await lease_one(generator, "dead/1", "dead", 0.0)
    for number in range(3):
        sibling = make_sibling("dead/1", number)
        await generator.put_sibling(sibling, b"sibling %d" % number)
    server = Redis.from_url(daemons.url)
    server.delete(named_payloads(server, "run")[0, 0])
    daemons.all[0].kill()
    await daemons.start()
    await generator.heartbeat(make_status("dead", is_leaving=True))
    lease = await lease_one(generator, "alive/1", "alive", 0.0)
    assert (lease.prompt_index, lease.kept_siblings) == (0, (1, 2))
    assert await generator.fetch_siblings("alive/1") == (b"sibling 1", b"sibling 2")
    server.delete(named_payloads(server, "run")[0, 1])
    assert await generator.fetch_siblings("alive/1") == (b"", b"sibling 2")
    await generator.put("alive/1", make_group(0, lease_id="alive/1"))
    assert list(named_payloads(server, "run")) == [(0, GROUP)]
    assert len(list(server.scan_iter("streamrl:{run}:payload:*"))) == 1
    assert (await audit_redis(daemons.url, "run")).faults == ()


async def test_a_payload_ends_by_itself_exactly_unless_its_header_followed(
    redis: RedisServer, redis_client: Connect
):
    buffer = redis_client(redis.url, "swept")
    await buffer.attach(0, None)
    await fill(buffer, "a")
    alone = await buffer._write(b"without a header")
    server = Redis.from_url(redis.url)
    expiries = {key: server.ttl(key) for key in server.scan_iter("streamrl:{swept}:payload:*")}
    assert expiries.pop(alone) > 600
    assert list(expiries.values()) == [-1]
    await fill(buffer, "b")
    await buffer.take(2, 0, 1.0)
    await buffer.advance(1)
    await buffer.acknowledge(1)
    kept = {key for key in server.scan_iter("streamrl:{swept}:*") if server.ttl(key) == -1}
    assert {key.rpartition(b":")[2] for key in kept} == {b"fence", b"journal", b"events"}


async def test_an_attempt_of_a_put_that_arrives_late_sets_no_expiry_on_what_is_kept(
    redis: RedisServer, redis_client: Connect, monkeypatch: pytest.MonkeyPatch
):
    """As from a connection that was given up, whose bytes the server reads later."""
    buffer = redis_client(redis.url, "late")
    sent: list[Command] = []
    call = RedisConnection.call

    async def record(self: RedisConnection, name: str, *commands: Command) -> list[object]:
        sent.extend(command for command in commands if command[0] == "SET")
        return await call(self, name, *commands)

    await buffer.attach(0, None)
    monkeypatch.setattr(RedisConnection, "call", record)
    await fill(buffer, "a")
    (put,) = (command for command in sent if b"payload" in bytes(command[1]))  # type: ignore[arg-type]
    server = Redis.from_url(redis.url)
    assert server.ttl(put[1]) == -1
    server.execute_command(*put)
    assert server.ttl(put[1]) == -1


async def test_a_daemon_takes_over_although_the_clock_of_the_server_went_back(
    own_redis: RedisServer,
):
    """The entry of a daemon that is gone then expires an hour late."""
    server = Redis.from_url(own_redis.url)
    server.set("streamrl:{late}:daemon", b'{"name": "gone", "url": "", "key": ""}', px=3_600_000)
    async with asyncio.timeout(DEADLINE_S):
        assert await take_term(own_redis.url, "late")


async def test_a_daemon_that_starts_on_a_full_server_waits_for_room(
    own_redis: RedisServer, redis_client: Connect, caplog: pytest.LogCaptureFixture
):
    """It would else be restarted until the run ends, and with it nothing that frees memory."""
    server = Redis.from_url(own_redis.url)
    server.config_set("maxmemory", server.info("memory")["used_memory"] - 1000)
    daemon = RedisDaemon(own_redis.url, "full")
    await until(lambda: "waits for memory in Redis" in caplog.text)
    assert await served_at(own_redis.url, "full", deadline_s=DEADLINE_S) is None
    server.config_set("maxmemory", 0)
    buffer = redis_client(own_redis.url, "full", serves=False, deadline_s=DEADLINE_S)
    await buffer.attach(0, None)
    await asyncio.to_thread(daemon.stop)
    assert daemon.error is None


async def test_a_large_commit_has_more_time_than_a_small_one(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
):
    """One that frees 100,000 groups would else fail for as long as it is tried."""
    connection = RedisConnection(redis.url, "large", deadline_s=DEADLINE_S, retry_s=DEADLINE_S)
    timeouts_s: list[float] = []
    timeout = asyncio.timeout
    monkeypatch.setattr(asyncio, "timeout", lambda s: (timeouts_s.append(s), timeout(s))[1])
    for num_freed in (1, 100_000):
        commands: list[Command] = [("UNLINK", *map(str, range(num_freed)))]
        await connection.transaction("commit", "fence", lambda _, sent=commands: sent, commands)
    assert timeouts_s[1] > timeouts_s[0] + 0.9
    await connection.close()


async def take_term(url: str, run: str) -> str:
    leadership = Leadership(url, run, deadline_s=DEADLINE_S)
    term = await leadership.acquire()
    await leadership.resign()
    await leadership.close()
    return term


def journal_of(
    url: str, run: str, groups_per_step: int = 2
) -> tuple[BufferState[bytes], RedisStorage, Journal[bytes]]:
    state = make_state(groups_per_step)
    storage = RedisStorage(url, run, asyncio.run(take_term(url, run)))
    # A daemon tries again; these tests do not.
    storage._connection.deadline_s = DEADLINE_S
    journal: Journal[bytes] = Journal(storage, state)
    journal.recover({"run.name": run}, 0.0)
    return state, storage, journal


def put(server: "Redis", state: BufferState[bytes], lease_id: str) -> None:
    (lease,) = state.lease([lease_id], "g", 0.0)
    header = GroupHeader.of(make_group(lease.prompt_index, lease_id=lease_id))
    key = f"payload of {lease_id}".encode()
    server.set(key, b"a group", ex=600)
    state.put(lease_id, header, key, 0.0)


async def test_a_daemon_that_has_read_no_journal_serves_nothing(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
):
    """Its books would be blank, and those of the run's folder would be written over."""
    tried = threading.Event()

    def unreadable(*_: object) -> None:
        tried.set()
        raise StorageError("cannot be read now")

    monkeypatch.setattr(Journal, "recover", unreadable)
    daemon = RedisDaemon(redis.url, "unread")
    assert await asyncio.to_thread(tried.wait, DEADLINE_S)
    await asyncio.to_thread(daemon.stop)
    assert (daemon.stats, daemon.error) == (None, None)


@pytest.mark.parametrize("num_lost", [1, 2])
def test_a_commit_whose_answer_was_lost_is_neither_lost_nor_written_twice(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch, num_lost: int
):
    run = f"answer-{num_lost}"
    state, storage, journal = journal_of(redis.url, run)
    server = Redis.from_url(redis.url)
    state.attach(0, None)
    put(server, state, "a")
    journal.commit()
    write = storage._write

    async def lose_the_answer(commands: list[object]) -> object:
        await write(commands)  # type: ignore[arg-type]
        raise StorageError("no answer")

    monkeypatch.setattr(storage, "_write", lose_the_answer)
    for lease_id in "bc"[:num_lost]:
        put(server, state, lease_id)
        with pytest.raises(StorageError):
            journal.commit()
    assert server.ttl("payload of b") == -1
    monkeypatch.setattr(storage, "_write", write)
    # Named by a commit of which nobody knows, and freed before the next one.
    state.lose([(1, GROUP)])
    journal.commit()
    journal.close()
    assert not server.exists("payload of b")
    again, _, other = journal_of(redis.url, run)
    assert again.ledger.books() == state.ledger.books()
    assert asyncio.run(audit_redis(redis.url, run)).faults == ()
    other.close()


def test_no_two_daemons_have_one_term_though_the_server_came_back_blank(own_redis: RedisServer):
    """The successor's commits are as many as those that were lost."""
    state, storage, journal = journal_of(own_redis.url, "blank")
    state.attach(0, None)
    journal.commit()
    server = Redis.from_url(own_redis.url)
    server.flushall()
    again, successor, other = journal_of(own_redis.url, "blank")
    again.attach(0, None)
    other.commit()
    assert storage._confirmed == successor._confirmed
    put(server, state, "a")
    with pytest.raises(HandedOverError):
        journal.commit()
    for one in (journal, other):
        one.close()


def test_a_journal_of_any_size_is_read_by_pages(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
):
    """All of it in one answer would take longer than any daemon waits for one; and the most of a
    takeover is reading the answers, so each group is one value of them."""
    num_groups, page = 400, 50
    state, _, journal = journal_of(redis.url, "pages", num_groups)
    server = Redis.from_url(redis.url)
    state.attach(0, None)
    for number in range(num_groups):
        put(server, state, f"g{number}")
    journal.commit()
    sizes, num_values = [], 0
    call = RedisConnection.call

    async def record(self: RedisConnection, name: str, *commands: Command) -> list[Any]:
        nonlocal num_values
        answers = await call(self, name, *commands)
        if commands[0][0] == "HSCAN":
            num_values += len(answers[0][1])
        if name == "read":
            sizes.append(len(msgspec.msgpack.encode(answers)))
        return answers

    server.delete("payload of g7")
    monkeypatch.setattr("buffers.redis.journal_storage.PAGE", page)
    monkeypatch.setattr(RedisConnection, "call", record)
    again, _, other = journal_of(redis.url, "pages", num_groups)
    assert again.ledger.books().buffered == num_groups - 1
    assert max(sizes) < sum(sizes) / 4
    assert num_values < 1.1 * num_groups
    for one in (journal, other):
        one.close()


def test_the_number_of_the_next_lease_does_not_fall(redis: RedisServer):
    """A commit may be about earlier leases alone."""
    state, _, journal = journal_of(redis.url, "numbers", groups_per_step=1)
    state.attach(0, None)
    with Redis.from_url(redis.url) as server:
        for lease_id in ("a", "b"):
            put(server, state, lease_id)
        journal.commit()
        state.take(1, 0, 1, 0.0)
        journal.commit()
        assert server.hget("streamrl:{numbers}:journal", "next_number") == b"2"
    journal.close()


class Failover:
    """A primary, its replica and a sentinel that promotes it within a few seconds."""

    def __init__(self, folder: Path) -> None:
        self.primary = RedisServer(folder / "primary")
        self.primary.start()
        self.replica = RedisServer(folder / "replica", f"replicaof 127.0.0.1 {self.primary.port}")
        self.replica.start()
        self._sentinel = RedisServer(folder / "sentinel")
        self._sentinel.start_sentinel(
            f"sentinel monitor ours 127.0.0.1 {self.primary.port} 1\n"
            "sentinel down-after-milliseconds ours 5000\n"
            "sentinel failover-timeout ours 10000"
        )
        self.url = f"redis+sentinel://127.0.0.1:{self._sentinel.port}/ours"

    async def until_watched(self) -> None:
        """Until the sentinel knows the replica, which has all that the primary has."""
        sentinel = Redis(port=self._sentinel.port, decode_responses=True)
        replica = Redis(port=self.replica.port)
        async with asyncio.timeout(DEADLINE_S):
            while sentinel.sentinel_masters()["ours"]["num-slaves"] < 1:
                await asyncio.sleep(0.1)
            while replica.info("replication")["master_link_status"] != "up":
                await asyncio.sleep(0.1)

    def cut(self) -> None:
        """From here on the replica gets nothing: it has a password that the primary refuses."""
        replica = Redis(port=self.replica.port)
        replica.config_set("masterauth", "another")
        replica.client_kill_filter(_type="master")

    def stop(self) -> None:
        for server in (self._sentinel, self.replica, self.primary):
            server.kill()


@pytest.fixture
def failover(tmp_path: Path) -> Iterator[Failover]:
    servers = Failover(tmp_path)
    yield servers
    servers.stop()


async def sample(buffer: RedisBuffer, name: str, sampled: list[str]) -> None:
    """As a generator does, until the run is over."""
    for number in itertools.count():
        newest = await buffer.heartbeat(make_status(name))
        if newest.finished:
            break
        lease = await lease_one(buffer, f"{name}/{number}", name, 1.0)
        if lease is None:
            continue
        group = make_group(
            lease.prompt_index,
            lease_id=lease.lease_id,
            num_response=2_000,
            version=max(lease.min_policy_version, newest.policy_version),
        )
        sampled.append(group.group_id)
        with contextlib.suppress(UnknownLeaseError):
            await buffer.put(lease.lease_id, group)
    await buffer.heartbeat(make_status(name, is_leaving=True))


async def waited() -> None:
    """Of a learner that has waited for groups."""


async def test_a_failover_in_mid_put_loses_nothing_and_trains_nothing_twice(
    failover: Failover, redis_client: Connect
):
    """What the replica lacks is sampled anew: groups whose put was answered, steps that used them,
    and payloads whose put is under way."""
    num_steps, groups_per_step = 30, 4
    ledger = {"groups_per_step": groups_per_step, "max_staleness": 2, "final_version": num_steps}
    await failover.until_watched()
    settings = {**ledger, "retry_s": 0.5, "deadline_s": 3 * DEADLINE_S}
    clients = [redis_client(failover.url, **settings) for _ in range(5)]
    learner = {"groups_per_step": groups_per_step}
    config = make_config(learner=learner, buffer={"max_staleness": 2})
    session = LearnerSession(config, clients[0], Reporter(), LearnerState())
    await session.attach()
    sampled: list[str] = []
    trained: list[int] = []
    async with asyncio.TaskGroup() as generators:
        for number, client in enumerate(clients[1:]):
            generators.create_task(sample(client, f"generator-{number}", sampled))
        for version in range(1, num_steps + 1):
            batch = TakenBatch(headers=())
            while len(batch.headers) < groups_per_step:
                batch = await session.take(waited) or batch
            trained += (header.prompt_index for header in batch.headers)
            await session.advance(version, batch)
            if version % 3 == 0:
                await session.acknowledge(version)
            if version == 10:
                failover.cut()
            if version == 13:
                failover.primary.kill()
        # The daemon of a run that is over ends once everybody has left.
        await clients[0].heartbeat(make_status("stays"))
        await session.finish()
    assert Redis(port=failover.replica.port).info("replication")["role"] == "master"
    assert sorted(trained) == list(range(num_steps * groups_per_step))
    assert len(sampled) > len(trained)
    assert (await clients[0].stats()).books.balanced
    assert (await audit_redis(failover.url, "run")).faults == ()
