"""What the real buffer daemon costs beside its ledger, measured here, and the real run of a load.

Invariant: the daemon is a `ZmqBufferServer` with a journal, in a process of its own. It is stopped
while requests gather and goes on then, so that it handles them as it does when it is saturated; its
seconds are those of CPU, of the thread that serves and of all others, so that they are not the
machine's that others use too.
"""

import asyncio
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from msgspec import Struct

from buffers import messages as m
from buffers.journal.journal import Journal
from buffers.journal.sqlite import SqliteStorage
from buffers.ledger.ledger import Ledger
from buffers.ledger.state import BufferState
from buffers.zmq.client import ZmqBuffer
from buffers.zmq.server import ZmqBufferServer
from streamrl.types import (
    FinishReason,
    GeneratorStatus,
    GroupHeader,
    Trajectory,
    TrajectoryGroup,
)
from tests.research.scaled.load import BYTES_A_TOKEN, Load, Outcome, run

CONTEXT = multiprocessing.get_context("spawn")
NUM_CLIENTS = 128
GATHER_S = 0.15
# Tokens of each of eight siblings, by round of puts: 1 KB, 20 KB, 200 KB and 800 KB a group.
SIZES = (10,) * 6 + (200,) * 6 + (2000,) * 3 + (8000,)
SIBLINGS = 8


class Costs(Struct, frozen=True, kw_only=True):
    """Seconds of CPU, without the ledger's: of the thread that serves, a turn, a request, a byte of
    its payload; of the thread behind it and of a client that decodes, a byte."""

    turn_s: float
    lease_s: float
    heartbeat_s: float
    put_s: float
    put_byte_s: float
    fetch_group_s: float
    fetch_byte_s: float
    io_byte_s: float
    decode_byte_s: float

    def of(self, kind: str, num_groups: int, num_bytes: float) -> float:
        """Of one request in the thread that serves."""
        match kind:
            case "put":
                return self.put_s + self.put_byte_s * num_bytes
            case "fetch":
                read_s = self.fetch_group_s * num_groups + self.fetch_byte_s * num_bytes
                return self.heartbeat_s + read_s
            case "lease":
                return self.lease_s
            case _:
                return self.heartbeat_s


class RealClient(ZmqBuffer):
    async def put_header(self, lease_id: str, header: GroupHeader) -> None:
        await self.put(lease_id, group_of(header))

    async def fetch_headers(self, headers: Sequence[GroupHeader]) -> None:
        await self.fetch([header.prompt_index for header in headers])


def group_of(header: GroupHeader) -> TrajectoryGroup:
    """A group with these lengths; the tokens of its second halves are of the newest version."""
    return TrajectoryGroup(
        group_id=header.group_id,
        prompt_index=header.prompt_index,
        environment=header.environment,
        trajectories=tuple(_trajectory(header, length) for length in header.lengths),
    )


def _trajectory(header: GroupHeader, length: int) -> Trajectory:
    versions = np.full(length, header.newest_version, np.int32)
    versions[: (length + 1) // 2] = header.oldest_version
    return Trajectory(
        token_ids=np.arange(length, dtype=np.int32),
        response_mask=np.ones(length, np.bool_),
        behavior_logprobs=np.full(length, -1.0, np.float32),
        policy_versions=versions,
        reward=0.0,
        finish_reason=FinishReason.STOP,
    )


class Daemon(NamedTuple):
    url: str
    process: Any
    pipe: "Connection[Any, Any]"

    def cpu_s(self) -> tuple[float, float]:
        """Of the thread that serves, and of the others."""
        self.pipe.send("cpu")
        serving_s, all_s = self.pipe.recv()
        return serving_s, all_s - serving_s


@contextmanager
def daemon(groups_per_step: int, max_staleness: int) -> Iterator[Daemon]:
    """A buffer's process until the end of the block."""
    here, there = CONTEXT.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (there, folder, groups_per_step, max_staleness)
        process = CONTEXT.Process(target=_serve, args=arguments)
        process.start()
        try:
            yield Daemon(here.recv(), process, here)
            here.send("stop")
        finally:
            process.join(10)
            process.kill()


def _serve(pipe: Any, folder: str, groups_per_step: int, max_staleness: int) -> None:
    ledger = Ledger(groups_per_step=groups_per_step, max_staleness=max_staleness)
    state: BufferState[Any] = BufferState(ledger, lease_ttl_s=30.0)
    journal = Journal(SqliteStorage(Path(folder, "journal"), durability="process"), state)
    journal.recover({}, time.monotonic())
    quarantine = Path(folder, "quarantine")
    server = ZmqBufferServer(
        state, "zmq://127.0.0.1:0", quarantine=quarantine, open_journal=lambda _: journal
    )
    stop = threading.Event()
    serving = threading.Thread(target=server.serve, args=(stop,), daemon=True)
    serving.start()
    pipe.send(server.url)
    assert serving.ident is not None
    clock = time.pthread_getcpuclockid(serving.ident)
    while pipe.recv() == "cpu":
        pipe.send((time.clock_gettime(clock), time.process_time()))
    stop.set()
    serving.join()
    journal.close()


def run_real(load: Load) -> Outcome:
    """The load in real time, with a real daemon; its generators and learner are this process."""
    with daemon(load.groups_per_step, load.max_staleness) as served:
        return asyncio.run(_run(load, served.url))


async def _run(load: Load, url: str) -> Outcome:
    return await run(load, lambda: RealClient(url))


def measure() -> Costs:
    """By the real daemon of this machine; takes half a minute."""
    with daemon(len(SIZES) * NUM_CLIENTS, 8) as served:
        return asyncio.run(_measure(served))


async def _measure(served: Daemon) -> Costs:
    return await _Measurement(served).costs()


Times = tuple[float, float, float]
"""Seconds of CPU: of the thread that serves, of the daemon's others, of this process."""


class _Measurement:
    def __init__(self, served: Daemon) -> None:
        self._daemon = served
        self._clients = [RealClient(served.url) for _ in range(NUM_CLIENTS)]
        self._headers: list[GroupHeader] = []

    async def costs(self) -> Costs:
        await self._clients[0].attach(0, None)
        for client in self._clients:
            await client.stats()
        rounds = range(len(SIZES))
        count = NUM_CLIENTS * len(SIZES)
        lease_s = sum([(await self._gathered(self._lease, number))[0] for number in rounds]) / count
        beat_s = sum([(await self._gathered(self._beat, number))[0] for number in rounds]) / count
        alone_s = await self._alone()
        puts = [(size, await self._gathered(self._put, size)) for size in SIZES]
        fetches = await self._fetches()
        ledger = _ledger_s()
        sizes = np.array([size * SIBLINGS * BYTES_A_TOKEN for size, _ in puts], float)
        put_byte_s, put_s = _line(sizes, [times[0] / NUM_CLIENTS for _, times in puts])
        io_in_s, _ = _line(sizes, [times[1] / NUM_CLIENTS for _, times in puts])
        fetch_byte_s, fetch_group_s = _line(sizes, [times[0] / NUM_CLIENTS for times in fetches])
        io_out_s, _ = _line(sizes, [times[1] / NUM_CLIENTS for times in fetches])
        decode_byte_s, _ = _line(sizes, [times[2] / NUM_CLIENTS for times in fetches])
        for client in self._clients:
            await client.close()
        return Costs(
            turn_s=max(0.0, alone_s - beat_s),
            lease_s=max(0.0, lease_s - ledger["lease"]),
            heartbeat_s=max(0.0, beat_s - ledger["heartbeat"]),
            put_s=max(0.0, put_s - ledger["put"]),
            put_byte_s=max(0.0, put_byte_s),
            fetch_group_s=max(0.0, fetch_group_s),
            fetch_byte_s=max(0.0, fetch_byte_s),
            io_byte_s=max(io_in_s, io_out_s),
            decode_byte_s=max(0.0, decode_byte_s),
        )

    async def _gathered(self, call: Callable[[int, int], Awaitable[None]], number: int) -> Times:
        """Of one call by each client, which the daemon finds there all at once."""
        pid = self._daemon.process.pid
        before = (*self._daemon.cpu_s(), time.process_time())
        os.kill(pid, signal.SIGSTOP)
        calls = [asyncio.ensure_future(call(i, number)) for i in range(NUM_CLIENTS)]
        await asyncio.sleep(GATHER_S)
        os.kill(pid, signal.SIGCONT)
        await asyncio.gather(*calls)
        after = (*self._daemon.cpu_s(), time.process_time())
        serving_s, others_s, own_s = (b - a for a, b in zip(before, after, strict=True))
        return serving_s, others_s, own_s

    async def _alone(self) -> float:
        """Seconds of a heartbeat that has a turn of its own."""
        before = self._daemon.cpu_s()
        for _ in range(500):
            await self._beat(0, 0)
        return (self._daemon.cpu_s()[0] - before[0]) / 500

    async def _lease(self, client: int, number: int) -> None:
        (lease,) = await self._clients[client].lease([f"g{client}/{number}"], f"g{client}", 5.0)
        self._headers.append(_header(lease.lease_id, lease.prompt_index, 1))

    async def _beat(self, client: int, number: int) -> None:
        await self._clients[client].heartbeat(_status(client))

    async def _put(self, client: int, size: int) -> None:
        lease = self._headers.pop(0)
        header = _header(lease.group_id, lease.prompt_index, size)
        await self._clients[client].put_header(header.group_id, header)

    async def _fetches(self) -> list[Times]:
        """Of the groups of each round, by the first client."""
        first = self._clients[0]
        count = NUM_CLIENTS * len(SIZES)
        taken = (await first.take(count, 0, 5.0)).headers
        ordered = sorted(taken, key=lambda header: header.num_bytes)
        found = []
        for number in range(len(SIZES)):
            share = ordered[number * NUM_CLIENTS : (number + 1) * NUM_CLIENTS]
            before = (*self._daemon.cpu_s(), time.process_time())
            for part in range(0, NUM_CLIENTS, 32):
                await first.fetch_headers(share[part : part + 32])
            after = (*self._daemon.cpu_s(), time.process_time())
            serving_s, others_s, own_s = (b - a for a, b in zip(before, after, strict=True))
            found.append((serving_s, others_s, own_s))
        return found


def _line(x: "np.ndarray[Any, Any]", y: Sequence[float]) -> tuple[float, float]:
    """Slope and intercept; each point counts by its relative error."""
    slope, intercept = np.polyfit(x, y, 1, w=1.0 / np.maximum(y, 1e-9))
    return float(slope), float(intercept)


def _status(client: int) -> GeneratorStatus:
    return GeneratorStatus(
        generator_id=f"g{client}",
        session=f"g{client}",
        policy_version=0,
        lease_ids=tuple(f"g{client}/{number}" for number in range(4)),
        lease_ages_s=(1.0,) * 4,
        lease_num_tokens=(100,) * 4,
    )


def _header(lease_id: str, prompt_index: int, size: int) -> GroupHeader:
    return GroupHeader(
        group_id=lease_id,
        prompt_index=prompt_index,
        environment="scale",
        oldest_version=0,
        newest_version=0,
        lengths=(size,) * SIBLINGS,
        response_lengths=(size,) * SIBLINGS,
        rewards=(0.0,) * SIBLINGS,
        num_bytes=size * SIBLINGS * BYTES_A_TOKEN,
    )


def _ledger_s() -> dict[str, float]:
    """The ledger's part of the same requests, each."""
    count = NUM_CLIENTS * len(SIZES)
    ledger = Ledger(groups_per_step=count, max_staleness=8)
    state: BufferState[None] = BufferState(ledger, lease_ttl_s=30.0)
    state.attach(0, None)
    names = [(i, f"g{i}/{number}") for number in range(len(SIZES)) for i in range(NUM_CLIENTS)]
    leases = [m.LeaseRequest((name,), f"g{i}", 5.0) for i, name in names]
    beats = [m.HeartbeatRequest(_status(i)) for i, _ in names]

    def each(work: Callable[[int], object]) -> float:
        began_s = time.thread_time()
        for number in range(count):
            work(number)
        return (time.thread_time() - began_s) / count

    lease_s = each(lambda number: leases[number].apply(state, 0.0))
    beat_s = each(lambda number: beats[number].apply(state, 0.0))
    headers = [_header(name, number, 1) for number, (_, name) in enumerate(names)]
    put_s = each(lambda number: state.put(names[number][1], headers[number], None, 0.0))
    return {"lease": lease_s, "heartbeat": beat_s, "put": put_s}
