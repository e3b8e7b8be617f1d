"""A reward that hangs, floods, ends its process or answers without end costs its group alone."""

import asyncio
import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from actors import concurrency
from actors.rewards import make_reward
from actors.rewards.calls.limits import MAX_BYTES, RewardLimits
from streamrl.config.data import DataSettings
from streamrl.errors import ConfigError, RewardError, RolloutError
from tests.unit.rewards.episodes import episode, values

CODE = """
import itertools, logging, os, signal, sys, threading, time

over = threading.Event()

def hangs(episode):
    over.wait(60)
    return 1.0

def alarms(episode):
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    return 1.0

def leaves(episode):
    sys.exit(3)

async def leaves_async(episode):
    sys.exit(3)

class TimedOut(BaseException):  # as that of the package func_timeout
    pass

def times_out(episode):
    raise TimedOut("late")

async def times_out_async(episode):
    raise TimedOut("late")

def endless(episodes):
    return itertools.repeat(1.0)

def floods(episode):
    for _ in range(4096):
        print("x" * 1023)
    logging.getLogger("mine").warning("y" * 4096)
    return 1.0

fails = 0

def fails_twice(episode):
    global fails
    fails += 1
    if fails < 3:
        raise ConnectionError("away")
    return fails
"""


@pytest.fixture
def reward(tmp_path: Path):
    # A module's name is its file's, and the first of a name keeps it.
    file = tmp_path / f"{tmp_path.name}.py"
    file.write_text(CODE)

    def make(name: str, **settings: Any):
        entry = {"reward": f"{file}:{name}", **settings}
        return make_reward(DataSettings.model_validate({"source": "addition", "rewards": [entry]}))

    return make


async def test_a_hanging_call_costs_its_group_after_its_timeout(reward):
    with pytest.raises(RewardError, match=r"hangs has not answered within timeout_s.* 0\.05 s"):
        await reward("hangs", timeout_s=0.05).score([episode()])


async def test_threads_that_hang_are_bounded_and_come_back(reward, monkeypatch, tmp_path):
    monkeypatch.setattr(concurrency, "MAX_HUNG", 2)
    hanging = reward("hangs", timeout_s=0.05)
    for _ in range(2):
        with pytest.raises(RewardError, match="timeout_s"):
            await hanging.score([episode()])
    with pytest.raises(RewardError, match=r"2 earlier calls have not returned.*isolation: process"):
        await hanging.score([episode()])
    sys.modules[tmp_path.name].over.set()
    async with asyncio.timeout(120):
        while True:
            try:
                assert values(await hanging.score([episode()])) == [1.0]
                return
            except RolloutError:
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("name", ["leaves", "leaves_async"])
async def test_a_function_that_exits_fails_its_group(reward, name):
    with pytest.raises(RewardError, match=f"{name}: .*SystemExit"):
        await reward(name, timeout_s=30).score([episode()])


@pytest.mark.parametrize("name", ["times_out", "times_out_async"])
async def test_what_is_raised_and_no_exception_fails_its_group(reward, name):
    with pytest.raises(RewardError, match=f"{name}: .*TimedOut: late"):
        await reward(name, timeout_s=30).score([episode()])


async def test_an_answer_without_end_is_refused(reward):
    async with asyncio.timeout(120):
        with pytest.raises(RewardError, match="it must return 2 finite numbers"):
            await reward("endless").score([episode(), episode()])


async def test_a_call_is_tried_again(reward):
    assert values(await reward("fails_twice", retries=2).score([episode()])) == [3.0]


async def test_the_last_try_says_how_many_there_were(reward):
    with pytest.raises(RewardError, match=r"ConnectionError: away.*\(tried 2 times\)"):
        await reward("fails_twice", retries=1).score([episode()])


async def test_no_more_calls_run_at_a_time_than_may():
    limits, running, most = RewardLimits("reward x", max_concurrent=3), 0, 0

    async def call() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1

    await asyncio.gather(*(limits.call(call) for _ in range(20)))
    assert most == 3


async def test_a_flood_is_suppressed_and_counted(reward, capfd, caplog):
    flooding = reward("floods")
    with caplog.at_level(logging.WARNING):
        (score,) = await flooding.score([episode()])
    assert score.reward == 1.0
    assert score.metrics["reward/floods/suppressed_bytes"] > 3 * 2**20
    captured = capfd.readouterr()
    assert 0 < len(captured.out) + len(captured.err) <= 2 * MAX_BYTES
    assert ":floods prints more than 64 KiB" in caplog.text
    print("the rest of the daemon may print")
    assert "the rest of the daemon" in capfd.readouterr().out


async def test_signals_need_a_process_and_the_error_says_so(reward):
    with pytest.raises(RewardError, match=r"signal only works in main .*needs isolation: process"):
        await reward("alarms").score([episode()])
    assert values(await reward("alarms", isolation="process").score([episode()])) == [1.0]


def test_isolation_of_an_async_function_is_refused(reward):
    with pytest.raises(ConfigError, match=r"isolation has no effect on .*leaves_async"):
        reward("leaves_async", isolation="process")
