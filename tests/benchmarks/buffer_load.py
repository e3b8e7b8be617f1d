"""The load of `bench_buffer`: producer processes, a learner, and the bare sockets they are measured
against. `run` gives the seconds of one contender; processes start before the clock does.
"""

import asyncio
import contextlib
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from multiprocessing.synchronize import Barrier
from pathlib import Path
from types import MappingProxyType

import msgspec
import numpy as np
import zmq

from buffers import daemon
from buffers.connect import connect
from buffers.ledger.ledger import Ledger
from buffers.ledger.state import BufferState
from buffers.memory import MemoryBuffer
from streamrl import service, wire
from streamrl.config import RunConfig
from streamrl.interfaces import TrajectoryBuffer
from streamrl.types import FinishReason, Lease, OverduePolicy, Trajectory, TrajectoryGroup, pack
from tests.benchmarks import buffer_codec
from tests.ports import free_port
from tests.redis_server import redis_server

IN_FLIGHT = 4
GROUPS_PER_STEP = 16
MAX_STALENESS = 3
# The payload is made once, by the first version, and `overdue: train` takes it at every later one.
VERSION = 0
SIBLINGS = 8
# Tokens of each sibling, by the size of the group when a token took 13 bytes; now it takes 7.
SIZES = {"20 KB": 190, "1 MB": 9600}
CONTEXT = multiprocessing.get_context("spawn")
DEADLINE_S = 120.0


def run(name: str, size: str, producers: int, count: int) -> float:
    """Seconds from the first lease to the last acknowledgement of `count` groups."""
    service.keep_freed_memory()
    if name == "memory":
        return asyncio.run(_in_one_process(size, producers, count))
    work: Callable[..., None] = _produce
    if name == "raw zmq":
        work = _echo
    elif name == "raw redis":
        work = _set_and_get
    elif name == "codec":
        work = _encode
    with tempfile.TemporaryDirectory() as folder, _server(name, Path(folder)) as place:
        barrier = CONTEXT.Barrier(producers + 1)
        processes = [
            CONTEXT.Process(target=work, args=(place, f"p{i}", size, count // producers, barrier))
            for i in range(producers)
        ]
        for process in processes:
            process.start()
        try:
            if work is _produce:
                return asyncio.run(_learn(place, count, barrier))
            if work is _encode:
                return buffer_codec.learn(place, count, DEADLINE_S, barrier)
            barrier.wait(DEADLINE_S)
            start = time.perf_counter()
            barrier.wait(DEADLINE_S)
            return time.perf_counter() - start
        finally:
            for process in processes:
                process.join(DEADLINE_S)


@cache
def template(size: str) -> TrajectoryGroup:
    length = SIZES[size]
    rng = np.random.default_rng(0)
    mask = np.arange(length) >= length // 10
    trajectory = Trajectory(
        token_ids=rng.integers(0, 150_000, length).astype(np.int32),
        response_mask=mask,
        behavior_logprobs=np.where(mask, -rng.exponential(1.0, length), 0).astype(np.float32),
        policy_versions=np.where(mask, VERSION, -1).astype(np.int32),
        reward=1.0,
        finish_reason=FinishReason.STOP,
    )
    return TrajectoryGroup(
        group_id="t", prompt_index=0, environment="bench", trajectories=(trajectory,) * SIBLINGS
    )


async def _in_one_process(size: str, producers: int, count: int) -> float:
    ledger = Ledger(
        groups_per_step=GROUPS_PER_STEP,
        max_staleness=MAX_STALENESS,
        overdue=OverduePolicy.TRAIN,
    )
    learner = MemoryBuffer(BufferState(ledger, lease_ttl_s=600.0))
    await learner.attach(0, None)
    start = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for index in range(producers):
            share = count // producers
            tasks.create_task(_put_all(learner.client(), f"p{index}", size, share))
        await _train_all(learner, count)
    return time.perf_counter() - start


async def _put_all(buffer: TrajectoryBuffer, name: str, size: str, count: int) -> None:
    """Leases up to IN_FLIGHT groups by one call, as a generator does, and puts them together.

    Waits for admission, which the learner's steps open.
    """
    group = template(size)

    async def put(lease: Lease) -> None:
        named = msgspec.structs.replace(
            group, prompt_index=lease.prompt_index, group_id=lease.lease_id
        )
        await buffer.put(lease.lease_id, named)

    number = 0
    while number < count:
        lease_ids = [f"{name}/{n}" for n in range(number, min(number + IN_FLIGHT, count))]
        leases = await buffer.lease(lease_ids, name, DEADLINE_S)
        assert leases, "admission stayed closed"
        await asyncio.gather(*map(put, leases))
        number += len(leases)


async def _train_all(buffer: TrajectoryBuffer, count: int) -> None:
    for version in range(count // GROUPS_PER_STEP):
        batch = await buffer.take(GROUPS_PER_STEP, version, DEADLINE_S, with_payloads=True)
        assert len(batch.groups) == GROUPS_PER_STEP
        await buffer.advance(version + 1)
        await buffer.acknowledge(version + 1)


def _produce(url: str, name: str, size: str, count: int, barrier: Barrier) -> None:
    async def work() -> None:
        buffer = connect(_config(url))
        await buffer.stats()
        barrier.wait(DEADLINE_S)
        await _put_all(buffer, name, size, count)
        await buffer.close()

    service.keep_freed_memory()
    template(size)
    asyncio.run(work())


async def _learn(url: str, count: int, barrier: Barrier) -> float:
    buffer = connect(_config(url))
    await buffer.attach(0, None)
    await asyncio.to_thread(barrier.wait, DEADLINE_S)
    start = time.perf_counter()
    await _train_all(buffer, count)
    took = time.perf_counter() - start
    await buffer.close()
    return took


def _echo(url: str, name: str, size: str, count: int, barrier: Barrier) -> None:
    """The bare limit: the payload to a ROUTER and back, IN_FLIGHT of them under way."""
    service.keep_freed_memory()
    payload = wire.encode(pack(template(size)))
    dealer = zmq.Context.instance().socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.connect(url)
    dealer.send(b"ready")
    dealer.recv()
    barrier.wait(DEADLINE_S)
    for _ in range(IN_FLIGHT):
        dealer.send(payload, copy=False)
    for number in range(count):
        assert len(dealer.recv(copy=False)) == len(payload)
        if number + IN_FLIGHT < count:
            dealer.send(payload, copy=False)
    barrier.wait(DEADLINE_S)
    dealer.close()


def _encode(url: str, name: str, size: str, count: int, barrier: Barrier) -> None:
    """What no buffer of ours can do without."""
    service.keep_freed_memory()
    buffer_codec.produce(url, template(size), count, IN_FLIGHT, DEADLINE_S, barrier)


def _set_and_get(url: str, name: str, size: str, count: int, barrier: Barrier) -> None:
    """The bare limit of redis: SET and GET, IN_FLIGHT of each in a pipeline."""
    import redis

    payload = wire.encode(pack(template(size)))
    client = redis.Redis.from_url(url)
    barrier.wait(DEADLINE_S)
    for _ in range(count // IN_FLIGHT):
        for command in ("set", "get"):
            pipeline = client.pipeline(transaction=False)
            for slot in range(IN_FLIGHT):
                key = f"bench/{name}/{slot}"
                pipeline.set(key, payload) if command == "set" else pipeline.get(key)
            pipeline.execute()
    barrier.wait(DEADLINE_S)
    client.delete(*(f"bench/{name}/{slot}" for slot in range(IN_FLIGHT)))


@contextlib.contextmanager
def _server(name: str, folder: Path) -> Iterator[str]:
    """Where producers connect to: a server of our own."""
    if "redis" in name:
        with redis_server(folder / "redis", "appendfsync everysec") as redis:
            target = partial(_serve_buffer, name, redis.url, folder)
            with contextlib.nullcontext() if name == "raw redis" else _process(target):
                yield redis.url
        return
    port = free_port()
    if name in ("raw zmq", "codec"):
        serve = _serve_echo if name == "raw zmq" else buffer_codec.serve
        place, target = f"tcp://127.0.0.1:{port}", partial(serve, port)
    else:
        place = f"zmq://127.0.0.1:{port}"
        target = partial(_serve_buffer, name, place, folder)
    with _process(target):
        yield place


@contextlib.contextmanager
def _process(target: Callable[[], object]) -> Iterator[None]:
    process = CONTEXT.Process(target=target)
    process.start()
    try:
        yield
    finally:
        process.terminate()
        process.join(DEADLINE_S)


def _serve_echo(port: int) -> None:
    service.keep_freed_memory()
    router = zmq.Context.instance().socket(zmq.ROUTER)
    router.bind(f"tcp://127.0.0.1:{port}")
    while True:
        router.send_multipart(router.recv_multipart(copy=False), copy=False)


def _serve_buffer(name: str, url: str, folder: Path) -> None:
    run = {"folder": folder, "log_level": "warning"}
    config = _config(url, run, journal=name == "zmq+journal")
    service.run(partial(daemon.serve, config), role="buffer", config=config)


def _config(
    url: str, run: Mapping[str, object] = MappingProxyType({}), **buffer: object
) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"max_steps": 1_000_000, **run},
            "model": {"path": "m"},
            "data": {"source": "addition"},
            "learner": {"groups_per_step": GROUPS_PER_STEP},
            "buffer": {
                "url": url,
                "max_staleness": MAX_STALENESS,
                "overdue": "train",
                "lease_ttl_s": 600.0,
                **buffer,
            },
        }
    )
