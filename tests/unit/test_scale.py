"""The simulation of many generators, at a small size: what holds whatever the costs are."""

import asyncio

import msgspec
import pytest

from tests.research.scale import COSTS, Measured, answers
from tests.research.scaled.load import Load
from tests.research.scaled.simulation import Network, Pipe, SimulatedTime, simulate
from tests.research.scaled.weights import Forming, Transfer

COST = msgspec.json.decode(COSTS.read_bytes(), type=Measured).costs
SMALL = Load(
    generators=16,
    group_size=4,
    median_tokens=100,
    max_tokens=400,
    groups_per_step=16,
    step_s=1.0,
    ranks=2,
    seconds=60,
    warm_s=15,
)


@pytest.mark.parametrize("payloads_outside", [False, True])
def test_the_books_close_and_nothing_is_trained_twice(payloads_outside: bool) -> None:
    simulated = simulate(SMALL, COST, Network(payloads_outside=payloads_outside))
    outcome = simulated.outcome
    assert outcome.books.balanced
    assert (outcome.num_trained_twice, outcome.num_trained % SMALL.groups_per_step) == (0, 0)
    assert outcome.books.dropped == {}
    assert 0 <= outcome.staleness <= SMALL.max_staleness
    assert 0 < outcome.groups_per_s < 1.1 * min(SMALL.possible, 16 / SMALL.step_s)
    assert all(0 <= busy < 1 for busy in simulated.busy.values())
    assert (simulated.busy["link in"] == 0) is payloads_outside


def test_a_learner_that_is_too_slow_sets_the_pace_and_groups_grow_as_old_as_they_may() -> None:
    slow = msgspec.structs.replace(SMALL, step_s=10.0, seconds=200, warm_s=100)
    outcome = simulate(slow, COST, Network()).outcome
    assert outcome.groups_per_s == pytest.approx(1.6, rel=0.02)
    assert outcome.staleness == pytest.approx(SMALL.max_staleness, abs=1.0)


def test_a_server_that_is_saturated_is_seen() -> None:
    costly = msgspec.structs.replace(COST, put_s=0.2)
    simulated = simulate(SMALL, costly, Network())
    assert simulated.busy["server"] > 0.9
    assert simulated.outcome.groups_per_s <= 1.1 * 5.0


def test_a_sleep_of_an_hour_takes_no_time_and_bytes_pass_one_after_the_other() -> None:
    pipe = Pipe(0.5)

    async def carried(num_bytes: int) -> float:
        await asyncio.sleep(3600)
        await pipe.carry(num_bytes)
        return asyncio.get_running_loop().time()

    async def both() -> list[float]:
        return await asyncio.gather(carried(2), carried(4))

    with asyncio.Runner(loop_factory=SimulatedTime) as runner:
        assert runner.run(both()) == pytest.approx([3601, 3603])


def test_the_load_of_a_size_is_one_that_a_learner_keeps_up_with() -> None:
    load = answers("short", 128)
    assert load.groups_per_step / load.step_s == pytest.approx(1.25 * load.possible)


def test_a_chain_grows_by_a_piece_for_each_generator_and_a_broadcast_by_a_copy_for_each_level() -> (
    None
):
    ways = Transfer(num_bytes=1e9, link=1e9, file_system=4e9).seconds()
    assert [ways["broadcast"](count) for count in (1, 3, 4, 1000)] == [1, 2, 3, 10]
    assert ways["chain"](1) == 1
    assert ways["chain"](1001) == pytest.approx(1 + 1000 * (4 * 2**20 / 1e9 + 2e-4))
    assert (ways["file system"](2), ways["file system"](40)) == (2, 11)
    assert Forming(member_s=0.0, address_bytes=1.0).limit(8.0, link=1e3) == 20
