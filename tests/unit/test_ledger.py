"""The ledger's rules, one at a time. `test_ledger_properties.py` mixes them in any order."""

import sys
from collections import Counter
from typing import Any

import pytest

from buffers.ledger.ledger import Ledger
from streamrl.errors import (
    ConfigError,
    LedgerError,
    LostMemoryError,
)
from streamrl.types import (
    Books,
    DropReason,
    Lease,
    LengthHistogram,
    OverduePolicy,
    ResponseLengths,
)
from tests.records import make_header, make_sibling


def make_ledger(groups_per_step: int = 2, max_staleness: int = 1, **kwargs: Any) -> Ledger:
    ledger = Ledger(groups_per_step=groups_per_step, max_staleness=max_staleness, **kwargs)
    ledger.attach(0)
    return ledger


def grant(ledger: Ledger, lease_id: str, now_s: float = 0.0, ttl_s: float = 10.0) -> Lease:
    lease = ledger.lease(lease_id, now_s, ttl_s)
    assert lease is not None
    return lease


def fill(ledger: Ledger, *lease_ids: str, version: int = 0, length: int = 2) -> None:
    for lease_id in lease_ids:
        lengths = (length, length)
        header = make_header(grant(ledger, lease_id), version, response_lengths=lengths)
        ledger.put(lease_id, header, 0.0)


def train_one_step(ledger: Ledger, learner_term: int = 1) -> list[int]:
    taken = ledger.take(ledger.groups_per_step, ledger.version, learner_term)
    ledger.advance(ledger.version + 1, learner_term)
    return [group.prompt_index for group in taken]


def test_nothing_is_granted_before_a_learner_attached_and_after_the_end_until_one_does_again():
    ledger = Ledger(groups_per_step=1, max_staleness=0)
    assert ledger.lease("a", 0.0, 10.0) is None
    ledger.attach(0)
    assert grant(ledger, "a").prompt_index == 0
    ledger.release("a", DropReason.RELEASED)
    ledger.finish(1)
    assert ledger.lease("b", 0.0, 10.0) is None
    ledger.attach(0)
    assert grant(ledger, "b").prompt_index == 0


def test_admission_stops_near_the_end_of_the_run():
    ledger = make_ledger(groups_per_step=2, max_staleness=5, final_version=2)
    fill(ledger, *"abcd")
    assert ledger.lease("e", 0.0, 10.0) is None
    train_one_step(ledger)
    assert ledger.lease("e", 0.0, 10.0) is None


def test_a_drain_admits_what_completes_the_last_batch_until_a_learner_attaches():
    ledger = make_ledger(groups_per_step=3, max_staleness=2)
    fill(ledger, "a")
    ledger.draining = True
    assert ledger.num_admitted() == 2
    fill(ledger, "b", "c")
    assert ledger.num_admitted() == 0
    ledger.attach(0)
    assert ledger.num_admitted() == 6


def test_the_oldest_version_of_a_lease_follows_its_place_in_the_stream():
    ledger = make_ledger(groups_per_step=2, max_staleness=2)
    for step in range(3):
        fill(ledger, f"first {step}", f"second {step}")
        train_one_step(ledger)
    versions = [grant(ledger, name).min_policy_version for name in "abcdef"]
    assert versions == [1, 1, 2, 2, 3, 3]


def test_a_steered_bound_decides_about_new_leases_alone():
    ledger = make_ledger(groups_per_step=1, max_staleness=3, min_staleness=1)
    fill(ledger, "a", "b")
    assert ledger.lease("c", 0.0, 10.0) is None, "it begins with the smallest"
    ledger.take(1, 0, 1)
    ledger.advance(1, 1, steered_bound=3)
    fill(ledger, "c", "d", "e", version=1)
    assert ledger.lease("f", 0.0, 10.0) is None
    ledger.take(1, 1, 1)
    ledger.advance(2, 1, steered_bound=0)
    assert ledger.staleness_bound == 1, "the run allows no lower one"
    assert ledger.num_admitted() == 0
    ledger.take(1, 2, 1)
    ledger.advance(3, 1, steered_bound=1)
    ledger.take(1, 3, 1)
    ledger.advance(4, 1, steered_bound=1)
    # What was admitted under the higher bound is trained within it, and nothing was dropped.
    assert ledger.take(1, 4, 1)[0].oldest_version == 1
    ledger.advance(5, 1, steered_bound=9)
    assert ledger.books().dropped == {}
    assert ledger.staleness_bound == 3, "nor a higher one"
    versions = [grant(ledger, name).min_policy_version for name in "fghi"]
    assert versions == [2, 3, 4, 5]


def test_a_learner_brings_the_bound_of_its_checkpoint():
    ledger = make_ledger(groups_per_step=1, max_staleness=4, min_staleness=1)
    fill(ledger, "a")
    ledger.take(1, 0, 1)
    ledger.advance(1, 1, steered_bound=3)
    books = ledger.books()
    blank = Ledger(groups_per_step=1, max_staleness=4, min_staleness=1)
    blank.attach(1, books)
    assert (blank.staleness_bound, blank.books().steered_bound) == (3, 3)
    fixed = Ledger(groups_per_step=1, max_staleness=4)
    fixed.attach(1, books)
    assert fixed.staleness_bound == 4


def test_a_renewal_costs_the_same_however_often_and_names_what_is_lost():
    ledger = make_ledger()
    grant(ledger, "s/0")
    grant(ledger, "s/1")
    for now_s in range(100):
        assert ledger.renew(["s/0", "never"], now_s, ttl_s=200.0) == ("never",)
    assert len(ledger._expiries._heap) == 1
    assert ledger.live_leases() == ("s/0",)
    assert ledger.expire(298.9) == ()
    assert ledger.expire(299.0) == ("s/0",)


def test_the_leases_of_a_session_are_those_that_are_live():
    ledger = make_ledger(groups_per_step=4)
    for lease_id in ("a/0", "b/0", "a/1", "a/2"):
        grant(ledger, lease_id)
    fill(ledger, "a/1")
    leases_of = ledger.entries.columns.leases_of
    assert leases_of("a") == ("a/0", "a/2")
    ledger.release("a/0", DropReason.RELEASED)
    assert (leases_of("a"), leases_of("b")) == (("a/2",), ("b/0",))
    ledger.expire(10.0)
    assert (leases_of("a"), leases_of("c")) == ((), ())


@pytest.mark.parametrize("reason", DropReason)
def test_a_released_lease_returns_its_prompt_or_ends_it_by_its_reason(reason):
    ledger = make_ledger()
    lease = grant(ledger, "a")
    ledger.release("a", reason)
    again = grant(ledger, "b").prompt_index
    assert (again == lease.prompt_index) is reason.returns_prompt
    assert ledger.books().dropped == {reason: 1}


def test_a_prefetched_batch_counts_the_version_it_will_wait_for():
    ledger = make_ledger(groups_per_step=1, max_staleness=0)
    fill(ledger, "a")
    ledger.take(1, 0, 1)
    with pytest.raises(LedgerError, match="next to be trained is 1"):
        ledger.take(1, 2, 1)
    assert ledger.take(1, 1, 1) == ()


def test_a_prefetched_batch_is_evicted_by_the_version_that_will_train_it():
    ledger = make_ledger(groups_per_step=1, max_staleness=2, overdue=OverduePolicy.DROP)
    fill(ledger, *"abc")
    train_one_step(ledger)
    fill(ledger, "d", version=0)
    assert [len(ledger.take(1, version, 1)) for version in (1, 2, 3)] == [1, 1, 0]
    assert ledger.books().dropped == {DropReason.STALE: 1}


def test_what_became_too_stale_is_evicted_with_the_reason():
    ledger = make_ledger(groups_per_step=1, max_staleness=1, overdue=OverduePolicy.DROP)
    slow = grant(ledger, "slow")
    for _ in range(2):
        fill(ledger, f"quick {ledger.version}", version=ledger.version)
        train_one_step(ledger)
    assert not ledger.put("slow", make_header(slow, version=0), 0.0)
    assert ledger.books().dropped == {DropReason.STALE: 1}


def overtake(ledger: Ledger) -> Lease:
    """A group leased at version 0 that a step overtakes; another is finished for the next step."""
    slow = grant(ledger, "slow")
    fill(ledger, "quick 0")
    train_one_step(ledger)
    fill(ledger, "quick 1", version=1)
    return slow


def test_what_is_due_later_is_not_awaited():
    ledger = make_ledger(groups_per_step=1, max_staleness=2, overdue=OverduePolicy.WAIT)
    overtake(ledger)
    train_one_step(ledger)
    grant(ledger, "slow, and due later")
    fill(ledger, "quick 2", version=2)
    assert ledger.take(1, 2, 1) == ()
    assert [entry.lease_id for entry in ledger.awaited()] == ["slow"]


def test_a_batch_does_not_wait_for_what_is_due_later():
    ledger = make_ledger(groups_per_step=2, max_staleness=2, overdue=OverduePolicy.WAIT)
    for number in range(3):
        grant(ledger, f"slow {number}")
    fill(ledger, "a", "b")
    assert train_one_step(ledger) == [3, 4]
    fill(ledger, "c", "d", version=1)
    assert ledger.take(2, 1, 1) == ()  # three are due by version 2, which has two places
    ledger.release("slow 0", DropReason.FAILED)
    assert train_one_step(ledger) == [5, 6]


def test_a_batch_waits_for_places_that_groups_due_earlier_and_later_need_together():
    ledger = make_ledger(groups_per_step=1, max_staleness=3, overdue=OverduePolicy.WAIT)
    fill(ledger, "a", "b")
    due_at_3 = [grant(ledger, name) for name in "cd"]
    train_one_step(ledger)
    grant(ledger, "e")
    ledger.release("d", DropReason.FAILED)
    due_at_4 = [grant(ledger, name) for name in "ef"]
    train_one_step(ledger)
    fill(ledger, "g", version=2)
    assert [lease.min_policy_version + 3 for lease in (*due_at_3, *due_at_4)] == [3, 3, 4, 4]
    assert ledger.take(1, 2, 1) == ()  # one is due at 3 and two at 4, which two steps follow
    assert [entry.lease_id for entry in ledger.awaited()] == ["c", "e", "f"]
    ledger.release("e", DropReason.FAILED)
    assert train_one_step(ledger) == [6]


@pytest.mark.parametrize("end", [DropReason.EXPIRED, DropReason.FAILED])
def test_a_batch_goes_on_when_the_lease_that_is_due_ends(end):
    ledger = make_ledger(groups_per_step=1, max_staleness=1, overdue=OverduePolicy.WAIT)
    overtake(ledger)
    assert ledger.take(1, 1, 1) == ()
    if end is DropReason.EXPIRED:
        ledger.expire(20.0)
    else:
        ledger.release("slow", end)
    assert [group.prompt_index for group in ledger.take(1, 1, 1)] == [2]


def test_an_overdue_group_is_trained_as_old_as_it_is():
    ledger = make_ledger(groups_per_step=1, max_staleness=1, overdue=OverduePolicy.TRAIN)
    slow = overtake(ledger)
    for number in range(3):
        train_one_step(ledger)
        fill(ledger, f"quicker {number}", version=ledger.version)
    assert ledger.put("slow", make_header(slow, version=0), 0.0)
    assert ledger.version - slow.min_policy_version > ledger.max_staleness
    assert train_one_step(ledger) == [slow.prompt_index]


def test_a_part_is_lent_beside_a_group_that_is_overdue():
    ledger = make_ledger()
    grant(ledger, "of a history that was lost")
    term = ledger.attach(3)
    fill(ledger, "a", "b", version=3)
    assert len(ledger.take(2, 3, term, num_held=0)) == 1


def test_a_part_is_lent_beside_groups_that_are_due_later():
    ledger = make_ledger(groups_per_step=3, max_staleness=1, overdue=OverduePolicy.WAIT)
    slow = grant(ledger, "slow")
    fill(ledger, "a", "b", "c")
    train_one_step(ledger)
    fill(ledger, "d", "e", "f", version=1)
    assert ledger.take(3, 1, 1) == ()
    assert ledger.books().taken == 0, "who takes no part is lent none"
    assert [group.prompt_index for group in ledger.take(3, 1, 1, num_held=0)] == [4, 5]
    assert ledger.awaited()[0].prompt_index == slow.prompt_index
    ledger.put("slow", make_header(slow), 0.0)
    assert [group.prompt_index for group in ledger.take(3, 1, 1)] == [4, 5, 0]


def test_a_blank_ledger_continues_the_account_of_a_checkpoint():
    old = make_ledger(groups_per_step=1, max_staleness=3)
    fill(old, *"abcd")
    train_one_step(old)
    old.release(grant(old, "e").lease_id, DropReason.FAILED)
    books = old.books()
    new = Ledger(groups_per_step=1, max_staleness=3)
    new.attach(1, books)
    assert new.books().balanced
    assert new.books().acknowledged == 1
    assert new.books().dropped == {DropReason.FAILED: 1, DropReason.ORPHANED: 3}
    assert [grant(new, name).prompt_index for name in "fghi"] == [1, 2, 3, 5]
    assert new.entries.responses.frozen() == ResponseLengths(), "counted anew"


def test_advance_without_a_loan_is_refused_and_may_be_repeated_with_one():
    ledger = make_ledger(groups_per_step=1)
    with pytest.raises(LedgerError, match="has lent for \\[\\]"):
        ledger.advance(1, 1)
    fill(ledger, "a")
    ledger.take(1, 0, 1)
    ledger.advance(1, 1)
    ledger.advance(1, 1)
    assert ledger.books().trained == 1


def test_settings_out_of_range_are_named():
    with pytest.raises(ConfigError, match="groups_per_step must be >= 1 \\(was 0\\)"):
        Ledger(groups_per_step=0, max_staleness=0)


def test_a_buffer_that_lost_its_memory_does_not_call_its_learner_fenced():
    blank = Ledger(groups_per_step=1, max_staleness=0)
    with pytest.raises(LostMemoryError, match="knows term 0, not 3"):
        blank.take(1, 0, learner_term=3)
    assert (
        blank.attach(2, Books(granted=2, acknowledged=2, next_prompt_index=2, learner_term=3)) == 4
    )


def test_the_lengths_of_what_is_dropped_as_it_is_put_and_of_what_is_evicted_are_counted():
    ledger = make_ledger(groups_per_step=1, max_staleness=2)
    slow = grant(ledger, "slow")
    fill(ledger, "a", length=3)
    train_one_step(ledger)
    fill(ledger, "b", version=-1, length=4)
    fill(ledger, "c", version=-1, length=5)
    train_one_step(ledger)
    assert not ledger.put("slow", make_header(slow, version=-1, response_lengths=(90, 90)), 0.0)
    ledger.release(grant(ledger, "failed").lease_id, DropReason.FAILED)
    stale = LengthHistogram.of([5, 5, 90, 90]).rounded()
    assert ledger.entries.responses.frozen().dropped == {DropReason.STALE: stale}
    assert ledger.entries.responses.frozen().trained == LengthHistogram.of([3, 3, 4, 4])
    assert ledger.entries.responses.frozen().sampled.num_tokens == 2 * (3 + 4 + 5 + 90)


def test_a_group_that_a_learners_books_contain_was_trained():
    ledger = make_ledger(groups_per_step=1, max_staleness=3)
    fill(ledger, "a", length=6)
    ledger.attach(1, Books(granted=1, acknowledged=1, next_prompt_index=1, revision=9))
    assert ledger.books().acknowledged == 1
    assert ledger.entries.responses.frozen().trained == LengthHistogram.of([6, 6])


def keep_siblings(ledger: Ledger, lease_id: str, *numbers: int, version: int = 0) -> None:
    for number in numbers:
        sibling = make_sibling(lease_id, number, oldest_version=version, num_tokens=5)
        assert ledger.put_sibling(sibling, 0.0) is not None


def test_siblings_older_than_the_first_lease_says_are_sampled_again_and_counted_once():
    ledger = make_ledger(groups_per_step=1, max_staleness=0)
    for _ in range(2):
        fill(ledger, f"of {ledger.version}", version=ledger.version)
        train_one_step(ledger)
    assert grant(ledger, "a").min_policy_version == 2
    keep_siblings(ledger, "a", 0, version=1)
    keep_siblings(ledger, "a", 1, version=2)
    ledger.end_lease("a", DropReason.RELEASED)
    assert grant(ledger, "b").kept_siblings == (1,)
    lengths = ledger.entries.responses.frozen()
    assert lengths.dropped[DropReason.RELEASED] == LengthHistogram.of([5])


def test_a_lease_that_its_holder_gives_back_keeps_no_siblings():
    ledger = make_ledger()
    grant(ledger, "a")
    keep_siblings(ledger, "a", 0)
    ledger.release("a", DropReason.RELEASED)
    assert grant(ledger, "b").kept_siblings == ()
    assert ledger.entries.responses.frozen().dropped[DropReason.RELEASED].num_tokens == 5


def test_a_batch_waits_for_a_due_group_that_nobody_holds_and_an_asked_for_one_is_granted_first():
    ledger = make_ledger(groups_per_step=1, max_staleness=1)
    grant(ledger, "long")
    keep_siblings(ledger, "long", 0)
    fill(ledger, "b")
    assert train_one_step(ledger) == [1]
    ledger.end_lease("long", DropReason.EXPIRED)
    again = grant(ledger, "c")
    assert (again.prompt_index, again.kept_siblings) == (0, (0,))
    fill(ledger, "d", version=1)
    assert ledger.take(1, 1, 1) == ()
    assert [entry.lease_id for entry in ledger.awaited()] == ["c"]
    ledger.put("c", make_header(again), 0.0)
    assert [taken.prompt_index for taken in ledger.take(1, 1, 1)] == [0]


def test_the_leases_of_many_machines_that_ended_are_granted_in_order_at_little_cost():
    count = 1000
    ledger = make_ledger(groups_per_step=count)
    for number in range(count):
        grant(ledger, f"a/{number}")
        keep_siblings(ledger, f"a/{number}", 0)
    ledger.expire(20.0)
    calls: Counter[str] = Counter()
    sys.setprofile(lambda _, event, __: calls.update((event,)))
    prompts = [grant(ledger, f"b/{number}", 20.0).prompt_index for number in range(count)]
    sys.setprofile(None)
    assert calls["call"] < 100 * count, "no grant visits all the others"
    assert prompts == list(range(count))
    assert ledger.books().balanced


def test_a_lease_that_ended_and_is_asked_for_again_gets_its_own_prompt():
    ledger = make_ledger()
    for lease_id in "ab":
        grant(ledger, lease_id)
        keep_siblings(ledger, lease_id, 0)
    for lease_id in "ab":
        ledger.end_lease(lease_id, DropReason.EXPIRED)
    assert [grant(ledger, lease_id).prompt_index for lease_id in "bc"] == [1, 0]
    assert ledger.books().balanced


def test_an_ended_lease_that_is_asserted_for_another_prompt_is_lost():
    ledger = make_ledger()
    for lease_id in "ab":
        grant(ledger, lease_id)
    keep_siblings(ledger, "a", 0)
    ledger.end_lease("a", DropReason.EXPIRED)
    ledger.end_lease("b", DropReason.RELEASED)
    asserted = Lease(lease_id="a", prompt_index=1, min_policy_version=0)
    ledger.reassert(asserted, 0.0, 10.0)
    assert ledger.renew(["a"], 0.0, 10.0) == ("a",)
    assert [grant(ledger, lease_id).prompt_index for lease_id in "cd"] == [0, 1]
    assert ledger.books().balanced
