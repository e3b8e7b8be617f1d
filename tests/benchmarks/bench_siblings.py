"""Tokens sampled over tokens trained, while the generator is killed again and again.

    PYTHONPATH=. python tests/benchmarks/bench_siblings.py --kills 5 --kill-every 20
    ... --keep-every 1000000     as if nothing were kept

A real buffer with its journal and real generators, each killed by SIGKILL after `--kill-every`
seconds and replaced at once; the engine only waits: of NUM_SLOTS each samples `--rate` tokens a
second, of responses with MEDIAN tokens in the median, 8,192 at most, in groups of 16. Every token
counts that a generator has begun to wait for, also those that died with it; the learner trains what
is finished. After the last kill the generator is left alone until all that was begun is trained.
"""

import argparse
import asyncio
import itertools
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from actors import generator
from actors.environments import SingleTurn
from actors.episodes.group import GroupRunner
from actors.generator import Generator
from buffers.journal.journal import Journal
from buffers.journal.sqlite import SqliteStorage
from buffers.ledger.ledger import Ledger
from buffers.ledger.state import BufferState
from buffers.zmq.client import ZmqBuffer
from buffers.zmq.server import ZmqBufferServer
from streamrl.config import RunConfig
from streamrl.interfaces import CompletionHandle
from streamrl.types import Completion, FinishReason, SamplingParams, replace
from tests.unit.test_generator import FakeEngine, FakeRenderer, LengthReward, Prompts

MEDIAN, LONGEST, SIGMA = 128, 8192, 1.3
GROUP_SIZE, GROUPS_PER_STEP, NUM_SLOTS = 16, 4, 64
STALENESS = 1_000
MARK = 100_000


class WaitingEngine(FakeEngine):
    """A response of a random length takes its tokens / `rate` seconds."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self._rate = rate
        self._random = np.random.default_rng(os.getpid())
        self._slots = asyncio.Semaphore(NUM_SLOTS)
        self._running: dict[int, tuple[float, int]] = {}
        self._asked: dict[int, Callable[[], None]] = {}
        self._numbers = itertools.count()
        self._num_finished = 0

    @property
    def num_sampled(self) -> int:
        now_s = time.monotonic()
        running = self._running.values()
        sampled = (min(count, int((now_s - begun) * self._rate)) for begun, count in running)
        return self._num_finished + sum(sampled)

    async def generate(
        self, prompt: Sequence[int], sampling: SamplingParams, handle: CompletionHandle
    ) -> Completion:
        drawn = int(np.clip(MEDIAN * np.exp(SIGMA * self._random.normal()), 1, LONGEST))
        # Each token says how many there will be, so that one who goes on with a part knows it.
        total = prompt[-1] - MARK if prompt[-1] > MARK else drawn
        count = total - sum(token > MARK for token in prompt)
        async with self._slots:
            number, begun_s = next(self._numbers), time.monotonic()
            self._running[number] = (begun_s, count)

            def answer() -> None:
                sampled = min(count - 1, int((time.monotonic() - begun_s) * self._rate))
                if handle.is_asked and sampled > 0:
                    handle.sampled, handle.is_asked = self._part(total, sampled), False

            self._asked[number] = answer
            await asyncio.sleep(count / self._rate)
            del self._running[number], self._asked[number]
        self._num_finished += count
        return replace(self._part(total, count), finish_reason=FinishReason.STOP)

    def answer_asked(self) -> None:
        for answer in self._asked.values():
            answer()

    def _part(self, total: int, count: int) -> Completion:
        known = self._completion((), count, FinishReason.ABORT)
        return replace(known, token_ids=np.full(count, MARK + total, np.int32))


async def generate(url: str, counted: Path, rate: float, keep_every_s: float) -> None:
    """Until it is killed, or the run is over."""
    generator.KEEP_EVERY_S = keep_every_s
    config = RunConfig.model_validate(
        {
            "model": {"path": "unused"},
            "data": {"source": "addition"},
            "generator": {"group_size": GROUP_SIZE, "max_num_seqs": NUM_SLOTS},
            "buffer": {"max_staleness": STALENESS, "url": url},
            "learner": {"groups_per_step": GROUPS_PER_STEP},
            # There are none: a new generator need not catch up.
            "weights": {"address": "tcp://127.0.0.1:9", "publish_every": STALENESS},
        }
    )
    engine = WaitingEngine(rate)
    runner = GroupRunner(
        engine=engine,
        prompts=Prompts(),
        renderer=FakeRenderer(),
        make_environment=SingleTurn,
        environment="single_turn",
        reward=LengthReward(),
        sampling=SamplingParams(max_new_tokens=LONGEST),
        group_size=GROUP_SIZE,
        max_model_len=4 * LONGEST,
    )
    made = Generator(config, "g", engine, lambda _: runner, ZmqBuffer(url))
    running = asyncio.create_task(made.run())
    # One write of one length: a process that is killed leaves the last one or the one before.
    file = os.open(counted, os.O_WRONLY | os.O_CREAT)
    while not running.done():
        os.pwrite(file, b"%12d" % engine.num_sampled, 0)
        engine.answer_asked()
        await asyncio.sleep(0.05)
    await running


def num_sampled(folder: Path, number: int) -> int:
    """By the generator of this number so far."""
    file = folder / f"{number}.tokens"
    return int(file.read_text() or 0) if file.exists() else 0


async def train(url: str, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Replace the generator every `kill_every` seconds; train what is finished meanwhile."""
    learner = ZmqBuffer(url)
    await learner.attach(0, None)
    num_killed, version, process, begun_s = 0, 0, None, None
    while True:
        if process is None:
            words = (url, folder / f"{num_killed}.tokens", options.rate, options.keep_every)
            command = [sys.executable, __file__, "generate", *map(str, words)]
            process, begun_s = await asyncio.create_subprocess_exec(*command), None
        if await learner.take(GROUPS_PER_STEP, version, 0.5):
            version += 1
            await learner.advance(version)
            await learner.acknowledge(version)
        if begun_s is None and num_sampled(folder, num_killed):
            begun_s = time.monotonic()
        is_due = begun_s is not None and time.monotonic() >= begun_s + options.kill_every
        if is_due and num_killed < options.kills:
            process.kill()
            await process.wait()
            process, num_killed = None, num_killed + 1
        elif is_due:
            await learner.drain()
            books = (await learner.stats()).books
            if books.in_flight == 0:
                break
    lengths = (await learner.stats()).lengths
    await learner.finish()
    await process.wait()
    sampled = sum(num_sampled(folder, number) for number in range(num_killed + 1))
    await learner.close()
    return {
        "killed": num_killed,
        "groups": books.acknowledged,
        "sampled": sampled,
        "trained": lengths.trained.num_tokens,
        "sampled/trained": round(sampled / lengths.trained.num_tokens, 4),
        "put_tokens_once": lengths.sampled.num_tokens == lengths.trained.num_tokens,
    }


def main() -> None:
    if sys.argv[1:2] == ["generate"]:
        url, counted, rate, keep_every_s = sys.argv[2:]
        with suppress(KeyboardInterrupt):
            asyncio.run(generate(url, Path(counted), float(rate), float(keep_every_s)))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--kill-every", type=float, default=20.0, help="seconds of sampling")
    parser.add_argument("--rate", type=float, default=800.0, help="tokens a second of a slot")
    parser.add_argument("--keep-every", type=float, default=generator.KEEP_EVERY_S, help="seconds")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ledger = Ledger(groups_per_step=GROUPS_PER_STEP, max_staleness=STALENESS)
        state = BufferState[bytes](ledger, lease_ttl_s=30.0)
        storage = SqliteStorage(folder / "journal.sqlite", durability="process")
        journal = Journal(storage, state)
        journal.recover({}, time.monotonic())
        settings = {"quarantine": folder / "quarantine", "open_journal": lambda _: journal}
        server, stop = ZmqBufferServer(state, "zmq://127.0.0.1:0", **settings), threading.Event()
        thread = threading.Thread(target=server.serve, args=(stop,))
        thread.start()
        try:
            print(json.dumps(asyncio.run(train(server.url, folder, options))))
        finally:
            stop.set()
            thread.join()


if __name__ == "__main__":
    main()
