"""Receivers on one inference server: one is sent each version, the others are told."""

import asyncio

from streamrl.types import HeldEndpoint
from tests.unit.weights.update_run import Generator, run
from tests.waiting import until


def was_told(generator: Generator, version: int) -> bool:
    last = generator.updates[-1]
    return isinstance(last.endpoint, HeldEndpoint) and last.policy_version == version


async def test_a_version_is_sent_once_for_each_server(tmp_path):
    async with run(tmp_path) as started:
        (a, leaving), (b, _), (c, _) = (
            started.join(name, server=server)
            for name, server in [("a", "x:1"), ("b", "x:1"), ("c", "y:1")]
        )
        started.publish(1, 1.0)
        await until(lambda: [g.policy_version for g in (a, b, c)] == [1, 1, 1])
        assert a.has(1.0)
        assert c.has(1.0)
        assert b.weights == {}
        assert was_told(b, 1)

        leaving.cancel()
        await asyncio.wait([leaving])
        started.publish(2, 2.0)
        await until(lambda: [g.policy_version for g in (b, c)] == [2, 2])
        assert b.has(2.0), "another one takes its place"


async def test_a_load_that_fails_is_given_to_another_receiver_on_the_server(tmp_path):
    async with run(tmp_path, deadline_s=8) as started:
        a, _ = started.join("a", server="x:1")
        a.fails = True
        b, _ = started.join("b", server="x:1")
        started.publish(1, 1.0)
        await until(lambda: b.has(1.0))
        a.fails = False
        await until(lambda: a.policy_version == 1)
        assert was_told(a, 1)
