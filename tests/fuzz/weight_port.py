"""A live learner's weight port and hostile messages, as many as one likes; then a hostile learner.

    PYTHONPATH=. python tests/fuzz/weight_port.py --messages 1000000 [--seed 1]

Messages come from `tests.fuzz.hostile`: every record of the protocol in the name of a receiver that
is there, mutated bytes, any number of frames, frames that are too large. Beside them a receiver of
ours gets version after version. What must hold: the sender lives, the receiver misses no version,
and memory stays. Prints one JSON line. `tests/system/test_weight_fuzz.py` does the same with few
messages.
"""

import asyncio
import json
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import msgspec
import psutil
import zmq
import zmq.asyncio

from actors.engines.model import require_same_parameters
from streamrl import wire
from streamrl.types import FilesEndpoint, HostMemory, LoadReport, SharedEndpoint, WeightUpdate
from streamrl.weights.layout import manifest_of
from streamrl.weights.locality import locality_of
from streamrl.weights.protocol import Announce, FromReceiver, FromSender, Transfer
from streamrl.weights.receiver import WeightReceiver
from streamrl.weights.sender_socket import MAX_MESSAGE_BYTES
from tests.fuzz.hostile import Frames, corpus, endless, messages, parse
from tests.unit.weights.update_run import SHAPES, Generator, Run, parameters, run
from tests.waiting import until

BATCH = 2000
PUBLISH_S = 0.5
WAIT_S = 120.0
GROWTH_BYTES = 128 * 2**20
GOOD = "g"
"""One of the names that hostile messages carry."""

TOO_LARGE = bytes(2 * MAX_MESSAGE_BYTES)

several = messages(FromReceiver, st.binary(max_size=20))
single = several.map(lambda frames: frames[:1])
hostile_messages = st.one_of(single, single, single, several)


class Fuzzed(msgspec.Struct):
    """What was sent, and what the receiver of ours saw beside it."""

    num_messages: int = 0
    num_refused: int = 0
    num_versions: int = 0
    seconds: float = 0.0
    rss_before_mb: int = 0
    rss_after_mb: int = 0
    latency_p50_ms: float = 0.0
    latency_max_ms: float = 0.0


async def fuzz(folder: Path, num_messages: int, seed: int, *, num_drawn: int = 5000) -> Fuzzed:
    """Raises AssertionError or TimeoutError where something does not hold."""
    counts = Fuzzed()
    source = endless(corpus(hostile_messages, num_drawn, seed), seed)
    async with run(folder, deadline_s=4) as started:
        good, _ = started.join(GOOD, locality_of("cpu"))
        await until(lambda: started.sender.gauges()["num_receivers"] >= 1)
        counts.rss_before_mb = _rss_mb()
        start_s = time.monotonic()
        publishing = asyncio.create_task(publish(started, good, counts))
        while counts.num_messages < num_messages:
            await send(started.sender.address, list(islice(source, BATCH)))
            counts.num_messages += BATCH
            assert not publishing.done(), publishing.exception()
        counts.seconds = round(time.monotonic() - start_s, 1)
        publishing.cancel()
        await asyncio.wait([publishing])
        last = counts.num_versions + 2
        started.publish(last, float(last))
        await until(lambda: good.has(float(last)), WAIT_S)
        assert not any(task.done() for task in started.running)
        counts.num_refused = int(started.sender.gauges()["num_refused_messages"])
    counts.rss_after_mb = _rss_mb()
    assert (counts.rss_after_mb - counts.rss_before_mb) * 2**20 < GROWTH_BYTES, counts
    return counts


async def publish(started: Run, good: Generator, counts: Fuzzed) -> None:
    """Version after version; until cancelled. Waits for each to be loaded, for WAIT_S."""
    latencies_s = []
    while True:
        version = counts.num_versions + 1
        start_s = time.monotonic()
        started.publish(version, float(version))
        await until(lambda v=version: good.has(float(v)), WAIT_S)  # type: ignore[misc]
        latencies_s.append(time.monotonic() - start_s)
        counts.num_versions = version
        counts.latency_p50_ms = round(1000 * sorted(latencies_s)[len(latencies_s) // 2], 1)
        counts.latency_max_ms = round(1000 * max(latencies_s), 1)
        await asyncio.sleep(PUBLISH_S)


async def send(address: str, batch: list[Frames]) -> None:
    """One connection, which ends with a frame that is too large. Waits as its queues demand, for
    WAIT_S at most with no message taken."""
    loop = asyncio.get_running_loop()
    with zmq.Context.instance().socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 1000)
        socket.setsockopt(zmq.SNDHWM, 10)
        socket.connect(address)
        async with asyncio.timeout(WAIT_S) as limit:
            for frames in (*batch, [TOO_LARGE]):
                limit.reschedule(loop.time() + WAIT_S)
                while not _is_sent(socket, frames):
                    await asyncio.sleep(0.001)


def _is_sent(socket: "zmq.Socket[bytes]", frames: Frames) -> bool:
    try:
        socket.send_multipart(frames, zmq.NOBLOCK)
    except zmq.Again:
        return False
    return True


async def fuzz_receiver(num_messages: int, seed: int, *, num_drawn: int = 2000) -> int:
    """A receiver that follows a hostile learner, as one may come by the port without keys; the
    number of updates that it was sent and did not load.

    Raises AssertionError where the receiver ends.
    """
    source = updates(corpus(messages(FromSender, st.binary(max_size=20)), num_drawn, seed), seed)
    engine = Generator("tcp://127.0.0.1:9", "unused")
    num_loads = 0

    async def load(update: WeightUpdate) -> LoadReport:
        nonlocal num_loads
        num_loads += 1
        require_same_parameters(update.manifest, SHAPES)
        return await engine.load(update)

    with zmq.asyncio.Context.instance().socket(zmq.ROUTER) as hostile:
        port = hostile.bind_to_random_port("tcp://127.0.0.1")
        receiver = WeightReceiver(f"tcp://127.0.0.1:{port}", "a", load)
        running = asyncio.create_task(receiver.run())
        address, _ = await hostile.recv_multipart()
        for number, frames in enumerate(islice(source, num_messages)):
            await hostile.send_multipart([address, *frames])
            if number % 100 == 0:
                await asyncio.sleep(0)
        async with asyncio.timeout(WAIT_S):
            reply = b""
            while b"ready" not in reply:
                assert not running.done(), running.exception()
                # A ROUTER drops what a busy receiver has no room for.
                await hostile.send_multipart([address, wire.encode(Announce(2**40))])
                _, reply = await hostile.recv_multipart()
        assert engine.policy_version == 0
        running.cancel()
        await asyncio.wait([running])
    return num_loads


def updates(drawn: list[Frames], seed: int) -> Iterator[Frames]:
    """Without broadcasts, whose hosts would be asked for, each for its timeout; every fifth is an
    update of the right model from an endpoint that is not there."""
    for number, frames in enumerate(endless(drawn, seed)):
        if b"broadcast" not in frames[0]:
            yield frames
        if number % 5 == 0:
            yield [wire.encode(_plausible(number))]


def _plausible(number: int) -> Transfer:
    own = manifest_of(parameters(0.0))
    shared = SharedEndpoint(
        memory=_memory(number),
        start=2 ** (number % 50),
        stamps=_memory(number),
        stamp_at=number,
        stamp=0,
        bucket_bytes=number % 7,
    )
    file = FilesEndpoint(path=["/dev/null", "/proc/self/mem", "/", "\0"][number // 2 % 4])
    endpoint: Any = shared if number % 2 else file
    update = WeightUpdate(
        policy_version=1, learner_id="h", manifest=own, endpoint=endpoint, key=bytes(40)
    )
    return Transfer(number, update)


def _memory(number: int) -> HostMemory:
    sockets = ["/dev/shm/none", "/dev/null", "\0", "x" * 1000, "", "/dev/shm"]
    return HostMemory(socket=sockets[number % 6], inode=0, num_bytes=100)


def _rss_mb() -> int:
    return int(psutil.Process().memory_info().rss >> 20)


def main() -> None:
    arguments = parse(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        work = fuzz(Path(folder), arguments.messages, arguments.seed, num_drawn=arguments.drawn)
        counts = asyncio.run(work)
    refused = asyncio.run(fuzz_receiver(arguments.messages // 100, arguments.seed))
    print(json.dumps({**msgspec.to_builtins(counts), "num_updates_refused": refused}))


if __name__ == "__main__":
    main()
