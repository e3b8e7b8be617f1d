"""What a ledger lends after its learner went back to an earlier version."""

import pytest
from msgspec.structs import replace

from buffers.audit import audit
from buffers.ledger.entries import Event
from buffers.ledger.ledger import Ledger
from streamrl.types import Books, DropReason, GroupHeader, Lease, OverduePolicy
from tests.records import make_group

B, STALENESS = 2, 1


class Run:
    """A learner and a generator that is always at the learner's version; every step is a
    checkpoint, of which `acknowledged` are durable."""

    def __init__(self, overdue: OverduePolicy = OverduePolicy.WAIT) -> None:
        self.ledger = Ledger(groups_per_step=B, max_staleness=STALENESS, overdue=overdue)
        self.events: list[Event] = []
        self.ledger.entries.subscribers.append(self.events.append)
        self.names = iter(range(10_000))
        self.books: dict[int, Books] = {}
        self.trained: dict[int, list[int]] = {}
        self.attach(0, Books())

    def attach(self, version: int, books: Books | None) -> None:
        self.term = self.ledger.attach(version, books)
        self.version = version
        self.books[version] = self.ledger.books()
        self.trained = {v: prompts for v, prompts in self.trained.items() if v <= version}

    def lease(self) -> list[Lease]:
        leases = []
        while lease := self.ledger.lease(f"s/{next(self.names)}", 0.0, 10.0):
            leases.append(lease)
        return leases

    def put(self, lease: Lease, oldest: int, newest: int | None = None) -> None:
        group = make_group(lease.prompt_index, lease_id=lease.lease_id, version=oldest)
        header = replace(GroupHeader.of(group), newest_version=oldest if newest is None else newest)
        self.ledger.put(lease.lease_id, header, 0.0)

    def take(self) -> tuple[GroupHeader, ...]:
        loan = self.ledger.take(B, self.version, self.term)
        for header in loan:
            assert abs(header.oldest_version - self.version) <= STALENESS
            assert abs(header.newest_version - self.version) <= STALENESS
        return loan

    def run_to(self, version: int, acknowledged: int = 0) -> None:
        while self.version < version:
            for lease in self.lease():
                self.put(lease, self.version)
            loan = self.take()
            while not loan:
                leases = self.lease()
                assert leases, "neither a lease nor a loan: a deadlock"
                for lease in leases:
                    self.put(lease, self.version)
                loan = self.take()
            self.version += 1
            self.ledger.advance(self.version, self.term)
            self.trained[self.version] = [header.prompt_index for header in loan]
            self.books[self.version] = self.ledger.books()
            if self.version <= acknowledged:
                self.ledger.acknowledge(self.version, self.term)

    @property
    def dropped(self) -> dict[DropReason, int]:
        return self.ledger.books().dropped


@pytest.mark.parametrize("overdue", OverduePolicy)
def test_groups_of_an_abandoned_future_are_dropped_and_their_prompts_sampled_again(overdue):
    run = Run(overdue)
    run.run_to(20, acknowledged=18)
    run.attach(5, run.books[5])
    num_waiting = run.ledger.books().buffered
    assert num_waiting >= (STALENESS + 1) * B, "they keep admission closed"
    assert run.lease() == []
    assert run.take() == ()
    run.run_to(20)
    assert run.dropped == {DropReason.ABANDONED: num_waiting}
    prompts = [prompt for prompts in run.trained.values() for prompt in prompts]
    assert sorted(prompts) == list(range(20 * B))
    assert run.ledger.books().balanced
    assert audit(run.events).faults == ()


@pytest.mark.parametrize("overdue", OverduePolicy)
def test_after_a_plain_crash_the_same_groups_are_trained_by_the_same_steps(overdue):
    run = Run(overdue)
    run.run_to(20, acknowledged=10)
    history = dict(run.trained)
    run.attach(10, run.books[10])
    run.run_to(20)
    assert run.trained == history
    assert run.dropped == {}


def test_without_books_and_with_those_of_an_older_version_nothing_too_new_is_lent():
    run = Run()
    run.run_to(12, acknowledged=9)
    run.attach(3, None)
    run.run_to(8)
    run.attach(6, run.books[2])
    run.run_to(12)
    assert run.ledger.books().balanced
    assert audit(run.events).faults == ()


def test_a_group_that_mixes_both_histories_is_dropped_when_its_turn_comes():
    """A running sequence goes on with the learner's weights: its newest token is of the abandoned
    history, its oldest one puts it first in the queue."""
    run = Run()
    run.run_to(9, acknowledged=9)
    begun, *others = run.lease()
    run.attach(4, run.books[4])
    run.put(begun, oldest=4, newest=9)
    for lease in others:
        run.ledger.release(lease.lease_id, DropReason.RELEASED)
    run.run_to(6)
    assert run.dropped[DropReason.ABANDONED] >= 1
    event = next(e for e in run.events if e.lease_id == begun.lease_id and e.state == "dropped")
    assert event.reason == DropReason.ABANDONED
    assert begun.prompt_index in {p for prompts in run.trained.values() for p in prompts} | set(
        run.ledger.books().open_prompt_indices
    )


def test_a_group_that_the_learner_may_train_later_is_kept_until_then():
    run = Run()
    run.run_to(6, acknowledged=6)
    run.attach(4, run.books[6])
    early, *others = run.lease()
    run.put(early, oldest=6)
    for lease in others:
        run.put(lease, oldest=4)
    run.run_to(5)
    assert early.prompt_index in run.ledger.books().open_prompt_indices
    run.run_to(7)
    assert run.dropped == {}
    assert early.prompt_index in run.trained[6] + run.trained[7]
