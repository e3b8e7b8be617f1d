"""The books that a learner restores a buffer from: in them its last step is trained."""

from copy import deepcopy

import pytest

from buffers.ledger.ledger import Ledger
from learners.session import books_with
from streamrl.types import Books, DropReason, Lease, ranges_of, replace
from tests.records import make_header


def test_books_with_a_step_that_the_buffer_did_not_record():
    books = Books(granted=6, leased=2, buffered=2, trained=2, next_prompt_index=6, revision=9)
    books = books_with(
        Books(**{**_fields(books), "open_ranges": ranges_of((1, 3, 4, 5))}), prompt_indices=[3, 7]
    )
    assert books.balanced
    assert books.open_prompt_indices == (1, 4, 5, 6)
    assert (books.next_prompt_index, books.trained, books.revision) == (8, 4, 10)


def _fields(books: Books) -> dict[str, object]:
    return {name: getattr(books, name) for name in books.__struct_fields__}


def test_a_blank_ledger_keeps_the_leases_asserted_and_grants_what_else_is_open():
    books = Books(
        granted=9,
        acknowledged=5,
        leased=4,
        next_prompt_index=9,
        revision=30,
        open_ranges=ranges_of((4, 5, 7, 8)),
    )
    ledger = Ledger(groups_per_step=2, max_staleness=3)
    for prompt_index in (5, 6, 10):
        asserted = Lease(
            lease_id=f"s/{prompt_index}", prompt_index=prompt_index, min_policy_version=2
        )
        ledger.reassert(asserted, 0.0, 10.0)
        ledger.reassert(asserted, 0.0, 10.0)
    ledger.attach(3, books_with(books, [4, 7]))
    assert ledger.books().balanced
    assert ledger.renew(["s/5", "s/6", "s/10"], 0.0, 10.0) == ("s/6",)
    granted = [ledger.lease(name, 0.0, 10.0) for name in "abcd"]
    assert [lease.prompt_index for lease in granted if lease] == [8, 9, 11, 12]


def test_a_lease_asserted_takes_its_own_prompt_of_those_that_are_free():
    ledger = Ledger(groups_per_step=3, max_staleness=0)
    ledger.attach(0)
    for lease_id in "abc":
        ledger.lease(lease_id, 0.0, 10.0)
    for lease_id in "abc":
        ledger.release(lease_id, DropReason.RELEASED)
    asserted = Lease(lease_id="s/2", prompt_index=1, min_policy_version=0)
    ledger.reassert(asserted, 0.0, 10.0)
    granted = [ledger.lease(lease_id, 0.0, 10.0) for lease_id in "de"]
    assert [lease.prompt_index for lease in granted if lease] == [0, 2]


def test_a_lease_asserted_on_a_prompt_that_another_one_holds_is_lost():
    ledger = Ledger(groups_per_step=1, max_staleness=0)
    ledger.attach(0)
    ledger.lease("s/1", 0.0, 10.0)
    for prompt_index in (0, 10**12):
        asserted = Lease(lease_id="s/2", prompt_index=prompt_index, min_policy_version=0)
        ledger.reassert(asserted, 0.0, 10.0)
    assert ledger.renew(["s/1", "s/2"], 0.0, 10.0) == ("s/2",)
    assert ledger.books().next_prompt_index == 1


def _put(ledger: Ledger, name: str, oldest_version: int) -> None:
    lease = ledger.lease(name, 0.0, 10.0)
    assert lease is not None
    ledger.put(name, make_header(lease, oldest_version), 0.0)


@pytest.mark.parametrize("has_attached", [False, True])
def test_a_diverged_copy_at_the_same_version_takes_the_learners_books(has_attached: bool):
    ledger = Ledger(groups_per_step=1, max_staleness=0)
    ledger.attach(0)
    for version in (0, 1):
        _put(ledger, f"s/{version}", version)
        ledger.take(1, version, 1)
        ledger.advance(version + 1, 1)
    checkpoint = ledger.books()
    ledger.acknowledge(2, 1)
    copy = deepcopy(ledger)
    if has_attached:
        copy.attach(2, checkpoint)
        copy.lease("lost", 0.0, 10.0)
        copy.release("lost", DropReason.FAILED)

    blank = Ledger(groups_per_step=1, max_staleness=0)
    blank.attach(2, checkpoint)
    _put(blank, "t/0", oldest_version=1)
    learners = blank.books()
    assert learners.dropped == {DropReason.STALE: 1}

    copy.attach(2, learners)
    books = copy.books()
    assert books.balanced
    assert books.dropped == {DropReason.STALE: 1}
    assert (books.next_prompt_index, books.open_prompt_indices) == (3, ())


def test_a_learner_that_attaches_again_frees_no_step_that_no_checkpoint_has():
    """As after a payload was lost: what it has trained since its last checkpoint is kept for the
    learner that goes on from there."""
    ledger = Ledger(groups_per_step=1, max_staleness=1)
    ledger.attach(0, Books(), "first")
    for version in (0, 1):
        _put(ledger, f"s/{version}", version)
        ledger.take(1, version, 1)
        ledger.advance(version + 1, 1)
        ledger.acknowledge(1, 1)
    _put(ledger, "s/2", 2)
    ledger.take(1, 2, 1)
    assert ledger.attach(2, ledger.books(), "first") == 2
    books = ledger.books()
    assert (books.acknowledged, books.trained, books.taken, books.buffered) == (1, 1, 0, 1)
    saved = deepcopy(ledger)
    saved.acknowledge(2, 2)
    assert saved.books().acknowledged == 2
    ledger.attach(1, replace(books, trained=0, leased=1, open_ranges=((1, 3),)), "second")
    assert [header.prompt_index for header in ledger.take(1, 1, 3)] == [1]
