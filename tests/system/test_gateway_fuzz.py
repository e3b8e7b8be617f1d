"""The fuzzer of the gateway with a small budget; by hand it takes any (`tests.fuzz`)."""

from pathlib import Path

from tests.fuzz.gateway_port import fuzz


async def test_the_gateway_answers_hostile_requests_and_an_agent_beside_them(tmp_path: Path):
    counts = await fuzz(tmp_path, 1000, seed=1)
    assert counts.num_answered == counts.num_messages
    assert {200, 400} <= counts.statuses.keys()
