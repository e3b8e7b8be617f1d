"""The scripts of `buffers/redis/lua` answer as the pure ledger does, and keep the same books.

Every call goes to both, a refusal's sentence included; neither knows of the other. The run's keys
are also copied and put back, as a server does that restarts from an older snapshot.
"""

import asyncio
import math
import uuid
from collections.abc import Callable, Coroutine, Sequence
from copy import deepcopy
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from msgspec.structs import replace
from redis import Redis

from buffers.audit import audit
from buffers.ledger.ledger import Ledger
from buffers.ledger.state import BufferState
from buffers.redis.buffer import RedisBuffer, RedisSettings
from buffers.redis.events import forget, read_events
from streamrl import wire
from streamrl.errors import CorruptMessageError, StreamRLError
from streamrl.types import (
    Books,
    DropReason,
    GeneratorStatus,
    GroupHeader,
    Lease,
    OverduePolicy,
    SchedulingState,
    TrajectoryGroup,
    pack,
)
from tests.records import damaged, make_group
from tests.redis_server import RedisServer

TTL_S = 10.0
LEASE_IDS = [f"{session}/{number}" for session in "abc" for number in range(5)]
LEARNER_IDS = ["", "old", "new"]
ENDS_A_LEASE = (DropReason.RELEASED, DropReason.FAILED, DropReason.FILTERED, DropReason.UNIFORM)


class Twins(RuleBasedStateMachine):
    url: str

    @initialize(
        groups_per_step=st.integers(1, 3),
        max_staleness=st.integers(0, 3),
        overdue=st.sampled_from([OverduePolicy.WAIT, *OverduePolicy]),
        final_version=st.none() | st.integers(2, 30),
    )
    def start(self, **settings: Any) -> None:
        self.settings = settings
        self.now_s = 1000.1
        self.model = self.blank()
        self.run_name = uuid.uuid4().hex
        self.runner = asyncio.Runner()
        self.server = Redis.from_url(self.url)
        self.learner_term = 0
        self.version = 0
        self.prompt_indices: dict[str, int] = {}
        self.checkpoint: tuple[int, Books] = (0, Books())
        self.redis = self.runner.run(self.client())
        # A client that has seen the run only at its end takes it for over later (test_run_end).
        self.read()
        self.copy_the_server()

    def blank(self) -> BufferState[TrajectoryGroup]:
        return BufferState(Ledger(**self.settings), lease_ttl_s=TTL_S)

    async def client(self) -> RedisBuffer:
        chosen = RedisSettings(**self.settings, lease_ttl_s=TTL_S, clock=lambda: self.now_s)
        return RedisBuffer(self.url, self.run_name, chosen)

    def both(self, asked: Coroutine[Any, Any, Any], expected: Callable[[], Any]) -> Any:
        """The answer of both, or None after the refusal of both."""
        answers = (outcome(lambda: self.runner.run(asked)), outcome(expected))
        assert answers[0] == answers[1]
        return None if isinstance(answers[0], Refusal) else answers[0]

    @rule(
        lease_ids=st.lists(st.sampled_from(LEASE_IDS), unique=True, max_size=6),
        generator_id=st.sampled_from(["g", "h", "steady"]),
        learner_id=st.sampled_from(LEARNER_IDS),
    )
    def lease(self, lease_ids: list[str], generator_id: str, learner_id: str = "") -> None:
        leases = self.both(
            self.redis.lease(lease_ids, generator_id, 0.0, learner_id),
            lambda: self.model.lease(lease_ids, generator_id, self.now_s, learner_id),
        )
        for lease in leases:
            self.prompt_indices[lease.lease_id] = lease.prompt_index

    @rule(
        lease_id=st.sampled_from(LEASE_IDS),
        age=st.integers(0, 4),
        wrong=st.integers(0, 9),
        again=st.booleans(),
        num_response=st.integers(1, 100),
        ahead=st.sampled_from([0, 0, 1, 3, 6]),
    )
    def put(
        self,
        lease_id: str,
        age: int,
        wrong: int,
        again: bool,
        num_response: int = 4,
        ahead: int = 0,
    ) -> None:
        prompt_index = self.prompt_indices.get(lease_id, 0) + (wrong == 0)
        name = "another" if wrong == 1 else lease_id
        group = make_group(
            prompt_index,
            lease_id=name,
            version=max(0, self.version + 1 - age),
            ahead=ahead,
            size=1 + num_response % 2,
            num_response=num_response,
        )
        header = GroupHeader.of(group, num_bytes=len(wire.encode(pack(group))))
        for _ in range(1 + again):
            self.both(
                self.redis.put(lease_id, group),
                lambda: self.model.put(lease_id, header, group, self.now_s),
            )

    @rule(
        lease_id=st.sampled_from(LEASE_IDS),
        reason=st.sampled_from(ENDS_A_LEASE),
        lengths=st.lists(st.integers(1, 100), max_size=3),
    )
    def release(self, lease_id: str, reason: DropReason, lengths: Sequence[int] = ()) -> None:
        self.both(
            self.redis.release(lease_id, reason, lengths),
            lambda: self.model.release(lease_id, reason, lengths),
        )

    @rule(
        lease_ids=st.lists(st.sampled_from(LEASE_IDS), min_size=1, max_size=3, unique=True),
        num_times=st.integers(2, 4),
    )
    def give_back_again_and_again(self, lease_ids: list[str], num_times: int) -> None:
        for _ in range(num_times):
            self.lease(lease_ids, "steady")
            for lease_id in lease_ids:
                self.release(lease_id, DropReason.RELEASED)
        self.read()

    @rule(lease_id=st.sampled_from(LEASE_IDS))
    def put_nonsense(self, lease_id: str) -> None:
        with pytest.raises(CorruptMessageError):
            self.runner.run(self.redis.put(lease_id, damaged(make_group(0), reward=math.nan)))
        self.model.ledger.refuse_malformed(lease_id)

    @rule(
        generator_id=st.sampled_from(["g", "h"]),
        session=st.sampled_from("abc"),
        lease_ids=st.sets(st.sampled_from(LEASE_IDS)).map(sorted).map(tuple),
        is_leaving=st.booleans(),
    )
    def heartbeat(self, **fields: Any) -> None:
        self.report(GeneratorStatus(policy_version=0, **fields))

    @rule(
        lease_ids=st.sets(st.sampled_from(LEASE_IDS), max_size=3).map(sorted).map(tuple),
        ahead=st.integers(-4, 4),
    )
    def assert_leases(self, lease_ids: tuple[str, ...], ahead: int) -> None:
        """What a generator says to a buffer that may have forgotten its leases."""
        following = max(0, self.model.ledger.books().next_prompt_index + ahead)
        held = tuple(
            Lease(
                lease_id=lease_id,
                prompt_index=self.prompt_indices.get(lease_id, following),
                min_policy_version=self.version,
                expires_at_s=0.0,
            )
            for lease_id in lease_ids
        )
        for lease in held:
            self.prompt_indices[lease.lease_id] = lease.prompt_index
        self.report(
            GeneratorStatus(
                generator_id="g", session="a", policy_version=0, lease_ids=lease_ids, held=held
            )
        )

    def report(self, status: GeneratorStatus) -> None:
        async def asked() -> Any:
            return replace(await self.redis.heartbeat(status), incarnation="")

        def expected() -> Any:
            return replace(self.model.heartbeat(status, self.now_s), incarnation="")

        self.both(asked(), expected)

    @rule(
        generator_id=st.sampled_from(["g", "h"]), scheduling_state=st.sampled_from(SchedulingState)
    )
    def set_scheduling_state(self, generator_id: str, scheduling_state: SchedulingState) -> None:
        self.both(
            self.redis.set_scheduling_state(generator_id, scheduling_state),
            lambda: self.model.set_scheduling_state(generator_id, scheduling_state),
        )

    @rule()
    def drain(self) -> None:
        self.both(self.redis.drain(), self.model.drain)

    @rule(seconds=st.floats(0.0, 1.5 * TTL_S))
    def let_time_pass(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(
        num_groups=st.integers(1, 9),
        ahead=st.sampled_from([0, 0, 0, 1, 2]),
        num_held=st.none() | st.integers(0, 3),
    )
    def take(self, num_groups: int, ahead: int, num_held: int | None = None) -> None:
        version = self.model.ledger.version + ahead

        async def asked() -> Any:
            loan = await self.redis.take(num_groups, version, 0.0, num_held=num_held)
            return loan.headers, round(loan.wait_due_s, 4)

        def expected() -> Any:
            term, now_s = self.learner_term, self.now_s
            loan = self.model.take(num_groups, version, term, now_s, num_held)
            return loan.headers, round(loan.wait_due_s, 4)

        taken = self.both(asked(), expected)
        if taken is None:
            return
        headers, _ = taken
        newest = version + self.settings["max_staleness"]
        assert all(header.newest_version <= newest for header in headers)
        prompt_indices = [header.prompt_index for header in headers]
        kept = [wire.encode(group) for group in self.model.fetch(prompt_indices)]
        fetched = self.runner.run(self.redis.fetch(prompt_indices))
        assert [wire.encode(group) for group in fetched] == kept
        if num_held is not None or len(headers) < num_groups:
            return
        loan = self.runner.run(self.redis.take(num_groups, version, 0.0, with_payloads=True))
        assert loan.headers == headers
        assert [wire.encode(group) for group in loan.groups] == kept

    @rule(step=st.sampled_from([1, 1, 1, 0, 2]))
    def advance(self, step: int) -> None:
        self.version = self.model.ledger.version + step

        def expected() -> Any:
            self.model.advance(self.version, self.learner_term)
            self.model.expire(self.now_s)
            return comparable(self.model.stats(self.now_s))

        async def asked() -> Any:
            return comparable(await self.redis.advance(self.version))

        self.both(asked(), expected)
        self.version = self.model.ledger.version

    @rule(behind=st.sampled_from([0, 0, 1, -1]))
    def acknowledge(self, behind: int) -> None:
        version = self.model.ledger.version - behind
        self.both(
            self.redis.acknowledge(version),
            lambda: self.model.acknowledge(version, self.learner_term),
        )

    @rule(num_steps=st.integers(1, 3))
    def run_some_steps(self, num_steps: int) -> None:
        """Steady work: without this rule, random calls rarely fill a batch."""
        for _ in range(num_steps):
            for _ in range(3):  # a call grants a share, where several generators report
                self.lease(LEASE_IDS, "steady")
            for lease_id in LEASE_IDS:
                self.put(lease_id, age=1, wrong=9, again=False)
            self.take(self.settings["groups_per_step"], 0)
            self.advance(1)

    @rule(
        late=st.lists(st.sampled_from(LEASE_IDS), min_size=1, max_size=4, unique=True),
        num_steps=st.integers(1, 4),
        in_parts=st.booleans(),
    )
    def run_some_steps_with_late_groups(
        self, late: list[str], num_steps: int, in_parts: bool
    ) -> None:
        """Steps overtake some groups, which are finished only once a batch waits for them."""
        num_groups = self.settings["groups_per_step"]
        self.save()
        self.attach(None, "of the checkpoint")
        for _ in range(num_steps):
            for _ in range(3):
                self.lease(LEASE_IDS, "steady")
            for lease_id in LEASE_IDS:
                if lease_id not in late:
                    self.put(lease_id, age=1, wrong=9, again=False)
            self.take(num_groups, 0)
            self.advance(1)
        for lease_id in late:
            self.take(num_groups, 0, num_held=0 if in_parts else None)
            self.read()
            self.let_time_pass(0.1)
            self.put(lease_id, age=2, wrong=9, again=False)
        self.take(num_groups, 0)

    @rule()
    def save(self) -> None:
        self.checkpoint = (self.model.ledger.version, self.model.ledger.books())

    @rule()
    def finish(self) -> None:
        self.both(self.redis.finish(), lambda: self.model.finish(self.learner_term))

    @rule(
        version=st.none() | st.integers(0, 3),
        books=st.sampled_from(["of the checkpoint", "blank", "none"]),
        learner_id=st.sampled_from(LEARNER_IDS),
    )
    def attach(self, version: int | None, books: str, learner_id: str = "") -> None:
        chosen = {"of the checkpoint": self.checkpoint[1], "blank": Books(), "none": None}[books]
        at = self.checkpoint[0] if version is None else version

        def expected() -> Any:
            self.learner_term = self.model.attach(at, chosen, learner_id=learner_id)
            return comparable(self.model.stats(self.now_s))

        async def asked() -> Any:
            return comparable(await self.redis.attach(at, chosen, learner_id))

        self.both(asked(), expected)
        self.version = at

    @rule(num_lost=st.integers(0, 2))
    def come_back_with_books_of_a_later_version(self, num_lost: int) -> None:
        """What they call finished is finished, though this learner's history lacks it."""
        self.run_some_steps(2)
        self.save()
        self.attach(max(0, self.checkpoint[0] - num_lost), "of the checkpoint")

    @rule()
    def another_learner_attaches(self) -> None:
        """The calls of this client are refused from now on."""
        other = self.runner.run(self.client())
        self.runner.run(other.attach(self.version, None))
        self.model.attach(self.version, None)
        self.runner.run(other.close())

    @rule()
    def copy_the_server(self) -> None:
        keys = list(self.server.scan_iter(f"streamrl:{{{self.run_name}}}:*"))
        self.older = ({key: self.server.dump(key) for key in keys}, deepcopy(self.model))

    @precondition(lambda self: self.older)
    @rule()
    def restore_the_server(self) -> None:
        self.runner.run(forget(self.url, self.run_name))
        for key, value in self.older[0].items():
            self.server.restore(key, 0, value)
        self.model = deepcopy(self.older[1])

    @rule()
    def read(self) -> None:
        def expected() -> Any:
            self.model.expire(self.now_s)
            return comparable(self.model.stats(self.now_s))

        async def asked() -> Any:
            return comparable(await self.redis.stats())

        self.both(asked(), expected)

    @invariant()
    def the_indexes_agree(self) -> None:
        books = self.model.ledger.books()
        names = ("in_flight", "ready", "expiries", "leased", "entries", "leases")
        pipeline = self.server.pipeline()
        for name in names:
            key = f"streamrl:{{{self.run_name}}}:{name}"
            pipeline.zcard(key) if name in names[:4] else pipeline.hlen(key)
        in_flight = books.leased + books.buffered + books.taken
        everything = in_flight + books.trained
        expected = [in_flight, books.buffered, books.leased, books.leased, everything, everything]
        assert pipeline.execute() == expected

    def teardown(self) -> None:
        if not hasattr(self, "redis"):
            return
        self.read()
        self.runner.run(self.check_events())
        self.runner.run(self.redis.close())
        self.runner.run(forget(self.url, self.run_name))
        self.server.close()
        self.runner.close()

    async def check_events(self) -> None:
        """Replayed, the events give every column of the books."""
        found = audit([event async for event in read_events(self.url, self.run_name)])
        books = self.model.ledger.books()
        for column in ("leased", "buffered", "taken", "trained"):
            assert found.waiting[column] == getattr(books, column), column
        assert found.lengths.rounded() == self.model.ledger.snapshot().lengths


class Refusal(tuple[str, str]):
    """A kind of error and its sentence."""


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except StreamRLError as error:
        return Refusal((type(error).__name__, str(error)))


def comparable(stats: Any) -> Any:
    """All but the server's name for itself, and the time since any generator reported, which a
    restored server counts on and the model counts anew; generators in one order."""
    reports = zip(stats.generators, stats.heartbeat_ages_s, strict=True)
    return (
        *(stats.policy_version, stats.groups_per_step, stats.max_staleness, stats.books),
        *(stats.overdue, stats.awaited, round(stats.wait_due_s, 4), stats.retried),
        *(stats.refused, stats.oldest_version, stats.num_bytes, stats.finished, stats.draining),
        *(stats.scheduling_states, stats.lengths),
        sorted(reports, key=lambda report: report[0].generator_id),
    )


@pytest.fixture
def twins(redis: RedisServer) -> type[Twins]:
    return type("TwinsHere", (Twins,), {"url": redis.url})


def test_the_scripts_and_the_ledger_cannot_be_told_apart(twins: type[Twins]):
    run_state_machine_as_test(
        twins,
        settings=settings(
            max_examples=22,
            stateful_step_count=40,
            deadline=None,
            # Shrinking takes minutes here; a failure's steps are few enough to read.
            phases=[Phase.reuse, Phase.generate],
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
