"""Whatever a user's code, an engine or a peer does: what waits for it stops waiting."""

import ast
import asyncio
import dataclasses
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from actors.concurrency import first_result, together
from actors.rewards.forms import BoundFunction
from actors.rewards.weighted_sum import FunctionReward
from streamrl.errors import RolloutError
from streamrl.interfaces import EnvironmentContext, Observation
from streamrl.types import FilesEndpoint, LoadReport, WeightUpdate
from streamrl.weights import receiver as receiving
from tests.records import lease_one
from tests.unit.test_generator import Run

ROOT = Path(__file__).parents[2]


class EndlessEnvironment:
    async def start(self, context: EnvironmentContext) -> Observation:
        await asyncio.Event().wait()
        raise AssertionError

    async def close(self) -> None:
        pass


@pytest.fixture
def endless():
    """A reward that blocks its thread until the test is over."""
    over = threading.Event()
    yield FunctionReward(BoundFunction(lambda episode: over.wait(), {}, name="endless"))
    over.set()


@pytest.mark.parametrize("hangs", ["engine", "environment", "reward"])
async def test_a_group_that_never_ends_has_failed_at_its_deadline(hangs: str, endless):
    run = Run()
    runner = dataclasses.replace(run.runner, deadline_s=0.05)
    match hangs:
        case "engine":
            run.engine.open.clear()
        case "environment":
            runner = dataclasses.replace(runner, make_environment=EndlessEnvironment)
        case "reward":
            runner = dataclasses.replace(runner, reward=endless)
    await run.learner.attach(0, None)
    lease = await lease_one(run.learner, "a", "g", 0.0)
    async with asyncio.timeout(120):
        with pytest.raises(RolloutError, match=r"generator\.group_deadline_s, which is 0\.05 s"):
            await runner.run(lease)


async def test_a_timeout_of_the_users_own_is_not_called_the_deadline():
    class Impatient:
        async def score(self, episodes):
            raise TimeoutError("of the judge")

    run = Run()
    runner = dataclasses.replace(run.runner, deadline_s=60.0, reward=Impatient())
    await run.learner.attach(0, None)
    with pytest.raises(TimeoutError, match="of the judge"):
        await runner.run(await lease_one(run.learner, "a", "g", 0.0))


async def test_rewards_that_never_end_take_no_thread_from_weight_updates(endless):
    calls = [asyncio.create_task(endless.score([None])) for _ in range(40)]
    async with asyncio.timeout(120):
        assert await asyncio.to_thread(lambda: "loaded") == "loaded"
    assert not any(call.done() for call in calls)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


def test_a_reward_that_never_ends_does_not_keep_the_process():
    program = (
        "import asyncio, time\n"
        "from actors.rewards.forms import BoundFunction\n"
        "from actors.rewards.weighted_sum import FunctionReward\n"
        "endless = BoundFunction(lambda episode: time.sleep(600), {}, 'endless')\n"
        "async def main():\n"
        "    call = asyncio.create_task(FunctionReward(endless).score([None]))\n"
        "    await asyncio.sleep(0.1)\n"
        "    call.cancel()\n"
        "asyncio.run(main())\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300, cwd=ROOT)


SOURCES = [
    path
    for package in ("actors", "buffers", "learners", "streamrl")
    for path in (ROOT / package).rglob("*.py")
]
SENDS = re.compile(r"\.socket\(zmq\.(DEALER|ROUTER|PUSH|PUB|REQ|PAIR)\)")


def test_every_socket_says_how_long_unsent_words_keep_its_process():
    sockets = [path for path in SOURCES if SENDS.search(path.read_text())]
    assert len(sockets) >= 5
    assert [path.name for path in sockets if "zmq.LINGER" not in path.read_text()] == []


def test_every_rendezvous_has_a_timeout():
    calls = [
        call
        for path in SOURCES
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "TCPStore"
    ]
    assert len(calls) >= 2
    assert all("timeout" in {keyword.arg for keyword in call.keywords} for call in calls)


UPDATE = WeightUpdate(
    policy_version=7,
    learner_id="h",
    manifest=(),
    endpoint=FilesEndpoint(path="nowhere"),
    key=b"",
)


async def test_an_engine_that_never_loads_ends_its_generator(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(receiving, "LOAD_S", 0.05)

    async def never(_: WeightUpdate) -> LoadReport:
        await asyncio.Event().wait()
        raise AssertionError

    with pytest.raises(RuntimeError, match=r"not loaded version 7 for 0\.05 s"):
        await receiving._load_in_time(never, UPDATE)


async def test_a_load_that_is_canceled_from_inside_ends_the_generator():
    """As by a socket that is closed under it; one that is canceled from outside is canceled."""
    begun = asyncio.Event()

    async def canceled(_: WeightUpdate) -> LoadReport:
        raise asyncio.CancelledError

    async def endless(_: WeightUpdate) -> LoadReport:
        begun.set()
        await asyncio.Event().wait()
        raise AssertionError

    with pytest.raises(RuntimeError, match="canceled its load of version 7"):
        await receiving._load_in_time(canceled, UPDATE)
    loading = asyncio.create_task(receiving._load_in_time(endless, UPDATE))
    await begun.wait()
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading


async def test_a_cancellation_of_all_stays_one_whatever_becomes_of_each():
    async def failing_at_its_end(has_begun: asyncio.Event) -> None:
        try:
            has_begun.set()
            await asyncio.Event().wait()
        finally:
            raise RolloutError("it cannot be closed")

    begun = [asyncio.Event(), asyncio.Event()]
    running = asyncio.create_task(together(map(failing_at_its_end, begun)))
    await begun[1].wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert await together([]) == []


async def test_the_first_of_a_race_decides_it_and_the_others_are_canceled():
    canceled = []

    async def endless() -> str:
        try:
            await asyncio.Event().wait()
            raise AssertionError
        except asyncio.CancelledError:
            canceled.append(endless)
            raise

    async def failing() -> str:
        raise RolloutError("no luck")

    async def ending() -> str:
        return "the end"

    assert await first_result(endless(), ending(), failing()) == "the end"
    with pytest.raises(RolloutError, match="no luck"):
        await first_result(endless(), failing(), ending())
    race = asyncio.create_task(first_result(endless(), endless()))
    await asyncio.sleep(0.01)
    race.cancel()
    with pytest.raises(asyncio.CancelledError):
        await race
    assert len(canceled) == 4
