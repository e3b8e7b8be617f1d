"""A Redis server that holds a run already. Whole runs on one, under fire: test_chaos.py."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from buffers.redis.client import RedisBuffer
from streamrl.tracking.jsonl import read_validations
from tests.records import lease_one
from tests.redis_daemon import RedisDaemon
from tests.redis_server import RedisServer, redis_server
from tests.settings import set_options
from tests.system.test_launch import Launch, assert_every_step_once


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path / "redis") as server:
        yield server


async def leave_a_run_behind(url: str) -> None:
    """Of the name that the launches here have, at version 5."""
    daemon = RedisDaemon(url, groups_per_step=4, max_staleness=2)
    buffer = RedisBuffer(url, "run")
    await buffer.attach(5, None)
    await lease_one(buffer, "somebody's", "g", 0.0)
    await buffer.close()
    await asyncio.to_thread(daemon.stop)


def test_a_run_that_the_server_knows_is_not_continued_by_another(
    launch: Launch, redis: RedisServer
):
    asyncio.run(leave_a_run_behind(redis.url))
    settings = set_options(f"buffer.url={redis.url}", "run.max_steps=1")
    refused = launch(*settings)
    assert refused.end() == 2
    assert "the buffer holds a run run at version 5 already" in refused.output
    run = launch("--new", *settings)
    assert run.end() == 0, run.output
    assert_every_step_once(run, 1)
    assert (run.books["acknowledged"], run.books["learner_term"]) == (4, 1)


@pytest.mark.long
def test_an_ended_run_is_resumed_by_a_learner_that_comes_after_its_generators(
    launch: Launch, redis: RedisServer
):
    settings = (f"buffer.url={redis.url}", "validation.every=2")
    first = launch(*set_options(*settings, "run.max_steps=2"))
    assert first.end() == 0, first.output
    run = launch("--resume", *set_options(*settings, "run.max_steps=4"))
    assert run.end() == 0, run.output
    assert_every_step_once(run, 4)
    assert run.books["balanced"]
    # Which version the validator of the second launch gets first is a matter of time.
    assert {0, 2, 4} <= read_validations(run.folder).keys() <= {0, 2, 3, 4}
