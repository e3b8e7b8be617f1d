"""Any interleaving of calls, expiries and deaths keeps the ledger's promises.

The model beside the ledger is what an outside auditor would write down: which prompts the
surviving history has trained, at which version, and what the last durable checkpoint contains.
"""

import heapq
from copy import deepcopy
from typing import Any

import hypothesis.strategies as st
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec import structs

from buffers.audit import audit, compare
from buffers.ledger.entries import Entries, Event, ReadyQueue, State, lease_of
from buffers.ledger.ledger import Ledger
from buffers.ledger.state import GROUP, RetryCounter
from streamrl.types import (
    Books,
    DropReason,
    GroupHeader,
    Lease,
    LengthHistogram,
    OverduePolicy,
)
from tests.records import make_group, make_header, make_sibling

TTL_S = 10.0
ENDS_A_LEASE = (DropReason.RELEASED, DropReason.FAILED, DropReason.FILTERED, DropReason.UNIFORM)


class CountedLedger(Ledger):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.retries = RetryCounter()
        self.events: list[Event] = []
        self.entries.subscribers += [self.retries.on_event, self._on_event]

    def _on_event(self, event: Event) -> None:
        self.events.append(event)


class LedgerMachine(RuleBasedStateMachine):
    @initialize(
        groups_per_step=st.integers(1, 3),
        max_staleness=st.integers(0, 3),
        min_staleness=st.none() | st.integers(0, 3),
        overdue=st.sampled_from(OverduePolicy),
    )
    def start(self, **settings: Any) -> None:
        if settings["min_staleness"] is not None:
            settings["min_staleness"] = min(settings["min_staleness"], settings["max_staleness"])
        self.settings = settings
        self.steered_bound = 0
        self.ledger = CountedLedger(**self.settings)
        self.learner_term = self.ledger.attach(0, None, "learner 0")
        self.num_learners = 1
        self.last_books: Books | None = None
        self.now_s = 0.0
        self.num_leases = 0
        self.held: dict[str, Lease] = {}
        self.loan: tuple[GroupHeader, ...] = ()
        self.version = 0
        self.history: dict[int, int] = {}
        self.checkpoint: tuple[int, Books, dict[int, int]] = (0, Books(), {})
        self.first_checkpoint = self.checkpoint
        self.saved = {0: self.checkpoint}
        self.older_ledger = CountedLedger(**self.settings)
        self.has_lost_history = False
        self.vacant: dict[int, Lease] = {}

    @rule()
    def lease(self) -> None:
        first = min(self.vacant.values(), key=_due_of, default=None)
        lease = self.ledger.lease(f"lease {self.num_leases}", self.now_s, TTL_S)
        if lease is not None:
            self.num_leases += 1
            assert lease.prompt_index not in {held.prompt_index for held in self.held.values()}
            assert lease.prompt_index not in self.history
            assert lease.min_policy_version <= self.version
            assert first is None or _due_of(lease) == _due_of(first)
            assert lease.kept_siblings == (first.kept_siblings if first else ())
            self.vacant.pop(lease.prompt_index, None)
            self.held[lease.lease_id] = lease

    @precondition(lambda self: self.held)
    @rule(data=st.data(), newer=st.integers(0, 2), spread=st.integers(0, 4))
    def put(self, data: st.DataObject, newer: int, spread: int) -> None:
        """Its newest tokens may be of versions that the learner has left."""
        lease = self.held.pop(data.draw(st.sampled_from(sorted(self.held))))
        oldest = lease.min_policy_version + newer
        if lease.min_policy_version > self.version:
            # It was begun before the learner went back, and went on with the learner's weights.
            oldest = data.draw(st.integers(self.version, oldest))
        self._put(lease, oldest, lease.min_policy_version + newer + spread)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def put_what_older_weights_sampled(self, data: st.DataObject) -> None:
        lease = self.held.pop(data.draw(st.sampled_from(sorted(self.held))))
        self._put(lease, max(0, lease.min_policy_version - 1))

    def _put(self, lease: Lease, oldest: int, newest: int = -1) -> None:
        # Weights of a lost history: a generator samples from none that are older than its lease.
        self.has_lost_history |= oldest < lease.min_policy_version
        versions = {"newest_version": max(oldest, newest), "response_lengths": (oldest, 17)}
        header = make_header(lease, oldest, **versions)
        if self.ledger.put(lease.lease_id, header, self.now_s):
            self.ledger.entries.hold(lease.prompt_index, GROUP, lease.lease_id, 7)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), number=st.integers(0, 2), num_more=st.integers(0, 2))
    def put_a_sibling(self, data: st.DataObject, number: int, num_more: int) -> None:
        lease = self.held[data.draw(st.sampled_from(sorted(self.held)))]
        counts = {"oldest_version": lease.min_policy_version, "num_tokens": 100 + num_more}
        sibling = make_sibling(lease.lease_id, number, **counts)
        known = {s.number: s for s in self.ledger.entries.find(lease.lease_id).siblings}
        is_more = number not in known or (
            sibling.lease_id != known[number].lease_id
            or sibling.num_tokens > known[number].num_tokens
        )
        kept = self.ledger.put_sibling(sibling, self.now_s)
        assert kept == (lease.prompt_index if is_more else None)
        if is_more:
            self.ledger.entries.hold(lease.prompt_index, number, lease.lease_id, 1 + num_more)
            numbers = (*(n for n in lease.kept_siblings if n != number), number)
            self.held[lease.lease_id] = structs.replace(lease, kept_siblings=numbers)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), reason=st.sampled_from((DropReason.EXPIRED, DropReason.RELEASED)))
    def a_generator_disappears(self, data: st.DataObject, reason: DropReason) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.held)))
        self.ledger.end_lease(lease_id, reason)
        self._vacate(self.held.pop(lease_id))

    def _vacate(self, lease: Lease) -> None:
        if lease.kept_siblings and lease.min_policy_version <= self.version:
            self.vacant[lease.prompt_index] = lease

    @precondition(lambda self: self.held)
    @rule(
        data=st.data(),
        reason=st.sampled_from(ENDS_A_LEASE),
        lengths=st.lists(st.integers(1, 100), max_size=3),
    )
    def release(self, data: st.DataObject, reason: DropReason, lengths: list[int]) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.held)))
        del self.held[lease_id]
        self.ledger.release(lease_id, reason, lengths)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def let_time_pass_with_some_generators_dead(self, data: st.DataObject) -> None:
        alive = data.draw(st.sets(st.sampled_from(sorted(self.held))))
        self.now_s += 0.6 * TTL_S
        lost = set(self.ledger.renew(alive, self.now_s, TTL_S))
        self.now_s += 0.6 * TTL_S
        self.ledger.expire(self.now_s)
        for lease_id in self.held.keys() - (alive - lost):
            self._vacate(self.held.pop(lease_id))
        assert set(self.ledger.live_leases()) == self.held.keys()

    @rule(in_parts=st.booleans())
    def take(self, in_parts: bool = False) -> None:
        num_held = len(self.loan) if in_parts else None
        num_groups = self.settings["groups_per_step"]
        loan = self.ledger.take(num_groups, self.version, self.learner_term, num_held)
        for group in loan:
            bound = self.settings["max_staleness"]
            assert group.newest_version - self.version <= bound
            is_bounded = self.settings["overdue"] is not OverduePolicy.TRAIN
            assert not is_bounded or self.version - group.oldest_version <= bound
            assert group.prompt_index not in self.history
        assert loan[: len(self.loan)] == self.loan or not loan
        self.loan = loan or self.loan

    @precondition(lambda self: len(self.loan) == self.settings["groups_per_step"])
    @rule()
    def train(self) -> None:
        self.version += 1
        self.ledger.advance(self.version, self.learner_term, self.steered_bound)
        self.history |= {group.prompt_index: self.version for group in self.loan}
        self.loan = ()
        self.last_books = self.ledger.books()
        self.saved[self.version] = (self.version, self.last_books, dict(self.history))

    @rule(bound=st.integers(0, 4))
    def steer(self, bound: int) -> None:
        """From the next step on, in either direction, as far as the run allows."""
        self.steered_bound = bound

    @rule(num_steps=st.integers(1, 3), spread=st.integers(0, 3))
    def run_some_steps(self, num_steps: int, spread: int) -> None:
        """Steady work: without this rule, random calls rarely fill a batch."""
        for _ in range(num_steps):
            for _ in range(12):
                self.lease()
            for lease in tuple(self.held.values()):
                del self.held[lease.lease_id]
                self._put(lease, min(lease.min_policy_version + spread, self.version))
            self.take()
            if len(self.loan) == self.settings["groups_per_step"]:
                self.train()

    @rule(data=st.data(), num_steps=st.integers(1, 8))
    def run_some_steps_with_long_tails(self, data: st.DataObject, num_steps: int) -> None:
        """Groups finish in any order, and the oldest ones only when nothing else can go on.

        With every group finished a batch waits for nobody: there is no deadlock.
        """
        for _ in range(num_steps):
            for _ in range(12):
                self.lease()
            finishing = data.draw(st.permutations(sorted(self.held)))
            while len(self.loan) < self.settings["groups_per_step"]:
                self.take(in_parts=data.draw(st.booleans()))
                if finishing and self.held:
                    lease = self.held.pop(finishing.pop())
                    first = min(lease.min_policy_version, self.version)
                    self._put(lease, data.draw(st.integers(first, self.version)))
                elif len(self.loan) < self.settings["groups_per_step"]:
                    self.take()
                    break
            if len(self.loan) == self.settings["groups_per_step"]:
                self.train()
            assert not self.is_stuck()

    @rule()
    def make_a_step(self) -> None:
        """Whatever was before: groups of an abandoned future keep nobody from going on."""
        before = self.version
        for _ in range(4):
            for _ in range(12):
                self.lease()
            for lease in tuple(self.held.values()):
                del self.held[lease.lease_id]
                self._put(lease, max(lease.min_policy_version, self.version), self.version)
            self.take()
            if len(self.loan) == self.settings["groups_per_step"]:
                self.train()
                return
        assert self.version > before

    def is_stuck(self) -> bool:
        """Whether enough groups are finished, none is leased, and no batch is lent. Groups of an
        abandoned future are dropped where a batch would get them."""
        missing = self.settings["groups_per_step"] - len(self.loan)
        if self.ledger.books().leased or missing == 0:
            return False
        self.take()
        missing = self.settings["groups_per_step"] - len(self.loan)
        return 0 < missing <= self.ledger.books().buffered

    @rule(acknowledges=st.booleans())
    def save(self, acknowledges: bool) -> None:
        """A learner may die between the durable checkpoint and its acknowledgement."""
        self.checkpoint = (self.version, self.ledger.books(), dict(self.history))
        if acknowledges:
            self.ledger.acknowledge(self.version, self.learner_term)

    @rule(buffer=st.sampled_from(["lives", "comes back blank", "comes back older"]))
    def kill_the_learner(self, buffer: str) -> None:
        """A buffer that comes back never hears again of the leases it remembers."""
        self.has_lost_history |= buffer != "lives" or self.version > self.checkpoint[0]
        self.version, books, history = self.checkpoint
        self.history = dict(history)
        if buffer != "lives":
            blank = CountedLedger(**self.settings)
            self.ledger = deepcopy(self.older_ledger) if buffer.endswith("older") else blank
            self.held, self.vacant = {}, {}
        self._attach(books)
        if buffer != "lives":
            self.now_s += 2 * TTL_S
            self.ledger.expire(self.now_s)
            entries = map(self.ledger.entries.get, range(self.ledger.books().next_prompt_index))
            leased = [entry for entry in entries if entry and entry.state is State.LEASED]
            assert all(entry.siblings for entry in leased)
            self.vacant = {entry.prompt_index: lease_of(entry) for entry in leased}

    @rule()
    def resume_from_an_earlier_checkpoint(self) -> None:
        """The checkpoint is not the last one acknowledged: what came after is made again."""
        self.has_lost_history |= self.version > self.first_checkpoint[0]
        self.version, books, history = self.first_checkpoint
        self.checkpoint = self.first_checkpoint
        self.history = dict(history)
        self._attach(books)

    @rule(data=st.data(), books=st.sampled_from(["of that version", "older ones", "none"]))
    def go_back(self, data: st.DataObject, books: str) -> None:
        """To any version that was made before. A lease that the version may not sample is given
        back, unless its group was begun."""
        earlier = sorted(version for version in self.saved if version <= self.version)
        self.version = data.draw(st.sampled_from(earlier))
        of = self.version
        if books == "older ones":
            of = data.draw(st.sampled_from([v for v in earlier if v <= self.version]))
        known = dict(self.history)
        _, found, self.history = (self.version, None, {}) if books == "none" else self.saved[of]
        self.history = dict(self.history)
        self._attach(found)
        if found is None:
            # What the buffer has freed is finished, whatever the learner knows.
            still_open = set(self.ledger.books().open_prompt_indices)
            self.history = {p: v for p, v in known.items() if p not in still_open}
            assert self.history.keys() >= {p for p, v in known.items() if v <= self.version}
        self.checkpoint = (self.version, self.ledger.books(), dict(self.history))
        self.saved = {v: saved for v, saved in self.saved.items() if v < self.version}
        self.saved[self.version] = self.checkpoint
        for lease in tuple(self.held.values()):
            if lease.min_policy_version <= self.version:
                continue
            if data.draw(st.booleans()):
                self.has_lost_history = True
            else:
                del self.held[lease.lease_id]
                self.ledger.release(lease.lease_id, DropReason.RELEASED)

    @rule()
    def the_learner_attaches_again(self) -> None:
        """A payload was lost, say: no step is freed that may be in no checkpoint."""
        before = self.ledger.books()
        self.num_learners -= 1
        self._attach(self.last_books)
        after = self.ledger.books()
        assert (after.acknowledged, after.trained) == (before.acknowledged, before.trained)

    @rule()
    def copy_the_buffer(self) -> None:
        self.older_ledger = deepcopy(self.ledger)

    def _attach(self, books: Books | None) -> None:
        learner_id = f"learner {self.num_learners}"
        self.learner_term = self.ledger.attach(self.version, books, learner_id)
        self.num_learners += 1
        self.last_books = books
        self.loan = ()
        # Older books may have made a prompt open that these books have trained or dropped.
        given = Books() if books is None else books
        closed = {*range(given.next_prompt_index)} - {*given.open_prompt_indices}
        self.held = {n: e for n, e in self.held.items() if e.prompt_index not in closed}
        for prompt_index, lease in tuple(self.vacant.items()):
            if lease.min_policy_version > self.version or prompt_index in closed:
                del self.vacant[prompt_index]

    @invariant()
    def groups_are_dropped_as_stale_only_by_policy_or_after_a_loss(self) -> None:
        match self.settings["overdue"]:
            case OverduePolicy.TRAIN:
                assert DropReason.STALE not in self.ledger.books().dropped
            case OverduePolicy.WAIT if not self.has_lost_history:
                assert DropReason.STALE not in self.ledger.books().dropped

    @invariant()
    def the_books_close(self) -> None:
        books = self.ledger.books()
        assert books.balanced
        assert books.leased == len(self.held) + len(self.vacant)
        assert set(self.ledger.live_leases()) == self.held.keys()
        assert books.taken == len(self.loan)

    @invariant()
    def every_prompt_is_open_trained_or_dropped_for_good(self) -> None:
        books = self.ledger.books()
        accounted = set(books.open_prompt_indices) | self.history.keys()
        assert not set(books.open_prompt_indices) & self.history.keys()
        assert accounted <= set(range(books.next_prompt_index))
        ended = sum(n for reason, n in books.dropped.items() if not reason.returns_prompt)
        assert books.next_prompt_index - len(accounted) <= ended

    @invariant()
    def only_open_prompts_without_a_group_are_counted_as_retried(self) -> None:
        open_prompts = set(self.ledger.books().open_prompt_indices)
        for prompt_index in self.ledger.retries._num_leases:
            assert prompt_index in open_prompts
            entry = self.ledger.entries.get(prompt_index)
            assert entry is None or entry.state is State.LEASED

    @invariant()
    def every_sampled_response_waits_or_has_an_outcome(self) -> None:
        lengths = self.ledger.entries.responses.frozen()
        entries = map(self.ledger.entries.get, range(self.ledger.books().next_prompt_index))
        waiting = LengthHistogram.of(
            length
            for entry in entries
            if entry and entry.header and entry.state is not State.TRAINED
            for length in entry.header.response_lengths
        ).rounded()
        assert lengths.sampled == lengths.trained + lengths.all_dropped + waiting

    @invariant()
    def a_payload_is_held_exactly_while_the_ledger_has_what_it_is_of(self) -> None:
        num_bytes = 0
        for entry in self.ledger.entries:
            siblings = {s.number: s.lease_id for s in entry.siblings}
            expected = siblings if entry.header is None else {GROUP: entry.lease_id}
            assert {n: payload for n, (payload, _) in entry.payloads.items()} == expected
            num_bytes += entry.num_bytes
        assert self.ledger.entries.num_bytes == num_bytes

    @invariant()
    def the_groups_in_flight_are_bounded(self) -> None:
        books = self.ledger.books()
        bound = (self.settings["max_staleness"] + 1) * self.settings["groups_per_step"]
        assert books.leased <= bound

    def teardown(self) -> None:
        if hasattr(self, "ledger"):
            found = audit(self.ledger.events)
            assert found.faults == ()
            assert list(compare(found, self.ledger.snapshot())) == []


def _due_of(lease: Lease) -> tuple[int, int]:
    return lease.min_policy_version, lease.prompt_index


LedgerMachine.TestCase.settings = settings(max_examples=75, stateful_step_count=40)
TestLedger = LedgerMachine.TestCase


@given(st.lists(st.integers(0, 5) | st.none(), max_size=60))
def test_the_ready_queue_is_a_priority_queue(operations):
    """A group of this version joins; None takes the first one out."""
    account, heap = Entries(), []
    line = ReadyQueue(account)
    for number, version in enumerate(operations):
        if version is not None:
            entry = account.grant(str(number), 0, 0.0)
            entry.header = GroupHeader.of(make_group(entry.prompt_index, version=version))
            account.move(entry, State.BUFFERED)
            line.add(entry)
            heapq.heappush(heap, (version, entry.prompt_index))
        elif heap:
            first = line.first()
            assert first is not None
            assert first.prompt_index == heapq.heappop(heap)[1]
            account.move(first, State.TAKEN)
        first = line.first()
        assert (first and first.prompt_index) == (heap[0][1] if heap else None)
