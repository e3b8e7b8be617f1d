"""What an operation costs while 100 to 1,000,000 groups wait: in the ledger, in `buffers.memory`,
and in the thread of a buffer daemon that sees headers alone, as with `redis://`.

    PYTHONPATH=. python -m tests.benchmarks.buffer_growth [--profile JOURNAL]

A cycle leases, puts and takes small groups and leaves the line as long as it was; the median of the
cycles counts. Seconds are of the processor, in the thread that does the work, so that a busy
machine measures the same. The daemon's are of the whole of its thread: sockets, messages, ledger,
journal and replies, for requests that each have a message of their own, HEADERS of which arrive
together. `headers_per_s` is how many puts that thread has time for, `groups_per_s` the same with
the lease, the take and the advance of each: without a journal, with one in a file, and with one in
Redis, where the payloads are. The threads that ZeroMQ has for itself are not in it. `--profile`
says where they go. Called by `bench_buffer`.
"""

import argparse
import asyncio
import cProfile
import json
import pstats
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import zmq

from buffers import messages as m
from buffers.journal.journal import Journal
from buffers.journal.sqlite import SqliteStorage
from buffers.ledger.ledger import Ledger
from buffers.ledger.state import BufferState
from buffers.memory import MemoryBuffer
from buffers.zmq.multipart import Frame
from buffers.zmq.server import ZmqBufferServer
from streamrl import wire
from streamrl.types import GroupHeader, TrajectoryGroup
from tests.records import make_group
from tests.redis_server import redis_server

LENGTHS = (100, 1_000, 10_000, 100_000, 1_000_000)
GROUPS_PER_STEP = 10
CYCLES = 100
HEADERS = 60
HEADER_CYCLES = 30
SIBLINGS = 8
OPERATIONS = ("lease", "put", "take", "advance")
TTL_S = 1e9

Costs = dict[str, float]


def measure() -> Iterator[dict[str, object]]:
    """A line per level and operation; `ratio` is the dearest length over the shortest one's."""
    yield from headers()
    for level, cost in (("ledger", _ledger), ("memory", _memory), ("daemon", _daemon)):
        costs = {length: cost(length) for length in LENGTHS}
        for operation in OPERATIONS:
            by_length = {length: round(1e6 * costs[length][operation], 2) for length in LENGTHS}
            yield {
                "case": "waiting groups",
                "level": level,
                "operation": operation,
                "ratio": round(max(by_length.values()) / by_length[LENGTHS[0]], 3),
                "limit": 1.5,
                "us_by_waiting": by_length,
            }


def _long_ledger(length: int) -> Ledger:
    """With room for `length` and a cycle more, and no group too old while we measure."""
    return Ledger(
        groups_per_step=GROUPS_PER_STEP, max_staleness=length // GROUPS_PER_STEP + 2 * CYCLES
    )


def _ledger(length: int) -> Costs:
    ledger, number = _long_ledger(length), 0
    header = GroupHeader.of(make_group(0))
    learner_term = ledger.attach(0)

    def lease() -> list[tuple[str, int]]:
        nonlocal number
        number += GROUPS_PER_STEP
        names = [f"g/{n}" for n in range(number, number + GROUPS_PER_STEP)]
        return [(name, ledger.lease(name, 0.0, TTL_S).prompt_index) for name in names]  # type: ignore[union-attr]

    def put(leases: list[tuple[str, int]]) -> None:
        for name, prompt_index in leases:
            ledger.put(name, msgspec.structs.replace(header, prompt_index=prompt_index), 0.0)

    for _ in range(length // GROUPS_PER_STEP):
        put(lease())
    timings: dict[str, list[float]] = {operation: [] for operation in OPERATIONS}
    for version in range(CYCLES):
        times = [time.thread_time()]
        leases = lease()
        times.append(time.thread_time())
        put(leases)
        times.append(time.thread_time())
        assert len(ledger.take(GROUPS_PER_STEP, version, learner_term)) == GROUPS_PER_STEP
        times.append(time.thread_time())
        ledger.advance(version + 1, learner_term)
        times.append(time.thread_time())
        ledger.acknowledge(version + 1, learner_term)
        _book(timings, times)
    return _medians(timings)


def _memory(length: int) -> Costs:
    async def cycles() -> Costs:
        state = BufferState[TrajectoryGroup](_long_ledger(length), lease_ttl_s=TTL_S)
        buffer, group, number = MemoryBuffer(state), make_group(0), 0
        await buffer.attach(0, None)

        async def lease() -> list[tuple[str, int]]:
            nonlocal number
            number += GROUPS_PER_STEP
            names = [f"g/{n}" for n in range(number, number + GROUPS_PER_STEP)]
            leases = [lease for name in names for lease in await buffer.lease([name], "g", 0.0)]
            return [(lease.lease_id, lease.prompt_index) for lease in leases]

        async def put(leases: list[tuple[str, int]]) -> None:
            for name, prompt_index in leases:
                await buffer.put(name, msgspec.structs.replace(group, prompt_index=prompt_index))

        for _ in range(length // GROUPS_PER_STEP):
            await put(await lease())
        timings: dict[str, list[float]] = {operation: [] for operation in OPERATIONS}
        for version in range(CYCLES):
            times = [time.thread_time()]
            leases = await lease()
            times.append(time.thread_time())
            await put(leases)
            times.append(time.thread_time())
            loan = await buffer.take(GROUPS_PER_STEP, version, 0.0)
            assert len(loan.headers) == GROUPS_PER_STEP
            times.append(time.thread_time())
            await buffer.advance(version + 1)
            times.append(time.thread_time())
            await buffer.acknowledge(version + 1)
            _book(timings, times)
        return _medians(timings)

    return asyncio.run(cycles())


def headers() -> Iterator[dict[str, object]]:
    """How many headers a second the thread of a daemon has time for, with 1,000 that wait."""
    for journal in ("none", "file", "redis"):
        cost = _daemon(1_000, journal)
        yield {
            "case": "headers",
            "journal": journal,
            "headers_per_s": round(1 / cost["put"]),
            "limit": 6000,
            "groups_per_s": round(1 / sum(cost.values())),
            "us": {operation: round(1e6 * cost[operation], 1) for operation in OPERATIONS},
        }


def _daemon(length: int, journal: str = "none", *, profile: bool = False) -> Costs:
    state: BufferState[Frame] = BufferState(_long_ledger(length), lease_ttl_s=TTL_S)
    header = GroupHeader.of(make_group(0, size=SIBLINGS))
    timings: dict[str, list[float]] = {operation: [] for operation in OPERATIONS}
    with tempfile.TemporaryDirectory() as folder, _stored(journal, Path(folder)) as (storage, set_):
        written = None if storage is None else Journal(storage, state)
        if written is not None:
            written.recover({}, 0.0)
        learner_term = state.ledger.attach(0)
        for number in range(length):
            lease = state.ledger.lease(f"w/{number}", 0.0, TTL_S)
            assert lease is not None
            known = msgspec.structs.replace(header, prompt_index=lease.prompt_index)
            state.put(f"w/{number}", known, b"w/%d" % number, 0.0)
        set_([b"w/%d" % number for number in range(length)])
        with _serving(state, written, Path(folder), profile=profile) as call:
            for cycle in range(HEADER_CYCLES):
                _cycle(call, cycle, header, learner_term, set_, timings)
    return _medians(timings)


Call: TypeAlias = Callable[[list[list[Any]]], tuple[float, list[Any]]]
SetKeys: TypeAlias = Callable[[list[bytes]], None]


def _cycle(
    call: Call,
    cycle: int,
    header: GroupHeader,
    learner_term: int,
    set_keys: SetKeys,
    timings: dict[str, list[float]],
) -> None:
    names = [f"g/{number}" for number in range(cycle * HEADERS, (cycle + 1) * HEADERS)]
    set_keys([name.encode() for name in names])
    cost, replies = call([[m.LeaseRequest((name,), "g", 0.0)] for name in names])
    timings["lease"].append(cost / HEADERS)
    leases = [lease for reply in replies for lease in reply.leases]
    headers = [msgspec.structs.replace(header, prompt_index=lease.prompt_index) for lease in leases]
    puts = [
        [m.PutRequest(lease.lease_id), m.StoredGroup(known, lease.lease_id.encode())]
        for lease, known in zip(leases, headers, strict=True)
    ]
    cost, _ = call(puts)
    timings["put"].append(cost / HEADERS)
    steps = HEADERS // GROUPS_PER_STEP
    for version in range(cycle * steps, (cycle + 1) * steps):
        take = m.TakeRequest(GROUPS_PER_STEP, version, learner_term, 0.0, with_payloads=False)
        cost, (taken,) = call([[take]])
        assert len(taken.headers) == GROUPS_PER_STEP
        timings["take"].append(cost / GROUPS_PER_STEP)
        advanced, _ = call([[m.AdvanceRequest(version + 1, learner_term)]])
        acknowledged, _ = call([[m.AcknowledgeRequest(version + 1, learner_term)]])
        timings["advance"].append((advanced + acknowledged) / GROUPS_PER_STEP)


@contextmanager
def _stored(journal: str, folder: Path) -> Iterator[tuple[Any, SetKeys]]:
    """The journal's storage, and what writes payloads there, of which a header has the key."""
    match journal:
        case "file":
            yield SqliteStorage(folder / "journal", durability="process"), lambda _: None
        case "redis":
            import redis

            from buffers.redis.connection import namespace
            from buffers.redis.journal_storage import RedisStorage

            with redis_server(folder / "redis", "appendfsync everysec") as server:
                client = redis.Redis.from_url(server.url)
                client.set(namespace("bench") + "fence", "daemon:0")
                storage = RedisStorage(server.url, "bench", term="daemon")

                def set_keys(keys: list[bytes]) -> None:
                    client.mset(dict.fromkeys(keys, b"payload"))

                yield storage, set_keys
        case _:
            yield None, lambda _: None


@contextmanager
def _serving(
    state: BufferState[Frame], journal: Journal[Any] | None, folder: Path, *, profile: bool
) -> Iterator[Call]:
    """Sends requests, each a message of its own; what they cost the server, and the replies."""
    server = ZmqBufferServer(
        state,
        "zmq://127.0.0.1:0",
        quarantine=folder,
        open_journal=None if journal is None else lambda _: journal,
        stores_elsewhere=True,
    )
    stop, profiler = threading.Event(), cProfile.Profile(time.thread_time)

    def serve() -> None:
        if journal is not None:
            journal.commit()
        if profile:
            profiler.runcall(server.serve, stop)
        else:
            server.serve(stop)

    thread = threading.Thread(target=serve)
    thread.start()
    clock = time.pthread_getcpuclockid(thread.ident)  # type: ignore[arg-type]
    client: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    client.setsockopt(zmq.LINGER, 0)
    client.connect(server.url.replace("zmq://", "tcp://"))

    def call(requests: list[list[Any]]) -> tuple[float, list[Any]]:
        start_s = time.clock_gettime(clock)
        for request in requests:
            client.send_multipart([b"id", *map(wire.encode, request)])
        frames = [client.recv_multipart()[1] for _ in requests]
        replies: list[Any] = [wire.decode(frame, m.Reply) for frame in frames]  # type: ignore[arg-type]
        assert not any(isinstance(reply, m.ErrorReply) for reply in replies), replies[0]
        return time.clock_gettime(clock) - start_s, replies

    try:
        call([[m.StatsRequest()]])
        yield call
    finally:
        stop.set()
        thread.join()
        client.close()
        if journal is not None:
            journal.close()
        if profile:
            pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


def _book(timings: dict[str, list[float]], times: list[float]) -> None:
    for operation, start, end in zip(OPERATIONS, times[:-1], times[1:], strict=True):
        timings[operation].append((end - start) / GROUPS_PER_STEP)


def _medians(timings: dict[str, list[float]]) -> Costs:
    return {operation: statistics.median(values) for operation, values in timings.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", choices=("none", "file", "redis"))
    if journal := parser.parse_args().profile:
        _daemon(1_000, journal, profile=True)
    else:
        for line in measure():
            print(json.dumps(line), flush=True)
