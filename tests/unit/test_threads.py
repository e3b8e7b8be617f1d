"""Threads of a function: kept for the next call, replaced where one hangs, ended with it."""

import asyncio
import gc
import threading

import pytest

from actors.concurrency import Threads
from actors.rewards import make_reward
from streamrl.config.data import DataSettings
from streamrl.errors import RolloutError
from tests.unit.rewards.episodes import episode
from tests.waiting import until

DEADLINE_S = 120.0


async def test_one_thread_serves_calls_that_follow_each_other():
    threads = Threads("reward x")
    assert len({await threads.run(threading.get_ident) for _ in range(20)}) == 1
    many = await asyncio.gather(*(threads.run(threading.get_ident) for _ in range(4)))
    assert len(set(many)) <= 4


async def test_a_call_that_hangs_keeps_its_thread_until_it_returns():
    threads = Threads("reward x")
    usual, released = await threads.run(threading.get_ident), threading.Event()
    hanging = asyncio.create_task(threads.run(lambda: released.wait(DEADLINE_S)))
    await asyncio.sleep(0)
    hanging.cancel()
    await asyncio.wait({hanging})
    other = await threads.run(threading.get_ident)
    assert other != usual
    released.set()
    await until(lambda: not threads._num_hung, DEADLINE_S)
    both = {await threads.run(threading.get_ident) for _ in range(4)}
    assert both <= {usual, other}


async def test_a_call_that_cancels_itself_is_over():
    threads = Threads("reward x")

    def work() -> None:
        raise asyncio.CancelledError

    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(RolloutError, match="reward x: CancelledError"):
            await threads.run(work)
    assert not threads._num_hung
    assert await threads.run(lambda: 1) == 1


async def test_threads_end_with_what_they_are_for():
    threads, barrier = Threads("reward x"), threading.Barrier(3)

    def work() -> threading.Thread:
        barrier.wait(DEADLINE_S)
        return threading.current_thread()

    used = await asyncio.gather(*(threads.run(work) for _ in range(3)))
    assert len({thread.ident for thread in used if thread.is_alive()}) == 3
    del threads
    gc.collect()
    await until(lambda: not any(thread.is_alive() for thread in used), DEADLINE_S)


@pytest.mark.parametrize(
    ("settings", "is_quick"),
    [
        ({"reward": "exact_match"}, True),
        ({"reward": "length", "reward_kwargs": {"max_tokens": 9}}, True),
        ({"reward": "exact_match", "reward_kwargs": {"pattern": "(a+)+b"}}, False),
        ({"reward": "regex", "reward_kwargs": {"pattern": "(a+)+b"}}, False),
    ],
)
async def test_what_takes_microseconds_needs_no_thread(settings, is_quick, monkeypatch):
    asked = []
    run = Threads.run

    async def noted(self, work):
        asked.append(work)
        return await run(self, work)

    monkeypatch.setattr(Threads, "run", noted)
    reward = make_reward(DataSettings(source="copy", **settings))
    scores = await reward.score([episode("a", "a"), episode("b", "a")])
    assert len(scores) == 2
    assert bool(asked) is not is_quick
