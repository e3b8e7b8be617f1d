"""A buffer daemon and requests that no client of ours sends: each is refused, and nothing else."""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import xxhash
import zmq
import zmq.asyncio

from buffers import messages as m
from buffers.audit import audit_journal
from buffers.journal.sqlite import journal_path
from buffers.zmq import multipart, server
from streamrl import wire
from streamrl.errors import LedgerError, LostMemoryError, TransportError, WireError
from streamrl.types import (
    Books,
    Lease,
    RefusalReason,
    SchedulingState,
    pack,
    replace,
)
from tests.contract.test_buffer_daemon import Daemon
from tests.contract.test_zmq import zmq_server
from tests.records import fill, lease_one, make_group, make_status

MB = 2**20


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[Daemon]:
    """One that has served somebody."""
    daemon = Daemon(tmp_path)
    daemon.start()
    await daemon.client().attach(0, None)
    yield daemon
    await daemon.close()


class Stranger:
    """A connection that sends whatever frames it likes."""

    def __init__(self, url: str) -> None:
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self._socket.connect(url.replace("zmq", "tcp"))

    async def send(self, *frames: bytes) -> None:
        await self._socket.send_multipart([b"id", *frames])

    async def call_together(self, parts: list[list[bytes]]) -> None:
        """In one message; waits for the replies, which come in one."""
        await self._socket.send_multipart(multipart.joined(parts))
        await asyncio.wait_for(self._socket.recv_multipart(), 120)

    async def call(self, *frames: bytes) -> Any:
        await self.send(*frames)
        _, reply, *_ = await asyncio.wait_for(self._socket.recv_multipart(), 120)
        return wire.decode(reply, m.Reply)

    def close(self) -> None:
        self._socket.close(linger=0)


def enveloped(body: bytes) -> bytes:
    """Any body, with a checksum that is right."""
    checksum = xxhash.xxh3_64_intdigest(body)
    return msgspec.msgpack.encode((wire.SCHEMA_VERSION, checksum, msgspec.Raw(body)))


def books(**changes: Any) -> Books:
    return Books(granted=4, acknowledged=4, next_prompt_index=4, **changes)


def held(**changes: Any) -> Lease:
    fields = {"prompt_index": 0, "min_policy_version": 0, **changes}
    return Lease(lease_id="s/1", **fields)


FAR = Books(granted=2**40, acknowledged=2**40, next_prompt_index=2**40, open_ranges=((0, 2**30),))

HOSTILE: dict[str, bytes] = {
    **{
        f"{kind} nested {depth} times": enveloped(head * depth + b"\xc0")
        for kind, head in (("array", b"\x91"), ("map", b"\x81\xa4type"))
        for depth in (1_000, 100_000)
    },
    "an array that nothing follows": enveloped(b"\xdd\xff\xff\xff\xff"),
    **{
        name: wire.encode(request)
        for name, request in {
            "take -1": m.TakeRequest(-1, 0, 1, 0.0, False),
            "take 0": m.TakeRequest(0, 0, 1, 0.0, False),
            "take 2**63": m.TakeRequest(2**63, 0, 1, 0.0, False),
            "take, held -1": m.TakeRequest(2, 0, 1, 0.0, False, -1),
            "take for ever": m.TakeRequest(2, 0, 1, math.inf, False),
            "take NaN": m.TakeRequest(2, 0, 1, math.nan, False),
            "lease NaN": m.LeaseRequest(("s/1",), "g", math.nan),
            "lease 10**4 names": m.LeaseRequest(("s/1",) * 10_000, "g", 0.0),
            "lease a long name": m.LeaseRequest(("s" * 10**6,), "g", 0.0),
            "lease of nobody": m.LeaseRequest(("s/1",), "", 0.0),
            "a line break": m.ReleaseRequest("s\nerror", "failed"),  # type: ignore[arg-type]
            "held at 2**64-1": m.HeartbeatRequest(
                make_status(held=(held(min_policy_version=2**64 - 1),))
            ),
            "held prompt 2**63": m.HeartbeatRequest(make_status(held=(held(prompt_index=2**63),))),
            "reports 2**64-1": m.HeartbeatRequest(make_status(policy_version=2**64 - 1)),
            "reports NaN": m.HeartbeatRequest(make_status(tokens_per_s=math.nan)),
            "attach 2**63": m.AttachRequest(2**63, None, "a"),
            "attach -1": m.AttachRequest(-1, None, "a"),
            "attach, open 2**30 of 2**40": m.AttachRequest(0, FAR, "a"),
            "attach, next 2**62": m.AttachRequest(0, Books(next_prompt_index=2**62), "a"),
            "attach, unbalanced": m.AttachRequest(0, books(trained=3), "a"),
            "fetch -1": m.FetchRequest((-1,)),
            "fetch twice": m.FetchRequest((0, 0)),
            "advance 2**63": m.AdvanceRequest(2**63, 1),
            "acknowledge -1": m.AcknowledgeRequest(-1, 1),
            "finish 2**64-1": m.FinishRequest(2**64 - 1),
            "cordon nobody": m.SchedulingStateRequest("g" * 300, SchedulingState.CORDONED),
        }.items()
    },
}


async def test_a_request_out_of_range_is_refused_and_changes_nothing(daemon: Daemon):
    client = daemon.client()
    before = (await client.stats()).books
    rss = psutil.Process(daemon.process.pid).memory_info().rss
    for name, message in HOSTILE.items():
        stranger = Stranger(daemon.url)
        reply = await stranger.call(message)
        stranger.close()
        assert isinstance(reply, m.ErrorReply), name
        assert isinstance(reply.exception(), (WireError, LedgerError)), (name, reply)
        assert (await client.stats()).books == before, name
    assert psutil.Process(daemon.process.pid).memory_info().rss < rss + 64 * MB
    await fill(client, "s/a")
    assert daemon.end() == 0
    assert audit_journal(journal_path(daemon.run)).faults == ()


async def test_a_group_that_is_lost_before_it_is_written_is_sampled_again(daemon: Daemon):
    """Put, lent and called lost in one message, which is one commit."""
    client, stranger = daemon.client(), Stranger(daemon.url)
    await client.attach(0, None)
    lease = await lease_one(client, "s/1", "g", 0.0)
    group = wire.encode(pack(make_group(lease.prompt_index, lease_id="s/1")))
    parts = [
        [b"put", wire.encode(m.PutRequest("s/1")), group],
        [b"take", wire.encode(m.TakeRequest(1, 0, 2, 0.0, False))],
        [b"lost", wire.encode(m.LostRequest((lease.prompt_index,), 0))],
    ]
    await stranger.call_together(parts)
    assert (await client.stats()).books.taken == 1
    with pytest.raises(LostMemoryError):
        await client.fetch([lease.prompt_index])
    await client.attach(0, None)
    again = await lease_one(client, "s/2", "g", 0.0)
    assert again.prompt_index == lease.prompt_index
    stranger.close()
    daemon.kill()
    assert audit_journal(journal_path(daemon.run)).faults == ()


async def test_books_far_ahead_cost_nothing_and_the_audit_knows_them(daemon: Daemon):
    """A lost journal: what the learner's checkpoint contains is not granted again."""
    client = daemon.client()
    far = 2**39
    still_open = ((far - 3, far),)
    ahead = Books(
        granted=far, acknowledged=far, next_prompt_index=far, open_ranges=still_open, revision=far
    )
    stats = await client.attach(1, ahead)
    assert stats.books.balanced
    assert stats.books.open_ranges == still_open
    lease = await lease_one(client, "s/a", "g", 0.0)
    assert lease.prompt_index == far - 3
    with pytest.raises(LedgerError, match="move its journal away"):
        await client.attach(0, Books())
    assert daemon.end() == 0
    assert audit_journal(journal_path(daemon.run)).faults == ()


async def test_held_leases_free_no_more_prompts_than_a_buffer_may_have_forgotten(tmp_path: Path):
    with zmq_server(tmp_path, journal=True, lease_ttl_s=60.0) as served:
        stranger = Stranger(served.url)
        leases = tuple(
            replace(held(prompt_index=90_000 * n), lease_id=f"s/{n}") for n in range(1, 50)
        )
        await stranger.call(wire.encode(m.HeartbeatRequest(make_status(held=leases))))
        reply = await stranger.call(wire.encode(m.StatsRequest()))
        stranger.close()
        assert reply.stats.books.next_prompt_index == 90_001
        assert reply.stats.books.leased == 1


async def test_an_error_of_ours_is_one_clients_refusal(tmp_path: Path, monkeypatch: Any):
    def fail(self: Any, state: Any, now_s: float) -> Any:
        raise ZeroDivisionError("a mistake")

    monkeypatch.setattr(m.DrainRequest, "apply", fail)
    with zmq_server(tmp_path) as served:
        stranger = Stranger(served.url)
        reply = await stranger.call(wire.encode(m.DrainRequest()))
        assert "a mistake" in reply.message
        assert isinstance(await stranger.call(wire.encode(m.StatsRequest())), m.StatsReply)
        stranger.close()


async def test_an_error_that_leaves_a_change_half_done_ends_the_server(
    tmp_path: Path, monkeypatch: Any
):
    def fail(self: Any, state: Any, now_s: float) -> Any:
        state.lease(("s/a",), "g", now_s)
        raise ZeroDivisionError("a mistake")

    with contextlib.ExitStack() as stack:
        thread_errors: list[Any] = []
        monkeypatch.setattr("threading.excepthook", thread_errors.append)
        served = stack.enter_context(zmq_server(tmp_path, journal=True))
        client = Stranger(served.url)
        await client.call(wire.encode(m.AttachRequest(0, None, "a")))
        monkeypatch.setattr(m.DrainRequest, "apply", fail)
        await client.send(wire.encode(m.DrainRequest()))
        async with asyncio.timeout(120):
            while not thread_errors:
                await asyncio.sleep(0.02)
        client.close()
    assert thread_errors[0].exc_type is ZeroDivisionError
    assert audit_journal(tmp_path / "journal.sqlite").granted == 0


async def test_a_connection_that_sends_on_is_ignored_and_one_beside_it_served(tmp_path: Path):
    with zmq_server(tmp_path) as served:
        stranger, good = Stranger(served.url), Stranger(served.url)
        for _ in range(1000):
            await stranger.send(b"nonsense")
        replies = [await stranger.call(b"nonsense") for _ in range(server.MAX_MALFORMED - 1)]
        assert len(replies) == server.MAX_MALFORMED - 1
        async with asyncio.timeout(120):
            refused: dict[RefusalReason, int] = {}
            while sum(refused.values()) < 1000 + len(replies):
                reply = await good.call(wire.encode(m.StatsRequest()))
                refused = reply.stats.refused
        assert refused[RefusalReason.MALFORMED] == server.MAX_MALFORMED
        again = Stranger(served.url)
        assert isinstance(await again.call(wire.encode(m.StatsRequest())), m.StatsReply)
        for socket in (stranger, good, again):
            socket.close()
    assert len(list((tmp_path / "quarantine").iterdir())) <= server.MAX_MALFORMED


async def test_one_connection_parks_a_bounded_number_of_requests(tmp_path: Path):
    with zmq_server(tmp_path) as served:
        stranger, good = Stranger(served.url), served.url
        lease = wire.encode(m.LeaseRequest(("x/1",), "x", 3000.0))
        for _ in range(2000):
            await stranger.send(lease)
        client = Stranger(good)
        assert isinstance(await client.call(wire.encode(m.StatsRequest())), m.StatsReply)
        # The first ones wait; the last is answered at once that there is nothing.
        assert (await stranger.call(lease)).is_empty
        stranger.close()
        client.close()


async def test_frames_without_end_and_of_any_size_are_refused(tmp_path: Path):
    with zmq_server(tmp_path) as served:
        stranger = Stranger(served.url)
        reply = await stranger.call(*[b"x"] * 10_000)
        assert isinstance(reply.exception(), WireError)
        reply = await stranger.call(bytes(server.MAX_REQUEST_BYTES + 1))
        assert "at most" in reply.message
        stranger.close()
        lone = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        lone.connect(served.url.replace("zmq", "tcp"))
        await lone.send(b"")
        with contextlib.suppress(TransportError):
            assert isinstance(wire.decode((await lone.recv_multipart())[-1], m.Reply), m.ErrorReply)
        lone.close(linger=0)
