"""What every backend promises a generator and a learner, whatever carries it."""

import asyncio
import time
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from buffers.memory import MemoryBuffer
from streamrl import wire
from streamrl.errors import (
    ConfigError,
    DuplicateGroupError,
    FencedError,
    LedgerError,
    MessageTooLargeError,
    UnknownGeneratorError,
    UnknownLeaseError,
)
from streamrl.interfaces import TrajectoryBuffer
from streamrl.types import (
    Books,
    DropReason,
    Lease,
    LengthHistogram,
    RefusalReason,
    RetriedPrompt,
    SchedulingState,
    ranges_of,
    replace,
)
from tests.contract.test_zmq import LEASE_TTL_S, STATE, make_state, zmq_server
from tests.records import fill, lease_one, make_group, make_sibling, make_status

Connect = Callable[..., TrajectoryBuffer]


@pytest.fixture
def settings() -> dict[str, Any]:
    """Of the state and the limits, where a test has others."""
    return {}


@pytest.fixture(params=["memory", "zmq", "redis"])
def connect(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    settings: dict[str, Any],
    zmq_client: Connect,
    redis_client: Connect,
) -> Iterator[Connect]:
    """Makes clients of one buffer."""
    if request.param == "memory":
        known = {name: settings[name] for name in STATE & settings.keys()}
        yield MemoryBuffer(make_state(**known)).client
    elif request.param == "redis":
        url = request.getfixturevalue("redis").url
        yield partial(
            redis_client, url, uuid.uuid4().hex, **{"lease_ttl_s": LEASE_TTL_S, **settings}
        )
    else:
        with zmq_server(tmp_path, journal=True, **settings) as server:
            yield partial(zmq_client, server.url)


async def test_groups_go_from_generators_to_the_learner_and_are_freed(connect):
    generator, learner = connect(), connect()
    stats = await learner.attach(0, None)
    assert (stats.groups_per_step, stats.max_staleness) == (2, 1)
    await fill(generator, "a", "b", "c")
    headers = (await learner.take(2, 0, 1.0)).headers
    assert [h.prompt_index for h in headers] == [0, 1]
    assert headers[0].lengths == (7, 7)
    groups = await learner.fetch([1, 0])
    assert [g.prompt_index for g in groups] == [1, 0]
    expected = make_group(1, lease_id="b").trajectories[1]
    assert np.array_equal(groups[0].trajectories[1].token_ids, expected.token_ids)
    books = (await learner.advance(1)).books
    assert (books.trained, books.buffered, books.balanced) == (2, 1, True)
    await learner.acknowledge(1)
    stats = await learner.stats()
    assert (stats.books.acknowledged, stats.books.balanced) == (2, True)
    with pytest.raises(LedgerError, match="no group is held"):
        await learner.fetch([0])


async def test_a_learner_tells_its_bound_with_the_step_and_finds_it_in_the_books(connect):
    learner = connect()
    await learner.attach(0, None)
    await fill(connect(), "a", "b")
    await learner.take(2, 0, 1.0)
    stats = await learner.advance(1, steered_bound=3)
    assert stats.books.steered_bound == 3
    assert stats.staleness_bound == 1, "this run has a fixed one"
    assert (await connect().attach(1, stats.books)).books.steered_bound == 3


async def test_a_lease_waits_for_admission_and_is_unblocked_by_the_learner(connect):
    generator, learner = connect(), connect()
    waiting = asyncio.create_task(lease_one(generator, "a", "g", 60.0))
    await learner.attach(0, None)
    assert (await waiting) is not None
    await fill(generator, "b", "c", "d")
    assert await lease_one(generator, "e", "g", 0.05) is None
    blocked = asyncio.create_task(generator.lease(["e", "f", "g"], "g", 60.0))
    await generator.put("a", make_group(0, lease_id="a"))
    await learner.take(2, 0, 1.0)
    assert not blocked.done()
    await learner.advance(1)
    leases = await blocked
    assert [(lease.lease_id, lease.prompt_index) for lease in leases] == [("e", 4), ("f", 5)]
    assert {lease.min_policy_version for lease in leases} == {1}


async def overtake(buffer: TrajectoryBuffer, *late: str) -> dict[str, Lease]:
    """Leases of version 0 that a step overtakes; the next batch has other groups enough."""
    leases = {lease.lease_id: lease for lease in await buffer.lease(late, "g", 0.0)}
    await fill(buffer, "quick 0", "quick 1")
    await buffer.take(2, 0, 1.0)
    await buffer.advance(1)
    await fill(buffer, "quick 2", "quick 3", version=1)
    return leases


async def test_a_batch_waits_for_groups_that_are_due_and_says_how_long(connect):
    learner = connect()
    await learner.attach(0, None)
    leases = await overtake(learner, "a", "b")
    assert not await learner.take(2, 1, 0.05)
    awaited = (await learner.stats()).awaited
    assert [(lease.lease_id, lease.prompt_index) for lease in awaited] == [("a", 0), ("b", 1)]
    taking = asyncio.create_task(learner.take(2, 1, 60.0, with_payloads=True))
    await waits_for_due_groups(learner)
    for lease_id, lease in leases.items():
        assert not taking.done()
        await learner.put(lease_id, make_group(lease.prompt_index, lease_id=lease_id))
    loan = await taking
    assert [header.prompt_index for header in loan.headers] == [0, 1]
    assert len(loan.groups) == 2
    assert loan.wait_due_s >= 0.05
    stats = await learner.stats()
    assert (stats.awaited, stats.wait_due_s, stats.books.dropped) == ((), 0.0, {})


async def waits_for_due_groups(buffer: TrajectoryBuffer) -> None:
    async with asyncio.timeout(120):
        while (await buffer.stats()).wait_due_s < 0.05:
            await asyncio.sleep(0.01)


async def test_a_prompt_without_a_group_after_three_leases_is_in_the_stats(connect):
    buffer = connect()
    await buffer.attach(0, None)
    for number in range(3):
        assert (await buffer.stats()).retried == ()
        assert await lease_one(buffer, f"a/{number}", "g", 0.0)
        await buffer.release(f"a/{number}", DropReason.RELEASED)
    expected = RetriedPrompt(prompt_index=0, num_leases=3)
    assert (await buffer.stats()).retried == (expected,)
    lease = await lease_one(buffer, "b", "g", 0.0)
    await buffer.put("b", make_group(lease.prompt_index, lease_id="b"))
    assert (await buffer.stats()).retried == ()


async def test_the_stats_say_for_how_long_no_generator_has_reported(connect):
    """From when a learner attached, which needs one."""
    buffer = connect()

    async def until_older() -> None:
        async with asyncio.timeout(120):
            while (await buffer.stats()).last_heartbeat_age_s < 0.05:
                await asyncio.sleep(0.01)

    await buffer.attach(0, None)
    await until_older()
    await buffer.heartbeat(make_status("g"))
    stats = await buffer.stats()
    assert stats.last_heartbeat_age_s == pytest.approx(stats.heartbeat_ages_s[0], abs=1e-4)
    await buffer.heartbeat(make_status("g", is_leaving=True))
    assert (await buffer.stats()).generators == ()
    await until_older()


async def test_a_part_of_a_batch_is_lent_while_the_rest_is_due(connect):
    learner = connect()
    await learner.attach(0, None)
    leases = await overtake(learner, "a", "b")
    await learner.put("b", make_group(leases["b"].prompt_index, lease_id="b"))
    assert not await learner.take(2, 1, 0.05)
    part = await learner.take(2, 1, 60.0, with_payloads=True, num_held=0)
    assert [group.prompt_index for group in part.groups] == [1]
    rest = asyncio.create_task(learner.take(2, 1, 60.0, with_payloads=True, num_held=1))
    await learner.put("a", make_group(leases["a"].prompt_index, lease_id="a"))
    loan = await rest
    assert [header.prompt_index for header in loan.headers] == [1, 0]
    assert [group.prompt_index for group in loan.groups] == [0]
    assert (await learner.advance(2)).books.trained == 4


async def test_one_call_leases_several_groups_as_far_as_they_are_admitted(connect):
    generator, learner = connect(), connect()
    await learner.attach(0, None)
    first = await generator.lease(["a", "b", "c"], "g", 0.0)
    assert [(lease.lease_id, lease.prompt_index) for lease in first] == [
        ("a", 0),
        ("b", 1),
        ("c", 2),
    ]
    assert await generator.lease(["a", "b", "c"], "g", 0.0) == first
    rest = await generator.lease(["c", "d", "e", "f"], "g", 0.0)
    assert [lease.lease_id for lease in rest] == ["c", "d"]
    assert rest[0] == first[2]
    assert await generator.lease(["e", "f"], "g", 0.05) == ()
    assert await generator.lease([], "g", 0.0) == ()
    books = (await learner.stats()).books
    assert (books.granted, books.leased, books.balanced) == (4, 4, True)
    await generator.release("d", DropReason.FAILED)
    assert [lease.lease_id for lease in await generator.lease(["c", "e", "f"], "g", 0.0)] == [
        "c",
        "e",
    ]


async def test_a_call_grants_no_more_than_a_generators_share(connect):
    one, other, learner = connect(), connect(), connect()
    await learner.attach(0, None)
    for name, buffer in (("one", one), ("other", other)):
        await buffer.heartbeat(make_status(name))
    assert len(await one.lease([f"one/{number}" for number in range(9)], "one", 0.0)) == 2
    assert len(await other.lease([f"other/{number}" for number in range(9)], "other", 0.0)) == 1
    assert len(await one.lease([f"one/{number}" for number in range(9)], "one", 0.0)) == 3
    assert await other.lease(["other/9"], "other", 0.0) == ()


async def test_a_take_may_bring_the_payloads_and_advance_the_stats(connect):
    generator, learner = connect(), connect()
    stats = await learner.attach(0, None)
    assert (stats.capacity, stats.books.in_flight) == (4, 0)
    assert not await learner.take(2, 0, 0.0, with_payloads=True)
    await fill(generator, "a", "b", "c")
    loan = await learner.take(2, 0, 1.0, with_payloads=True)
    assert [header.prompt_index for header in loan.headers] == [0, 1]
    assert [group.group_id for group in loan.groups] == ["0:a", "1:b"]
    expected = make_group(1, lease_id="b").trajectories[1]
    assert np.array_equal(loan.groups[1].trajectories[1].token_ids, expected.token_ids)
    again = await learner.take(2, 0, 0.0)
    assert (again.headers, again.groups) == (loan.headers, ())
    repeated = await learner.take(2, 0, 0.0, with_payloads=True)
    assert [group.group_id for group in repeated.groups] == ["0:a", "1:b"]
    waiting = asyncio.create_task(learner.take(2, 1, 60.0, with_payloads=True))
    await fill(generator, "d")
    assert [group.group_id for group in (await waiting).groups] == ["2:c", "3:d"]
    stats = await learner.advance(1)
    known = replace(await learner.stats(), last_heartbeat_age_s=stats.last_heartbeat_age_s)
    assert stats == known
    assert (stats.policy_version, stats.books.trained, stats.books.in_flight) == (1, 2, 2)


async def test_the_stats_count_responses_by_length_and_outcome(connect):
    learner, generator = connect(), connect()
    await learner.attach(0, None)
    for name, num_response in (("a", 5), ("b", 70), ("c", 300)):
        lease = await lease_one(generator, name, "g", 60.0)
        group = make_group(lease.prompt_index, lease_id=name, num_response=num_response)
        await generator.put(name, group)
    await learner.take(2, 0, 5.0)
    for lengths in ((await learner.advance(1)).lengths, (await generator.stats()).lengths):
        assert lengths.sampled == LengthHistogram.of([5, 5, 70, 70, 300, 300]).rounded()
        assert lengths.trained == LengthHistogram.of([5, 5, 70, 70]).rounded()
        assert lengths.dropped == {}
    assert (await learner.attach(0, None)).lengths.trained == LengthHistogram()


async def test_calls_may_be_repeated(connect):
    generator, learner = connect(), connect()
    await learner.attach(0, None)
    first = await lease_one(generator, "a", "g", 0.0)
    assert await lease_one(generator, "a", "g", 0.0) == first
    group = make_group(0, lease_id="a")
    await generator.put("a", group)
    await generator.put("a", group)
    await generator.release("a", DropReason.FAILED)
    await fill(generator, "b")
    await learner.take(2, 0, 1.0)
    replies = [await learner.advance(1) for _ in range(2)]
    once, again = (msgspec.structs.replace(stats, last_heartbeat_age_s=0.0) for stats in replies)
    assert once == again
    await learner.acknowledge(1)
    await learner.acknowledge(1)
    assert (await learner.stats()).books.acknowledged == 2


@pytest.mark.parametrize("settings", [{"lease_ttl_s": 5.0}])
async def test_a_dead_generators_lease_comes_back(connect):
    dead, alive, learner = connect(), connect(), connect()
    await learner.attach(0, None)
    lost = await lease_one(dead, "dead/1", "dead", 0.0)
    kept = await lease_one(alive, "alive/1", "alive", 0.0)
    assert kept is not None
    deadline = time.monotonic() + 120
    while (books := (await learner.stats()).books).dropped.get(DropReason.EXPIRED, 0) < 1:
        assert time.monotonic() < deadline
        reply = await alive.heartbeat(make_status("alive", lease_ids=("alive/1",)))
        assert reply.lost_lease_ids == ()
        await asyncio.sleep(0.05)
    assert (books.leased, books.balanced) == (1, True)
    again = await lease_one(alive, "alive/2", "alive", 0.0)
    assert again.prompt_index == lost.prompt_index
    with pytest.raises(UnknownLeaseError, match="dead/1"):
        await dead.put("dead/1", make_group(lost.prompt_index, lease_id="dead/1"))
    reply = await dead.heartbeat(make_status("dead", lease_ids=("dead/1",)))
    assert reply.lost_lease_ids == ("dead/1",)
    assert (await learner.stats()).refused[RefusalReason.UNKNOWN_LEASE] == 1


async def leave_siblings(generator: TrajectoryBuffer, lease_id: str, *numbers: int) -> Lease:
    """A lease whose generator disappears when these siblings of its group are finished."""
    session = lease_id.partition("/")[0]
    await generator.heartbeat(make_status(session))
    lease = await lease_one(generator, lease_id, session, 0.0)
    for number in numbers:
        payload = f"{lease_id} {number}".encode()
        sibling = make_sibling(lease_id, number, num_tokens=9, num_bytes=len(payload))
        begun = msgspec.structs.replace(sibling, num_tokens=5, num_bytes=5)
        # Unfinished, finished, and a late repetition of either.
        for header, content in ((begun, b"begun"), *2 * ((sibling, payload), (begun, b"begun"))):
            await generator.put_sibling(header, content)
    await generator.heartbeat(make_status(session, is_leaving=True))
    return lease


async def test_the_siblings_of_a_lease_that_ended_go_to_the_next_one(connect):
    generator, learner = connect(), connect()
    await learner.attach(0, None)
    left = await leave_siblings(generator, "dead/1", 3, 0)
    stats = await learner.stats()
    assert (stats.books.leased, stats.books.dropped, stats.num_bytes) == (1, {}, 16)
    lease = await lease_one(generator, "alive/1", "alive", 0.0)
    assert (lease.prompt_index, lease.min_policy_version) == (left.prompt_index, 0)
    assert lease.kept_siblings == (3, 0)
    kept = await generator.fetch_siblings("alive/1")
    assert [bytes(payload) for payload in kept] == [b"dead/1 3", b"dead/1 0"]
    late = make_sibling("dead/1", 1, num_tokens=9)
    for refused in (generator.put_sibling(late, b""), generator.fetch_siblings("dead/1")):
        with pytest.raises(UnknownLeaseError, match="dead/1"):
            await refused
    books = (await learner.stats()).books
    assert (books.granted, books.leased, books.dropped) == (2, 1, {DropReason.RELEASED: 1})
    assert books.balanced
    group = make_group(lease.prompt_index, lease_id="alive/1")
    await generator.put("alive/1", group)
    await generator.put_sibling(make_sibling("alive/1", 1, num_tokens=9), b"late")
    stats = await learner.stats()
    assert (stats.books.buffered, stats.refused) == (1, {})
    sampled = [trajectory.num_response_tokens for trajectory in group.trajectories]
    assert stats.lengths.sampled == LengthHistogram.of(sampled).rounded()
    await fill(generator, "b")
    await learner.take(2, 0, 1.0)
    await learner.advance(1)
    await learner.acknowledge(1)
    assert (await learner.stats()).num_bytes == 0


async def test_siblings_that_are_left_are_granted_first_also_where_admission_is_closed(connect):
    generator, learner = connect(), connect()
    await learner.attach(0, None)
    await fill(generator, "a", "b", "c")
    left = await leave_siblings(generator, "dead/1", 0)
    assert await lease_one(generator, "x", "cordoned", 0.0) is not None
    await generator.release("x", DropReason.RELEASED)
    assert (await learner.stats()).books.leased == 0
    left = await leave_siblings(generator, "dead/2", 0)
    await learner.drain()
    assert (await learner.stats()).draining
    waiting = await lease_one(generator, "d", "alive", 60.0)
    assert waiting.prompt_index == left.prompt_index
    assert await lease_one(generator, "e", "alive", 0.0) is None


async def test_siblings_that_no_version_may_go_on_with_are_dropped_and_counted(connect):
    generator, learner = connect(), connect()
    await learner.attach(4, None)
    await fill(generator, "a", "b", version=4)
    left = await leave_siblings(generator, "dead/1", 0, 1)
    assert left.min_policy_version == 4
    await learner.attach(3, None)
    stats = await learner.stats()
    assert stats.books.dropped == {DropReason.RELEASED: 1}
    assert stats.lengths.dropped[DropReason.RELEASED] == LengthHistogram.of([9, 9])
    again = await lease_one(generator, "alive/1", "alive", 0.0)
    assert (again.prompt_index, again.kept_siblings) == (left.prompt_index, ())


async def test_after_the_end_nobody_waits_for_the_siblings_that_are_left(connect):
    generator, learner = connect(), connect()
    await learner.attach(0, None)
    await leave_siblings(generator, "dead/1", 0)
    # The daemon of a run that is over ends once everybody has left.
    await generator.heartbeat(make_status("stays"))
    await learner.finish()
    stats = await learner.stats()
    assert (stats.books.leased, stats.books.balanced, stats.num_bytes) == (0, True, 0)
    assert await lease_one(generator, "alive/1", "alive", 0.0) is None


async def test_a_new_session_or_leaving_ends_a_generators_leases_at_once(connect):
    generator, learner = connect(), connect()
    await learner.attach(0, None)
    await generator.heartbeat(make_status("g", "first"))
    await lease_one(generator, "first/1", "g", 0.0)
    await generator.heartbeat(make_status("g", "second"))
    await lease_one(generator, "second/1", "g", 0.0)
    stats = await learner.stats()
    assert (stats.books.leased, stats.books.dropped) == (1, {DropReason.EXPIRED: 1})
    assert [g.session for g in stats.generators] == ["second"]
    await generator.heartbeat(make_status("g", "second", is_leaving=True))
    stats = await learner.stats()
    assert stats.books.dropped == {DropReason.EXPIRED: 1, DropReason.RELEASED: 1}
    assert stats.generators == ()


async def test_a_reading_tells_how_long_ago_each_generator_reported(connect):
    generator, learner = connect(), connect()
    await learner.attach(0, None)
    start = time.monotonic()
    await generator.heartbeat(make_status("early"))
    reported = time.monotonic()
    while time.monotonic() < reported + 0.05:
        await asyncio.sleep(0.01)
    await generator.heartbeat(make_status("late"))
    stats = await learner.stats()
    names = [status.generator_id for status in stats.generators]
    ages_s = dict(zip(names, stats.heartbeat_ages_s, strict=True))
    assert 0 <= ages_s["late"] <= ages_s["early"] - 0.05
    assert ages_s["early"] <= time.monotonic() - start + 0.01
    assert stats.refusal == ""


async def test_a_generator_whose_place_was_taken_is_fenced(connect):
    """One that was frozen, and wakes up after another process was started under its id."""
    generator, learner = connect(), connect()
    await learner.attach(0, None)
    await generator.heartbeat(make_status("g", "old"))
    await generator.heartbeat(make_status("g", "new"))
    await lease_one(generator, "new/1", "g", 0.0)
    await lease_one(generator, "old/1", "g", 0.0)
    reply = await generator.heartbeat(make_status("g", "old", lease_ids=("old/1",)))
    assert (reply.is_fenced, reply.lost_lease_ids) == (True, ("old/1",))
    reply = await generator.heartbeat(make_status("g", "old", is_leaving=True))
    assert reply.is_fenced
    reply = await generator.heartbeat(make_status("g", "new", lease_ids=("new/1",)))
    assert (reply.is_fenced, reply.lost_lease_ids) == (False, ())
    assert [g.session for g in (await learner.stats()).generators] == ["new"]
    for number in range(10):
        assert not (await generator.heartbeat(make_status("g", f"later {number}"))).is_fenced
    assert (await generator.heartbeat(make_status("g", "later 8"))).is_fenced, "however often"


async def test_a_cordoned_generator_is_granted_nothing_and_finishes_what_it_holds(connect):
    generator, learner = connect(), connect()
    await learner.attach(0, None)
    for name in "gh":
        await generator.heartbeat(make_status(name))
    first = await lease_one(generator, "g/1", "g", 0.0)
    await learner.set_scheduling_state("g", SchedulingState.CORDONED)
    assert await lease_one(generator, "g/1", "g", 0.0) == first
    assert await lease_one(generator, "g/2", "g", 0.05) is None
    assert await lease_one(generator, "h/1", "h", 0.0) is not None
    reply = await generator.heartbeat(make_status("g", lease_ids=("g/1",)))
    assert (reply.scheduling_state, reply.lost_lease_ids) == (SchedulingState.CORDONED, ())
    assert (await generator.heartbeat(make_status("h"))).scheduling_state is SchedulingState.ACTIVE
    await generator.put("g/1", make_group(0, lease_id="g/1"))
    waiting = asyncio.create_task(lease_one(generator, "g/2", "g", 60.0))
    assert (await learner.stats()).scheduling_states == {"g": SchedulingState.CORDONED}
    await learner.set_scheduling_state("g", SchedulingState.ACTIVE)
    assert (await waiting) is not None
    assert (await learner.stats()).scheduling_states == {}


async def test_an_order_outlives_the_process_and_a_drain_ends_with_it(connect):
    buffer = connect()
    await buffer.attach(0, None)
    for order, later in (
        (SchedulingState.CORDONED, SchedulingState.CORDONED),
        (SchedulingState.DRAINING, SchedulingState.ACTIVE),
    ):
        await buffer.heartbeat(make_status("g", f"first {order}"))
        await buffer.set_scheduling_state("g", order)
        reply = await buffer.heartbeat(make_status("g", f"second {order}"))
        assert reply.scheduling_state is order, "the first one was killed"
        await buffer.heartbeat(make_status("g", f"second {order}", is_leaving=True))
        assert (
            await buffer.heartbeat(make_status("g", f"third {order}"))
        ).scheduling_state is later


async def test_an_order_to_nobody_is_refused_with_the_id_that_was_meant(connect):
    buffer = connect()
    with pytest.raises(UnknownGeneratorError, match="no generator has reported"):
        await buffer.set_scheduling_state("generator-1", SchedulingState.CORDONED)
    for name in ("generator-0", "other"):
        await buffer.heartbeat(make_status(name))
    with pytest.raises(UnknownGeneratorError, match=r"did you mean 'generator-0'\?"):
        await buffer.set_scheduling_state("generatr-0", SchedulingState.DRAINING)
    assert (await buffer.stats()).scheduling_states == {}
    await buffer.set_scheduling_state("other", SchedulingState.CORDONED)
    with pytest.raises(UnknownGeneratorError, match=r"allowed: generator-0, other$"):
        await buffer.set_scheduling_state("nobody", SchedulingState.CORDONED)


async def test_a_newer_learner_fences_the_older_one(connect):
    generator, old, new = connect(), connect(), connect()
    await old.attach(0, None)
    await fill(generator, "a", "b")
    await old.take(2, 0, 1.0)
    waiting = asyncio.create_task(old.take(2, 1, 60.0))
    await asyncio.sleep(0)
    await new.attach(0, None)
    for call in (old.advance(1), old.acknowledge(0), old.finish(), waiting):
        with pytest.raises(FencedError, match="took over"):
            await call
    assert [h.prompt_index for h in (await new.take(2, 0, 1.0)).headers] == [0, 1]


async def test_a_learner_that_comes_back_gets_what_its_checkpoint_lacks(connect):
    generator, learner = connect(), connect()
    await learner.attach(0, None)
    await fill(generator, "a", "b", "c", "d")
    await learner.take(2, 0, 1.0)
    books = (await learner.advance(1)).books
    await learner.take(2, 1, 1.0)
    await learner.advance(2)
    again = connect()
    await again.attach(1, books)
    assert [h.prompt_index for h in (await again.take(2, 1, 1.0)).headers] == [2, 3]
    assert (await again.stats()).books.acknowledged == 2


async def test_a_take_that_drops_an_abandoned_future_grants_a_lease_that_waits(connect):
    generator, learner, again = connect(), connect(), connect()
    await learner.attach(8, None)
    await fill(generator, "a", "b", "c", "d", version=8)
    books = Books(next_prompt_index=4, granted=4, trained=4)
    await again.attach(3, msgspec.structs.replace(books, open_ranges=ranges_of(range(4))))
    waiting = asyncio.create_task(lease_one(generator, "e", "g", 30.0))
    await asyncio.sleep(0)
    assert not await again.take(2, 3, 0.1)
    lease = await waiting
    assert lease.prompt_index in range(4)
    dropped = (await again.stats()).books.dropped
    assert dropped == {DropReason.ABANDONED: 4}


async def test_without_the_learners_weights_no_lease_is_granted(connect):
    """A version says nothing: a learner that went back makes other ones of the same numbers."""
    generator, learner, again = connect(), connect(), connect()
    await learner.attach(0, None, "first")
    assert (await generator.heartbeat(make_status("g"))).learner_id == "first"
    (held,) = await generator.lease(["g/0"], "g", 0.0, "first")
    waiting = asyncio.create_task(generator.lease(["g/1", "g/2"], "g", 0.2, "older"))
    await again.attach(0, None, "second")
    assert (await generator.heartbeat(make_status("g"))).learner_id == "second"
    assert await waiting == ()
    assert await generator.lease(["g/0", "g/1"], "g", 0.0, "first") == (held,)
    assert len(await generator.lease(["g/1"], "g", 0.0, "second")) == 1
    assert len(await generator.lease(["g/2"], "g", 0.0)) == 1, "the model folder's weights"
    await learner.attach(0, None)
    assert len(await generator.lease(["g/3"], "g", 0.0, "first")) == 1, "nobody says whose"


async def test_wrong_puts_have_a_defined_outcome(connect):
    generator, learner = connect(), connect()
    await learner.attach(0, None)
    await lease_one(generator, "a", "g", 0.0)
    with pytest.raises(LedgerError, match="is for prompt 0; the group is for 7"):
        await generator.put("a", make_group(7, lease_id="a"))
    await generator.put("a", make_group(0, lease_id="a"))
    with pytest.raises(DuplicateGroupError):
        await generator.put("a", make_group(0, lease_id="another"))
    with pytest.raises(UnknownLeaseError):
        await generator.put("never", make_group(1))
    stats = await learner.stats()
    assert stats.refused == {RefusalReason.DUPLICATE: 1, RefusalReason.UNKNOWN_LEASE: 1}
    assert stats.books.balanced


async def test_a_batch_that_can_never_fill_is_refused(connect):
    learner = connect()
    await learner.attach(0, None)
    with pytest.raises(ConfigError, match=r"5 groups can never fill.* admit 4") as refusal:
        await learner.take(5, 0, 30.0)
    assert "buffer.max_staleness 1 and learner.groups_per_step 2" in str(refusal.value)
    assert (await learner.take(4, 0, 0.05)).headers == ()


async def test_after_the_end_generators_are_told_and_nothing_is_granted(connect):
    generator, learner = connect(), connect()
    await learner.attach(0, None)
    assert not (await generator.heartbeat(make_status("g"))).finished
    await learner.finish()
    assert (await generator.heartbeat(make_status("g"))).finished
    assert await lease_one(generator, "a", "g", 0.05) is None


# At the edges.


@pytest.mark.parametrize("settings", [{"max_group_bytes": 64 * 2**20}])
async def test_a_group_of_64_mb_passes_unchanged(connect):
    generator, learner = connect(), connect()
    await learner.attach(0, None)
    # 6 bytes a token; 64 MiB is the default.
    large = make_group(0, lease_id="a", num_response=5_330_000)
    await lease_one(generator, "a", "g", 0.0)
    await generator.put("a", large)
    await fill(generator, "b")
    headers = (await learner.take(2, 0, 10.0)).headers
    assert headers[0].lengths == (5_330_003, 5_330_003)
    (back,) = await learner.fetch([0])
    for ours, theirs in zip(large.trajectories, back.trajectories, strict=True):
        assert np.array_equal(ours.token_ids, theirs.token_ids)
        assert np.array_equal(ours.behavior_logprobs, theirs.behavior_logprobs)
    await learner.advance(1)
    await learner.acknowledge(1)
    assert (await learner.stats()).num_bytes == 0


MANY, GROUPS_PER_STEP = 3_000, 10
BOUNDS = {"groups_per_step": GROUPS_PER_STEP, "max_staleness": MANY // GROUPS_PER_STEP - 1}


@pytest.mark.parametrize("settings", [BOUNDS])
async def test_thousands_of_groups_wait_and_are_lent_oldest_first(connect):
    generator, learner = connect(), connect()
    await learner.attach(0, None)
    first = make_group(0)
    for start in range(0, MANY, 100):
        names = [f"fill/{number}" for number in range(start, start + 100)]
        leases = await generator.lease(names, "g", 0.0)
        groups = [replace(first, prompt_index=lease.prompt_index) for lease in leases]
        puts = zip(names, groups, strict=True)
        await asyncio.gather(*(generator.put(name, group) for name, group in puts))
    assert await lease_one(generator, "one too many", "g", 0.0) is None
    books = (await learner.stats()).books
    assert (books.buffered, books.balanced) == (MANY, True)
    for version in range(3):
        headers = (await learner.take(GROUPS_PER_STEP, version, 10.0)).headers
        first = version * GROUPS_PER_STEP
        assert [h.prompt_index for h in headers] == list(range(first, first + GROUPS_PER_STEP))
        assert len(await learner.fetch([h.prompt_index for h in headers])) == GROUPS_PER_STEP
        books = (await learner.advance(version + 1)).books
    assert (books.buffered, books.trained, books.balanced) == (MANY - 30, 30, True)


@pytest.mark.parametrize("connect", ["zmq", "redis"], indirect=True)
@pytest.mark.parametrize("settings", [{"max_group_bytes": 1000}])
async def test_a_group_above_the_limit_is_refused(connect):
    buffer = connect()
    await buffer.attach(0, None)
    await lease_one(buffer, "s/1", "g", 0.0)
    with pytest.raises(MessageTooLargeError, match="at most 1000"):
        await buffer.put("s/1", make_group(0, num_response=500))


async def test_a_group_that_was_accepted_is_read_whatever_its_size(connect, monkeypatch):
    generator, learner = connect(), connect()
    await learner.attach(0, None)
    for lease_id in ("s/1", "s/2"):
        lease = await lease_one(generator, lease_id, "g", 0.0)
        await generator.put(lease_id, make_group(lease.prompt_index, num_response=500))
    monkeypatch.setitem(wire.decode.__kwdefaults__, "max_bytes", 5000)
    loan = await learner.take(2, 0, 1.0, with_payloads=True)
    fetched = await learner.fetch([header.prompt_index for header in loan.headers])
    assert [group.num_tokens for group in (*loan.groups, *fetched)] == [2 * 503] * 4
