"""Waiting environments: asynchronous episodes against lock-step, in episodes/s of one generator.

    python tests/benchmarks/bench_episodes.py [--episodes 512] [--slots 16] [--turns 4] [--rounds 2]

Each episode has `turns` turns, and between two of them a tool that takes 50 to 500 ms, as its
group's seed says. The HF engine samples with the tiny Llama; the generator, its leases and the
buffer are those of a run.

    asynchronous    `streamrl generator`: an episode that waits for its tool leaves its slot
    one_per_slot    the same with `generator.episode.max_in_flight` as many as there are slots
    lock_step       a batch of as many episodes as there are slots steps together: all sample, then
                    all wait for their tools
    lock_step_wide  the same with as many episodes in a batch as the asynchronous run had in flight

`idle_frac` is the share of the slots' time in which no request was there for a slot, though the
buffer would have granted a group. One JSON line; nobody imports this.
"""

import argparse
import asyncio
import itertools
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from actors.engines.hf.engine import HfEngine
from actors.episodes.group import GroupRunner, unbuffered_lease
from actors.generator import Generator
from actors.make_model import make_tokenizer
from actors.rendering.renderer import ChatRenderer
from buffers.ledger.ledger import Ledger
from buffers.ledger.state import BufferState
from buffers.memory import MemoryBuffer
from streamrl.config import RunConfig
from streamrl.interfaces import (
    CompletionHandle,
    EnvironmentContext,
    Episode,
    Observation,
    Prompt,
    Transition,
)
from streamrl.types import Completion, SamplingParams, TrajectoryGroup
from tests.tiny_model import EOS, make_llama

GROUP_SIZE = 4
TOKENS_PER_TURN = 16
TOOL_S = (0.05, 0.5)
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"


@dataclass
class SlotTimes:
    """How many requests are in the engine, integrated over time."""

    num_slots: int
    num_requests: int = 0
    most_requests: int = 0
    idle_s: float = 0.0
    last_s: float = field(default_factory=time.perf_counter)

    def change(self, difference: int) -> None:
        now_s = time.perf_counter()
        self.idle_s += max(0, self.num_slots - self.num_requests) * (now_s - self.last_s)
        self.last_s = now_s
        self.num_requests += difference
        self.most_requests = max(self.most_requests, self.num_requests)

    def begin(self) -> None:
        self.change(0)
        self.idle_s = 0.0


class MeasuredEngine:
    """An engine whose requests are counted."""

    def __init__(self, engine: HfEngine, times: SlotTimes) -> None:
        self._engine, self._times = engine, times
        self.gauges, self.load_weights = engine.gauges, engine.load_weights
        self.close = engine.close

    @property
    def policy_version(self) -> int:
        return self._engine.policy_version

    @property
    def learner_id(self) -> str:
        return self._engine.learner_id

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        handle: CompletionHandle | None = None,
    ) -> Completion:
        self._times.change(1)
        try:
            return await self._engine.generate(prompt_token_ids, sampling, handle)
        finally:
            self._times.change(-1)


class Barrier:
    """Where all running episodes of a lock-step batch meet, turn by turn."""

    def __init__(self, count: int) -> None:
        self._barrier = asyncio.Barrier(count)

    async def wait(self) -> None:
        await self._barrier.wait()


class ToolEnvironment:
    """A tool of 50 to 500 ms between two turns."""

    num_running = 0
    most_running = 0

    def __init__(self, num_turns: int, barrier: Barrier | None = None) -> None:
        self._num_turns, self._barrier = num_turns, barrier
        self._turn = 0

    async def start(self, context: EnvironmentContext) -> Observation:
        seed = np.random.SeedSequence([context.seed, context.episode_index])
        self._waits_s = np.random.default_rng(seed).uniform(*TOOL_S, self._num_turns)
        ToolEnvironment.num_running += 1
        ToolEnvironment.most_running = max(
            ToolEnvironment.num_running, ToolEnvironment.most_running
        )
        return Observation(token_ids=context.prompt_token_ids)

    async def step(self, completion: Completion) -> Transition:
        self._turn += 1
        if self._turn == self._num_turns:
            return Transition(done=True)
        if self._barrier is not None:
            await self._barrier.wait()
        await asyncio.sleep(self._waits_s[self._turn])
        if self._barrier is not None:
            await self._barrier.wait()
        return Transition(observation=Observation(token_ids=(5, 6)), done=False)

    async def close(self) -> None:
        ToolEnvironment.num_running -= 1


class Prompts:
    def __getitem__(self, prompt_index: int) -> Prompt:
        return Prompt(LETTERS[prompt_index % 30 :][:4], "")


class NoReward:
    async def score(self, episodes: Sequence[Episode]) -> list[float]:
        return [0.0] * len(episodes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=512)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    best: dict[str, dict[str, float]] = {}
    for _ in range(arguments.rounds):
        for name, figures in asyncio.run(measure(arguments)).items():
            if (
                figures["episodes_per_s"]
                > best.get(name, figures | {"episodes_per_s": 0})["episodes_per_s"]
            ):
                best[name] = figures
    rate = {name: figures["episodes_per_s"] for name, figures in best.items()}
    ratios = {f"over_{n}": rate["asynchronous"] / rate[n] for n in rate if n != "asynchronous"}
    setting = {**vars(arguments), "tool_s": TOOL_S, "cores": os.cpu_count()}
    print(json.dumps({"benchmark": "episodes", **setting, **rounded(best), **rounded(ratios)}))


def rounded(figures: dict) -> dict:
    return {
        name: rounded(value) if isinstance(value, dict) else round(value, 4)
        for name, value in figures.items()
    }


async def measure(arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Every way, one after the other."""
    slots, turns, count = arguments.slots, arguments.turns, arguments.episodes
    free = await asynchronous(slots, turns, count, None)
    return {
        "asynchronous": free,
        "one_per_slot": await asynchronous(slots, turns, count // 2, slots),
        "lock_step": await lock_step(slots, turns, count // 4, slots),
        "lock_step_wide": await lock_step(slots, turns, count, int(free["most_in_flight"])),
    }


async def asynchronous(
    slots: int, turns: int, count: int, max_in_flight: int | None
) -> dict[str, float]:
    """A generator against a buffer that admits whatever it asks for."""
    ToolEnvironment.most_running = ToolEnvironment.num_running = 0
    config, runner, times = make_runner(slots, turns, max_in_flight)
    state = BufferState[TrajectoryGroup](
        Ledger(groups_per_step=count, max_staleness=1), lease_ttl_s=60.0
    )
    learner = MemoryBuffer(state)
    await learner.attach(0, None)
    generator = Generator(config, "g", runner.engine, lambda _: runner, learner.client())
    running = asyncio.create_task(generator.run())

    async def until(num_groups: int) -> float:
        while state.ledger.books().buffered < num_groups:
            await asyncio.sleep(0.002)
        return time.perf_counter()

    began_s = await until(num_first := count // GROUP_SIZE // 4)
    times.begin()
    seconds = await until(num_first + count // GROUP_SIZE) - began_s
    times.change(0)
    idle = times.idle_s / slots / seconds
    generator.stop()
    await running
    await runner.engine.close()
    return {
        "episodes_per_s": count / seconds,
        "idle_frac": idle,
        "most_in_flight": ToolEnvironment.most_running,
        "most_requests": times.most_requests,
    }


async def lock_step(slots: int, turns: int, count: int, batch: int) -> dict[str, float]:
    """Batches of `batch` episodes, each of whose turns begin and end together."""
    batch = max(GROUP_SIZE, batch - batch % GROUP_SIZE)
    num_batches = max(1, count // batch)
    _, runner, times = make_runner(slots, turns, None, Barrier(batch))
    numbers = itertools.count()
    times.begin()
    began_s = time.perf_counter()
    for _ in range(num_batches):
        leases = [unbuffered_lease("bench", next(numbers)) for _ in range(batch // GROUP_SIZE)]
        await asyncio.gather(*map(runner.run, leases))
    times.change(0)
    seconds = time.perf_counter() - began_s
    await runner.engine.close()
    idle = times.idle_s / slots / seconds
    return {"episodes_per_s": num_batches * batch / seconds, "idle_frac": idle, "batch": batch}


def make_runner(
    slots: int, turns: int, max_in_flight: int | None, barrier: Barrier | None = None
) -> tuple[RunConfig, GroupRunner, SlotTimes]:
    config = RunConfig.model_validate(
        {
            "model": {"path": "unused"},
            "data": {"source": "addition"},
            "generator": {
                "environment": "tool.py:Tool",
                "group_size": GROUP_SIZE,
                "max_num_seqs": slots,
                "max_new_tokens": TOKENS_PER_TURN,
                "episode": {"max_in_flight": max_in_flight},
            },
            "buffer": {"max_staleness": 1},
            "weights": {"address": "tcp://127.0.0.1:9"},
        }
    )
    times = SlotTimes(slots)
    engine = HfEngine(
        make_llama(),
        eos_token_ids=frozenset([EOS]),
        max_num_seqs=slots,
        max_model_len=256,
    )
    runner = GroupRunner(
        engine=MeasuredEngine(engine, times),
        prompts=Prompts(),
        renderer=ChatRenderer(make_tokenizer(LETTERS), config.data),
        make_environment=lambda: ToolEnvironment(turns, barrier),
        environment="tool",
        reward=NoReward(),
        sampling=SamplingParams(max_new_tokens=TOKENS_PER_TURN, ignore_eos=True),
        group_size=GROUP_SIZE,
        max_model_len=256,
        settings=config.generator.episode,
    )
    return config, runner, times


if __name__ == "__main__":
    main()
