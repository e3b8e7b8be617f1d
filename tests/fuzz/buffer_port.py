"""A live buffer daemon and hostile messages, as many as one likes.

    PYTHONPATH=. python tests/fuzz/buffer_port.py --messages 1000000 [--seed 1]

Messages come from `tests.fuzz.hostile`, over connections that are opened and closed all the time,
since a connection that goes on is ignored. Beside them a client of ours works. What must hold: the
daemon lives and answers it, the books close at every look and in the journal's audit, and memory
stays. Prints one JSON line. `tests/system/test_fuzz.py` does the same with a small budget.
"""

import asyncio
import json
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import msgspec
import psutil
import zmq

from buffers import messages as m
from buffers.audit import audit_journal
from buffers.journal.sqlite import journal_path
from buffers.zmq.client import ZmqBuffer
from streamrl import wire
from streamrl.errors import WireError
from streamrl.types import pack, replace
from tests.contract.test_buffer_daemon import Daemon
from tests.fuzz.hostile import Frames, corpus, endless, messages, mutated, parse
from tests.records import make_group, make_status

BATCH = 10
LOOK_EVERY = 100
REPLY_MS = 120_000
LAST = b"last"
GROWTH_BYTES = 128 * 2**20

payloads = st.one_of(
    st.integers(0, 3).map(lambda index: wire.encode(pack(make_group(index)))),
    st.builds(
        lambda index, seed: mutated(wire.encode(pack(make_group(index))), seed),
        st.integers(0, 3),
        st.integers(0, 2**32),
    ),
    st.binary(max_size=20),
)


class Fuzzed(msgspec.Struct):
    """What was sent, and what the client of ours saw beside it."""

    num_messages: int = 0
    num_replies: int = 0
    num_refused: int = 0
    num_may_wait: int = 0
    """Requests that are answered once there are groups."""
    num_waiting: int = 0
    """Those of them that had no answer."""
    num_unanswered: int = 0
    """Other messages that had none."""
    seconds: float = 0.0
    rss_before_mb: int = 0
    rss_after_mb: int = 0
    latency_before_ms: float = 0.0
    latency_p50_ms: float = 0.0
    latency_max_ms: float = 0.0
    learner_term: int = 0
    policy_version: int = 0


def send(url: str, batch: list[Frames], counts: Fuzzed) -> None:
    """One connection. Waits for the reply to a request after the batch, which comes after those to
    the batch; leases and takes that wait for groups have none."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(url.replace("zmq", "tcp"))
    sent = [[informed(frames[0], counts), *frames[1:]] for frames in batch]
    for number, frames in enumerate(sent):
        socket.send_multipart([bytes([number]), *frames])
    # An empty frame ends an envelope: the answer bears the id after it.
    plain = {bytes([number]): frames for number, frames in enumerate(sent) if b"" not in frames}
    unanswered = {number: may_wait(frames[0]) for number, frames in plain.items()}
    counts.num_may_wait += sum(unanswered.values())
    socket.send_multipart([LAST, wire.encode(m.StatsRequest())])
    while socket.poll(REPLY_MS):
        number, reply, *_ = socket.recv_multipart()
        if number == LAST:
            break
        unanswered.pop(number, None)
        counts.num_replies += 1
        counts.num_refused += isinstance(wire.decode(reply, m.Reply), m.ErrorReply)
    counts.num_messages += len(batch)
    counts.num_waiting += sum(unanswered.values())
    counts.num_unanswered += len(unanswered) - sum(unanswered.values())
    socket.close()


def may_wait(data: bytes) -> bool:
    """Whether it is a request that is answered once there are groups."""
    try:
        return isinstance(wire.decode(data, m.Request), m.LeaseRequest | m.TakeRequest)
    except WireError:
        return False


def informed(data: bytes, counts: Fuzzed) -> bytes:
    """A learner's request with the term and the version of the moment and books that close, since
    others reach nothing; or the bytes as they are."""
    try:
        request: Any = wire.decode(data, m.Request)
    except WireError:
        return data
    if isinstance(request, m.AttachRequest):
        books = request.books
        if books is not None:
            columns = books.in_flight + books.trained + books.acknowledged
            books = replace(books, granted=columns + sum(books.dropped.values()))
        # A name that is known is answered without an attach.
        return wire.encode(replace(request, books=books, call_id=str(counts.num_messages)))
    if not hasattr(request, "learner_term") or counts.num_messages % 40 < BATCH:
        return data
    known = {"learner_term": counts.learner_term, "policy_version": counts.policy_version}
    return wire.encode(
        replace(request, **{name: known[name] for name in known if hasattr(request, name)})
    )


async def look(client: ZmqBuffer, counts: Fuzzed) -> float:
    """The seconds of a call; the heartbeat keeps a run from being over that a stranger ended."""
    start_s = time.monotonic()
    stats = await client.stats()
    took_s = time.monotonic() - start_s
    assert stats.books.balanced, stats.books
    counts.learner_term, counts.policy_version = stats.books.learner_term, stats.policy_version
    await client.heartbeat(make_status("good"))
    return took_s


async def fuzz(folder: Path, num_messages: int, seed: int, *, num_drawn: int = 5000) -> Fuzzed:
    """Raises AssertionError where something does not hold."""
    daemon, counts = Daemon(folder), Fuzzed()
    daemon.start("buffer.lease_ttl_s=10")
    # As a learner it says where its run ends, since a stranger may have said so before.
    client = ZmqBuffer(daemon.url, deadline_s=60.0, retry_s=0.3, final_version=100_000)
    try:
        await client.attach(0, None)
        process = psutil.Process(daemon.process.pid)
        before_s = [await look(client, counts) for _ in range(20)]
        drawn = corpus(messages(m.Request, payloads), num_drawn, seed)
        counts.rss_before_mb = process.memory_info().rss >> 20
        latencies_s, source, start_s = [], endless(drawn, seed), time.monotonic()
        while counts.num_messages < num_messages:
            if counts.num_messages % LOOK_EVERY == 0:
                latencies_s.append(await look(client, counts))
            await asyncio.to_thread(send, daemon.url, list(islice(source, BATCH)), counts)
        counts.seconds = time.monotonic() - start_s
        counts.rss_after_mb = process.memory_info().rss >> 20
        counts.latency_before_ms = 1000 * sorted(before_s)[len(before_s) // 2]
        counts.latency_p50_ms = 1000 * sorted(latencies_s)[len(latencies_s) // 2]
        counts.latency_max_ms = 1000 * max(latencies_s)
        await still_serves(client)
        await client.close()
        assert daemon.end() == 0
    finally:
        await client.close()
        await daemon.close()
    faults = audit_journal(journal_path(daemon.run)).faults
    assert faults == (), faults[:10]
    grown = (counts.rss_after_mb - counts.rss_before_mb) * 2**20
    assert grown < GROWTH_BYTES, counts
    return counts


async def still_serves(client: ZmqBuffer) -> None:
    """A learner takes the buffer over, and a group goes all its way."""
    await client.heartbeat(make_status("s", "new", is_leaving=True))
    stats = await client.attach(0, None)
    before = stats.books.acknowledged
    names = [f"good/{number}" for number in range(stats.capacity)]
    async with asyncio.timeout(180.0):
        # Leases of the strangers are in the way until they expire.
        while (await client.stats()).books.buffered < 2:
            for name in names:
                await fill_if_free(client, name)
            await asyncio.sleep(0.1)
    loan = await client.take(2, 0, 60.0)
    assert len(loan.headers) == 2
    await client.advance(1)
    await client.acknowledge(1)
    stats = await client.stats()
    assert stats.books.balanced
    assert stats.books.acknowledged == before + 2


async def fill_if_free(client: ZmqBuffer, name: str) -> None:
    for lease in await client.lease([name], "good", 0.0):
        await client.put(name, make_group(lease.prompt_index, lease_id=name))


def main() -> None:
    arguments = parse(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        work = fuzz(Path(folder), arguments.messages, arguments.seed, num_drawn=arguments.drawn)
        counts = asyncio.run(work)
    print(json.dumps(msgspec.to_builtins(counts)))


if __name__ == "__main__":
    main()
