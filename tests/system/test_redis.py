"""Whole runs whose buffer is a Redis server: no daemon of ours, the same closing books."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from buffers.redis_buffer import RedisBuffer, RedisSettings
from tests.redis_server import RedisServer, redis_server
from tests.system.test_launch import ONE, Launch, _set, assert_books_close, assert_every_step_once


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path / "redis") as server:
        yield server


def test_a_run_on_redis_outlives_its_generators_its_learner_and_its_server(
    launch: Launch, redis: RedisServer
):
    settings = _set(f"buffer.url={redis.url}", "run.max_steps=20")
    run = launch(*settings)
    run.until_step(3)
    run.child("generator-1").kill()
    run.until_step(7)
    redis.kill()
    redis.start()
    run.until_step(12)
    run.child("learner").kill()
    assert run.end() == 0, run.output
    assert_every_step_once(run, 20)
    assert_books_close(run)
    assert run.books["acknowledged"] == 20 * 4
    assert run.books["leased"] == 0
    assert not run.log("buffer")
    assert "generator-1: done" in run.log("generator-1")


async def leave_a_run_behind(url: str) -> None:
    """Of the name that the launches here have, at version 5."""
    buffer = RedisBuffer(url, "run", RedisSettings(groups_per_step=4, max_staleness=2))
    await buffer.attach(5, None)
    await buffer.lease("somebody's", "g", 0.0)
    await buffer.close()


def test_a_run_that_the_server_knows_is_not_continued_by_another(
    launch: Launch, redis: RedisServer
):
    asyncio.run(leave_a_run_behind(redis.url))
    settings = _set(f"buffer.url={redis.url}", "run.max_steps=1", ONE)
    refused = launch(*settings)
    assert refused.end() == 2
    assert "the buffer holds a run run at version 5 already" in refused.output
    run = launch("--new", *settings)
    assert run.end() == 0, run.output
    assert_every_step_once(run, 1)
    assert (run.books["acknowledged"], run.books["epoch"]) == (4, 1)
