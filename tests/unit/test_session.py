"""The learner's session with a buffer that waits, loses its memory, or has another learner."""

import asyncio
from typing import Any

import pytest

from buffers.ledger.ledger import Ledger
from buffers.ledger.state import BufferState
from buffers.memory import MemoryBuffer
from learners.session import LearnerSession, LearnerState, unless_late
from streamrl.errors import ConfigError, FencedError, TransportError
from streamrl.types import Books, BufferStats, LearnerActivity, Lease, TakenBatch, TrajectoryGroup
from tests.records import make_group
from tests.training import make_config

WAITING, ATTACHING = LearnerActivity.WAITING, LearnerActivity.ATTACHING


def make_state(groups_per_step: int = 2) -> BufferState[TrajectoryGroup]:
    ledger = Ledger(groups_per_step=groups_per_step, max_staleness=2)
    return BufferState(ledger, lease_ttl_s=60.0)


class RestartingBuffer(MemoryBuffer):
    """A client of a buffer that comes back empty; the client keeps its learner term."""

    def __init__(self) -> None:
        super().__init__(make_state())

    def restart(self) -> None:
        self._state = make_state()


class Reporter:
    def __init__(self) -> None:
        self.activities: list[LearnerActivity] = []
        self.fields: dict[str, Any] = {}

    def set_activity(self, activity: LearnerActivity, **fields: Any) -> None:
        self.activities.append(activity)
        self.update(**fields)

    def on_stats(self, stats: BufferStats) -> None:
        self.update(dropped=stats.books.dropped)

    def update(self, **fields: Any) -> None:
        self.fields |= fields


def make_session(
    buffer: MemoryBuffer, reporter: Reporter | None = None, state: LearnerState | None = None
) -> LearnerSession:
    config = make_config(learner={"groups_per_step": 2}, buffer={"max_staleness": 2})
    return LearnerSession(config, buffer, reporter or Reporter(), state or LearnerState())


async def fill(buffer: MemoryBuffer, num_groups: int) -> None:
    """Groups as a generator puts them."""
    for lease in await buffer.lease([f"gen/{i}" for i in range(num_groups)], "gen", 0.0):
        await buffer.put(lease.lease_id, make_group(lease.prompt_index))


async def nothing() -> None:
    pass


async def take(session: LearnerSession) -> TakenBatch:
    async with asyncio.timeout(120):
        loan = await session.take(nothing)
    assert loan is not None
    return loan


async def test_a_step_advances_the_version_and_the_books():
    buffer, reporter = MemoryBuffer(make_state()), Reporter()
    session = make_session(buffer, reporter)
    await session.attach()
    await fill(buffer, 3)
    loan = await take(session)
    assert [group.prompt_index for group in loan.groups] == [0, 1]
    stats = await session.advance(1, loan)
    assert session.state == LearnerState(1, stats.books)
    assert (stats.policy_version, stats.books.trained, stats.books.buffered) == (1, 2, 1)
    await session.acknowledge(1)
    await session.finish()
    stats = await buffer.stats()
    assert (stats.books.acknowledged, stats.finished) == (2, True)
    assert reporter.fields == {"policy_version": 1, "learner_term": 1, "dropped": {}}


async def test_a_wait_for_groups_ends_when_the_learner_stops():
    session = make_session(MemoryBuffer(make_state()))
    await session.attach()
    taking = asyncio.create_task(session.take(nothing))
    await asyncio.sleep(0.05)
    assert not taking.done()
    session.stopping.set()
    async with asyncio.timeout(120):
        assert await taking is None


async def test_a_buffer_that_lost_its_memory_is_attached_to_again_and_asked_again():
    buffer, reporter = RestartingBuffer(), Reporter()
    books = Books(granted=4, acknowledged=4, next_prompt_index=4, learner_term=3, revision=20)
    session = make_session(buffer, reporter, LearnerState(2, books))
    await session.attach()
    buffer.restart()
    taking = asyncio.create_task(take(session))
    while reporter.activities[-1] is not WAITING or reporter.activities.count(ATTACHING) < 2:
        await asyncio.sleep(0.005)
    await fill(buffer, 2)
    loan = await taking
    assert [header.prompt_index for header in loan.headers] == [4, 5]
    assert reporter.activities == [ATTACHING, WAITING, ATTACHING, WAITING]
    assert (await buffer.stats()).policy_version == 2


async def test_a_step_that_the_buffer_lost_is_in_its_books_again():
    buffer = RestartingBuffer()
    session = make_session(buffer)
    await session.attach()
    await fill(buffer, 3)
    loan = await take(session)
    buffer.restart()
    stats = await session.advance(1, loan)
    books = stats.books
    assert stats.policy_version == 1
    assert books.balanced
    assert (books.acknowledged, books.next_prompt_index) == (2, 2)
    await session.acknowledge(1)
    assert session.state.books == books


async def with_a_group_that_is_due(buffer: MemoryBuffer, session: LearnerSession) -> Lease:
    """Two steps made, two groups finished, and the lease of an older group that is due."""
    await session.attach()
    leases = await buffer.lease([f"gen/{i}" for i in range(6)], "gen", 0.0)
    for version in (0, 1):
        for lease in leases[2 * version + 1 : 2 * version + 3]:
            await buffer.put(lease.lease_id, make_group(lease.prompt_index))
        await session.advance(version + 1, await take(session))
    newer = await buffer.lease(["gen/6"], "gen", 0.0)
    for lease in (leases[5], *newer):
        group = make_group(lease.prompt_index, version=lease.min_policy_version)
        await buffer.put(lease.lease_id, group)
    return leases[0]


async def test_the_new_groups_of_a_loan_come_while_one_that_is_due_is_awaited():
    buffer = MemoryBuffer(make_state())
    session = make_session(buffer)
    late = await with_a_group_that_is_due(buffer, session)
    part = await take(session)
    assert [group.prompt_index for group in part.groups] == [5]
    taking = asyncio.create_task(take(session))
    await buffer.put(late.lease_id, make_group(late.prompt_index))
    whole = await taking
    assert whole.headers[:1] == part.headers
    assert [group.prompt_index for group in whole.groups] == [0]
    stats = await session.advance(3, whole)
    assert (stats.books.trained, stats.books.dropped) == (6, {})


async def test_a_part_that_returned_to_the_buffer_is_lent_again_with_all_trajectories():
    buffer = MemoryBuffer(make_state())
    session = make_session(buffer)
    late = await with_a_group_that_is_due(buffer, session)
    part = await take(session)
    await session.attach()
    assert (await take(session)).groups == part.groups
    await buffer.put(late.lease_id, make_group(late.prompt_index))
    assert len((await take(session)).groups) == 1


async def test_a_learner_that_was_replaced_does_not_attach_again():
    buffer = MemoryBuffer(make_state())
    session = make_session(buffer)
    await session.attach()
    await fill(buffer, 2)
    await buffer.client().attach(0, None)
    with pytest.raises(FencedError):
        await take(session)
    assert (await buffer.stats()).books.learner_term == 2


async def test_a_buffer_with_other_settings_is_refused():
    session = make_session(MemoryBuffer(make_state(groups_per_step=3)))
    with pytest.raises(ConfigError, match=r"learner\.groups_per_step: .* with 3, this learner"):
        await session.attach()


@pytest.mark.parametrize("num_told", [0, 1])
async def test_a_step_that_the_buffer_was_not_told_of_is_not_trained_again(
    monkeypatch: pytest.MonkeyPatch, num_told: int
):
    """Of two steps; the learner was stopped while the buffer did not answer, saved, and goes on."""
    monkeypatch.setattr("learners.session.GOODBYE_S", 0.01)
    buffer = MemoryBuffer(make_state())
    session = make_session(buffer)
    await session.attach()
    await fill(buffer, 6)
    for version in range(1, num_told + 1):
        await session.advance(version, await take(session))
    loan, advance = await take(session), buffer.advance
    session.stopping.set()
    buffer.advance = lambda *_: asyncio.sleep(3600)
    with pytest.raises(TransportError, match="does not answer"):
        await session.advance(num_told + 1, loan)
    saved = session.state
    assert saved.policy_version == num_told + 1

    buffer.advance = advance
    again = make_session(buffer, state=saved)
    stats = await again.attach()
    trained = 2 * saved.policy_version
    assert (stats.policy_version, stats.books.taken) == (saved.policy_version, 0)
    assert stats.books.acknowledged + stats.books.trained == trained
    assert stats.books.buffered == 6 - trained
    assert [g.prompt_index for g in (await take(again)).groups] == [trained, trained + 1]
    books = stats.books
    columns = (books.leased, books.buffered, books.taken, books.trained, books.acknowledged)
    assert books.granted == sum(columns) + sum(books.dropped.values())


async def test_no_answer_is_waited_for_once_the_learner_is_to_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("learners.session.GOODBYE_S", 0.01)
    silent, stopping = asyncio.Event(), asyncio.Event()
    answer = asyncio.create_task(unless_late(stopping, silent.wait()))
    await asyncio.sleep(0.05)
    assert not answer.done()
    stopping.set()
    with pytest.raises(TransportError, match="the buffer does not answer within"):
        await answer
    silent.set()
    assert await unless_late(stopping, silent.wait()) is True
