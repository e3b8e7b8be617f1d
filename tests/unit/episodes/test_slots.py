"""No slot of the engine is idle while an episode could use it, and slow episodes hold up nobody."""

import asyncio
import dataclasses

import pytest

from actors.episodes.episode import EpisodeRun
from actors.gateway.agent import AgentResult
from actors.gateway.session import Session, SessionEndedError
from buffers.ledger.ledger import Ledger
from buffers.ledger.state import BufferState
from buffers.memory import MemoryBuffer
from streamrl.interfaces import EnvironmentContext, Observation, Prompt, Transition
from streamrl.types import Completion, TrajectoryGroup
from tests.unit.episodes.environments import Turns
from tests.unit.gateway.parts import SAMPLING, PlainRenderer, ScriptedEngine
from tests.unit.test_generator import Run

# What a generator leases before anything ends: 8 slots, groups of 2.
NUM_SLOTS = 8


class Waiting(Turns):
    """Its steps wait until the test opens them."""

    open: asyncio.Event
    waiting = 0

    async def step(self, completion: Completion) -> Transition:
        type(self).waiting += 1
        await self.open.wait()
        type(self).waiting -= 1
        return await super().step(completion)


def waiting_run(environment: type[Turns] = Waiting, **generator: object) -> tuple[Run, type]:
    own = type("Own", (environment,), {"open": asyncio.Event(), "waiting": 0})
    run = Run(environment="own.py:Own", **generator)
    # As many leases as anybody asks for.
    ledger = Ledger(groups_per_step=100, max_staleness=1)
    run.state = BufferState[TrajectoryGroup](ledger, lease_ttl_s=60.0)
    run.learner = MemoryBuffer(run.state)
    run.runner = dataclasses.replace(
        run.runner, make_environment=own, settings=run.config.generator.episode
    )
    return run, own


async def test_episodes_that_wait_leave_their_slots_to_others():
    run, environment = waiting_run()
    await run.learner.attach(0, None)
    async with run.generating():
        # Were slots held, no more than 8 episodes would ever have begun.
        await run.until(lambda: environment.waiting >= 4 * NUM_SLOTS)
        assert run.engine.most_running <= NUM_SLOTS + 1
        environment.open.set()
        await run.until(lambda: run.books.buffered >= 2 * NUM_SLOTS)
    assert run.books.balanced


async def test_an_environment_that_is_slow_to_start_leaves_its_slot_too():
    class SlowStart(Waiting):
        async def start(self, context: EnvironmentContext) -> Observation:
            type(self).waiting += 1
            await self.open.wait()
            return await super().start(context)

    run, environment = waiting_run(SlowStart)
    await run.learner.attach(0, None)
    async with run.generating():
        await run.until(lambda: environment.waiting >= 4 * NUM_SLOTS)
        assert run.engine.num_running == 0
        environment.open.set()
        await run.until(lambda: run.books.buffered >= NUM_SLOTS)


async def test_a_slow_episode_holds_up_nobody():
    """One sibling of the first group never ends its turn; the others are put meanwhile."""

    class OneHangs(Turns):
        async def step(self, completion: Completion) -> Transition:
            if self.context.prompt.content == "x" and not self.context.episode_index:
                await asyncio.Event().wait()
            return await super().step(completion)

    run, _ = waiting_run(OneHangs)
    await run.learner.attach(0, None)
    async with run.generating():
        # Each fifth prompt hangs, and holds no slot: 40 groups come in beside them.
        await run.until(lambda: run.books.buffered >= 40)
        assert run.books.leased >= 8


async def test_a_completion_that_outlasts_its_episode_gives_no_slot_back_twice():
    engine = ScriptedEngine("first;", "late;")

    class Hasty:
        """Ends its episode while a completion is being sampled."""

        async def play(self, session: Session, context: EnvironmentContext) -> AgentResult:
            await session.complete([{"role": "user", "content": "q"}])
            engine.open.clear()
            late = session.complete([{"role": "user", "content": "another"}])
            self.late = asyncio.create_task(late)
            while not engine.num_running:
                await asyncio.sleep(0)
            return AgentResult(1.0)

    agent = Hasty()
    context = EnvironmentContext(Prompt("q", ""), (7,), PlainRenderer())
    episode = EpisodeRun(engine, lambda: agent, max_model_len=100, deadline_s=60.0)
    await episode.run(context, SAMPLING)
    engine.open.set()
    await asyncio.wait({agent.late})
    assert isinstance(agent.late.exception(), SessionEndedError)
    assert episode.num_slots == 0


@pytest.mark.parametrize("most", [4, 7, 12])
async def test_no_more_episodes_than_max_in_flight_are_begun(most: int):
    run, environment = waiting_run(episode={"max_in_flight": most})
    await run.learner.attach(0, None)
    async with run.generating():
        await run.until(lambda: environment.waiting == most - most % 2)
        await asyncio.sleep(0.05)
        assert environment.waiting == most - most % 2
        environment.open.set()
        await run.until(lambda: run.books.buffered >= most)


async def test_while_the_engine_is_full_nothing_more_is_leased():
    run, _ = waiting_run()
    run.engine.open.clear()
    await run.learner.attach(0, None)
    async with run.generating():
        await run.until(lambda: run.engine.num_running == NUM_SLOTS)
        await asyncio.sleep(0.05)
        assert (run.engine.num_running, run.books.leased) == (NUM_SLOTS, NUM_SLOTS // 2)
        run.engine.open.set()
        await run.until(lambda: run.books.leased > NUM_SLOTS // 2)
