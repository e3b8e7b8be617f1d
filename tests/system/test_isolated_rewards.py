"""Rewards in processes of their own: whatever one does, it costs its group and its process."""

import logging
import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from actors.rewards import make_reward
from actors.rewards.calls.limits import MAX_BYTES
from streamrl.config.data import DataSettings
from streamrl.errors import RewardError, RolloutError
from tests.unit.rewards.episodes import episode, values
from tests.waiting import block_until

CODE = r"""
import os, sys, time

def hangs_once(episode):
    if episode.response == "hang":
        time.sleep(600)
    return os.getpid()

def leaves(episode):
    sys.exit(3)

def crashes(episode):
    os.abort()

def floods(episode):
    for _ in range(4096):
        print("x" * 1023)
    return 1.0

def garbles(episode):
    os.write(int(sys.argv[1]), b"\x01\0\0\0\xc1")

def spawns(episode):
    os.system("sleep 600 & echo $! > " + episode.response)
    time.sleep(600)

def spawns_and_crashes(episode):
    os.system("sleep 600 & echo $! > " + episode.response)
    os.abort()
"""


@pytest.fixture
def reward(tmp_path: Path):
    file = tmp_path / "mine.py"
    file.write_text(CODE)

    def make(name: str, **settings: Any):
        entry = {"reward": f"{file}:{name}", "isolation": "process", **settings}
        return make_reward(DataSettings.model_validate({"source": "addition", "rewards": [entry]}))

    return make


async def test_a_flood_is_suppressed_and_counted(reward, capfd, caplog):
    with caplog.at_level(logging.WARNING):
        (score,) = await reward("floods").score([episode()])
    assert score.reward == 1.0
    assert score.metrics["reward/floods/suppressed_bytes"] > 3 * 2**20
    captured = capfd.readouterr()
    assert 0 < len(captured.out) + len(captured.err) <= 2 * MAX_BYTES
    assert ":floods prints more than 64 KiB" in caplog.text


async def test_a_process_that_hangs_is_ended_and_the_next_call_has_a_new_one(reward):
    isolated = reward("hangs_once", timeout_s=5, max_concurrent=1)
    (first,) = values(await isolated.score([episode()]))
    assert first != os.getpid()
    assert values(await isolated.score([episode()])) == [first]
    with pytest.raises(RewardError, match="hangs_once has not answered within timeout_s"):
        await isolated.score([episode("hang")])
    (second,) = values(await isolated.score([episode()]))
    assert second != first
    assert not psutil.pid_exists(int(first))


@pytest.mark.parametrize(
    ("name", "sentence"), [("spawns", "timeout_s"), ("spawns_and_crashes", "SIGABRT")]
)
async def test_what_an_ended_process_has_started_ends_with_it(reward, tmp_path, name, sentence):
    with pytest.raises(RewardError, match=sentence):
        await reward(name, timeout_s=5).score([episode(f"{tmp_path}/pid")])
    pid = int((tmp_path / "pid").read_text())
    block_until(lambda: not psutil.pid_exists(pid) or is_zombie(pid))


def is_zombie(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("crashes", "its process ended by SIGABRT"), ("leaves", "SystemExit")],
)
async def test_a_function_that_ends_its_process_fails_its_group(reward, name, sentence):
    with pytest.raises(RewardError, match=f"{name}: .*{sentence}"):
        await reward(name).score([episode()])


async def test_a_process_whose_answer_cannot_be_read_is_ended(reward):
    before = set(psutil.Process().children())
    with pytest.raises(RewardError, match=r"garbles: .*MessagePack"):
        await reward("garbles").score([episode()])
    assert set(psutil.Process().children()) <= before


async def test_rows_that_are_no_plain_data_cannot_be_isolated(reward):
    with pytest.raises(RewardError, match=r"object is no plain data.*isolation: thread"):
        await reward("leaves").score([episode(thing=object())])


async def test_math_compares_formulas_in_a_process_so_that_its_end_costs_a_group_alone():
    """Big numbers are computed in C, which holds the interpreter of its process."""
    entry = {"reward": "math", "max_concurrent": 1}
    reward = make_reward(DataSettings.model_validate({"source": "addition", "rewards": [entry]}))
    formula = episode(r"\boxed{\sqrt{8}}", r"2\sqrt{2}")
    before = set(psutil.Process().children())
    assert values(await reward.score([formula])) == [1.0]
    (worker,) = set(psutil.Process().children()) - before
    worker.kill()
    with pytest.raises(RolloutError, match="reward math: its process ended by SIGKILL"):
        await reward.score([formula])
    assert values(await reward.score([formula])) == [1.0]
