"""The fuzzer of the weight port with a small budget; by hand it takes any (`tests.fuzz`)."""

from tests.fuzz.weight_port import fuzz, fuzz_receiver


async def test_the_weight_port_holds_against_hostile_messages(tmp_path):
    counts = await fuzz(tmp_path, 6000, seed=1, num_drawn=500)
    assert counts.num_versions > 0
    assert counts.num_refused > 1000


async def test_a_receiver_holds_against_a_hostile_learner():
    assert await fuzz_receiver(2000, seed=1, num_drawn=300) > 100
