"""What `zmq://` promises beyond the contract: about its journal, clocks, and waiting."""

import asyncio
import contextlib
import inspect
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from buffers.journal.journal import Journal
from buffers.journal.sqlite import SqliteStorage
from buffers.ledger.ledger import Ledger
from buffers.ledger.state import BufferState
from buffers.zmq.client import MAX_PUTS
from buffers.zmq.server import ZmqBufferServer
from streamrl.errors import TransportError
from tests.records import fill, lease_one, make_group, make_status
from tests.waiting import until

# Nobody loses a lease to a machine that is busy elsewhere, but in the test that waits for that.
LEASE_TTL_S = 60.0


def make_state(
    groups_per_step: int = 2,
    max_staleness: int = 1,
    lease_ttl_s: float = LEASE_TTL_S,
    run_name: str = "",
) -> BufferState[Any]:
    ledger = Ledger(groups_per_step=groups_per_step, max_staleness=max_staleness)
    return BufferState(ledger, lease_ttl_s=lease_ttl_s, run_name=run_name)


STATE = inspect.signature(make_state).parameters.keys()


@contextlib.contextmanager
def zmq_server(
    folder: Path, url: str = "zmq://127.0.0.1:0", *, journal: bool = False, **settings: Any
) -> Iterator[ZmqBufferServer]:
    """A server in a thread of its own; one with a journal goes on where the last one ended."""
    state = make_state(**{name: settings.pop(name) for name in STATE & settings.keys()})
    with contextlib.ExitStack() as stack:
        if journal:
            kept = Journal(SqliteStorage(folder / "journal.sqlite", durability="process"), state)
            stack.callback(kept.close)
            kept.recover({}, time.monotonic())
            settings["open_journal"] = lambda _: kept
        server = ZmqBufferServer(state, url, quarantine=folder / "quarantine", **settings)
        stop = threading.Event()
        thread = threading.Thread(target=server.serve, args=(stop,))
        thread.start()
        stack.callback(thread.join)
        stack.callback(stop.set)
        yield server


async def test_the_run_ends_where_the_newest_learner_says(tmp_path, zmq_client):
    with zmq_server(tmp_path) as server:
        short, long = (zmq_client(server.url, final_version=version) for version in (1, 2))
        await short.attach(0, None)
        leases = [await lease_one(short, f"s/{i}", "g", 0.0) for i in range(3)]
        assert [lease is not None for lease in leases] == [True, True, False]
        await long.attach(0, None)
        assert await lease_one(long, "s/2", "g", 0.0) is not None


async def test_a_lease_that_a_dead_process_waits_for_goes_to_the_one_in_its_place(
    tmp_path, zmq_client
):
    with zmq_server(tmp_path, lease_ttl_s=600.0) as server:
        dead, alive = (zmq_client(server.url) for _ in range(2))
        await alive.attach(0, None)
        await dead.heartbeat(make_status("g", "first"))
        for i in range(4):
            await lease_one(dead, f"first/{i}", "g", 0.0)
        waiting = asyncio.create_task(dead.lease(["first/4"], "g", 60.0))
        await until(lambda: len(server._pending_requests) == 1)
        await alive.heartbeat(make_status("g", "second"))
        leases = [await lease_one(alive, f"second/{i}", "g", 0.0) for i in range(4)]
        assert None not in leases
        waiting.cancel()


async def test_no_answer_leaves_before_the_journal_has_its_change(tmp_path, zmq_client):
    """Nor that to a request which was pending."""
    with zmq_server(tmp_path, journal=True) as server:
        send, uncommitted = server._replies.send, []

        def recorded(*args: Any) -> None:
            uncommitted.append(len(server._journal._pending))
            send(*args)

        server._replies.send = recorded
        generator, learner = zmq_client(server.url), zmq_client(server.url)
        waiting = asyncio.create_task(generator.lease(["a", "b"], "g", 30.0))
        await until(lambda: len(server._pending_requests) == 1)
        await learner.attach(0, None)
        assert len(await waiting) == 2
        await fill(generator, "a", "b")
        await learner.take(2, 0, 1.0)
        assert set(uncommitted) == {0}


async def test_no_lease_ends_for_a_server_that_stood_still(tmp_path, zmq_client):
    """Its process was stopped, or its disk hung: heartbeats have waited meanwhile."""
    stood_s = [0.0]
    clock = lambda: time.monotonic() + stood_s[0]  # noqa: E731
    with zmq_server(tmp_path, lease_ttl_s=30.0, clock=clock) as server:
        buffer = zmq_client(server.url)
        await buffer.attach(0, None)
        assert await lease_one(buffer, "g/1", "g", 0.0) is not None
        await buffer.heartbeat(make_status("g", lease_ids=("g/1",)))
        stood_s[0] = 100.0
        stats = await buffer.stats()
        assert (len(stats.generators), stats.books.leased) == (1, 1)
        reply = await buffer.heartbeat(make_status("g", lease_ids=("g/1",)))
        assert reply.lost_lease_ids == ()


async def test_a_buffer_that_is_not_there_is_an_error_at_the_deadline(zmq_client):
    buffer = zmq_client("zmq://127.0.0.1:9", deadline_s=0.3, retry_s=0.1)
    with pytest.raises(TransportError, match=r"not answered StatsRequest for 0\.3 s: is it"):
        await buffer.stats()
    assert not buffer._unsent, "it is not asked for when one is there"


async def test_the_time_for_which_a_client_was_stopped_is_none_for_the_buffer_to_answer(
    tmp_path, zmq_client
):
    """As a process is that Slurm suspends."""
    with zmq_server(tmp_path) as server:
        buffer = zmq_client(server.url, deadline_s=5.0, retry_s=5.0)
        await buffer.attach(0, None)
        asyncio.get_running_loop().call_later(0.2, time.sleep, 8.0)
        assert not (await buffer.take(2, 0, 0.5)).headers


async def test_a_client_has_few_payloads_on_their_way(zmq_client):
    buffer = zmq_client("zmq://127.0.0.1:9")
    puts = [asyncio.create_task(buffer.put(f"s/{i}", make_group(i))) for i in range(MAX_PUTS + 2)]
    await until(lambda: len(buffer._unsent) == MAX_PUTS)
    for put in puts:
        put.cancel()
    await asyncio.gather(*puts, return_exceptions=True)
