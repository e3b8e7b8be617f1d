"""The audit finds every kind of fault, names it, and takes rewinds for what they are."""

import sqlite3
from argparse import Namespace
from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace

from buffers.audit import audit, compare, findings
from buffers.journal.journal import events_of
from buffers.journal.sqlite import journal_path
from buffers.ledger.entries import Event, LedgerSnapshot
from streamrl.cli.buffer.audit import main
from streamrl.types import DropReason, LengthHistogram
from tests.unit.test_journal import fill, open_journal


def events(*paths: str) -> list[Event]:
    """From "prompt lease letters", these as in a journal; a lease "-" is a learner's books."""
    made: list[Event] = []
    for path in paths:
        prompt_index, lease, letters = path.split()
        made += events_of(int(prompt_index), lease.strip("-"), letters, None)
    return made


def test_a_run_in_order_adds_up():
    found = audit(
        events("0 a LBTRA", "1 b Le", "1 c LBTR", "2 d LBs", "3 e LBT", "4 f L", "5 g Le")
    )
    assert found.faults == ()
    assert found.granted == 7
    assert found.ended == {"acknowledged": 1, "expired": 2, "stale": 1}
    assert found.waiting == {"trained": 1, "taken": 1, "leased": 1}
    assert found.num_free == 1


def test_prompts_that_were_leased_again_and_again_are_listed_also_once_they_are_trained():
    found = audit(events("0 a Le", "0 b Le", "0 c Le", "0 d LBTRA", "1 e Le", "1 f Ls", "0 - o"))
    assert found.faults == ()
    assert found.retried == {0: 3, 1: 1}
    assert list(findings(found))[-1] == "  prompt 0: 3 leases ended without a group"


@pytest.mark.parametrize(
    "history",
    [
        ("0 a LBTRBTRA",),
        ("0 a LBTBTRA",),
        ("0 a LBTRA", "0 - o", "0 b LBTRA"),
        ("0 a LBs", "0 - o", "0 b L"),
        ("0 a LBK",),
        ("0 - K", "1 - o", "1 b LBTRA"),
    ],
)
def test_rewinds_and_books_are_in_order(history):
    assert audit(events(*history)).faults == ()


@pytest.mark.parametrize(
    ("history", "sentence"),
    [
        (
            ("0 a LBTRA", "0 b L"),
            "lease b was granted after it had been acknowledged: trained twice",
        ),
        (("0 a LBs", "0 b L"), "lease b was granted after it had been dropped for good"),
        (("0 a LB", "0 b L"), "lease b was granted while lease a was buffered"),
        (("0 a LBTRTRA",), "lease a went from trained to taken"),
        (("0 a LBTRAA",), "lease a went from acknowledged to acknowledged"),
        (("0 a LBTRRA",), "lease a went from trained to trained"),
        (("0 a LT",), "lease a went from leased to taken"),
        (("0 a LBA",), "lease a went from buffered to acknowledged"),
        (("0 a LBTA",), "lease a went from taken to acknowledged"),
        (("0 a LeB",), "lease a went from dropped to buffered"),
        (("0 a B",), "lease a is buffered, but was not granted"),
        (("0 a L", "0 - o"), "ended by a learner's books while lease a was leased"),
        (("0 a L", "2 b L"), "prompt 1: was never granted, 2 was"),
        (("0 a LB", "0 b LBTRA"), "2 leases were granted, but 1 are accounted for"),
    ],
)
def test_a_fault_is_named(history, sentence):
    assert sentence in "\n".join(audit(events(*history)).faults)


def test_a_drop_without_a_reason_is_a_fault():
    history = [*events("0 a L"), Event(0, "dropped", None, "a")]
    assert "dropped with the reason None" in audit(history).faults[0]


def test_a_ledger_that_disagrees_with_its_events_is_named():
    found = audit(events("0 a LBTRA", "1 b L"))
    assert list(compare(found, LedgerSnapshot(granted=2, acknowledged=1))) == []
    assert list(compare(found, LedgerSnapshot(granted=3, acknowledged=2))) == [
        "the ledger has 3 leases granted, the events 2",
        "the ledger has 2 acknowledged, the events 1",
    ]
    assert list(compare(found, LedgerSnapshot(granted=9, acknowledged=5, unseen=7))) == []


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (
            "UPDATE entry SET places = NULL WHERE prompt_index = 1",
            "prompt 1: the payload of lease b is missing",
        ),
        ("DELETE FROM entry WHERE prompt_index = 0", "prompt 0: is None in the journal"),
        ("UPDATE entry SET state = 'taken'", "('a', 'taken') in the journal, but the events say"),
        ("DELETE FROM events WHERE prompt_index = 0", "prompt 0: was never granted, 1 was"),
        ("UPDATE events SET states = 'LBTBTR' WHERE prompt_index = 1", "say ('b', 'trained')"),
    ],
)
def test_a_damaged_journal_fails_the_audit(tmp_path: Path, capsys, damage: str, sentence: str):
    state, journal = open_journal(tmp_path)
    state.attach(0, None)
    fill(state, "a", "b")
    journal.commit()
    journal.close()
    assert main(Namespace(folder=tmp_path)) == 0
    assert capsys.readouterr().out.endswith("in order\n")
    with closing(sqlite3.connect(journal_path(tmp_path))) as db:
        db.execute(damage)
        db.commit()
    assert main(Namespace(folder=tmp_path)) == 1
    assert sentence in capsys.readouterr().out


def with_lengths(history: list[Event], *lengths: int) -> list[Event]:
    """The first event after the lease is the put."""
    return [history[0], replace(history[1], response_lengths=lengths), *history[2:]]


def test_the_lengths_by_outcome_are_summed_from_the_events():
    found = audit(
        [
            *with_lengths(events("0 a LBTRA"), 1, 100),
            *with_lengths(events("1 b LBTR"), 3),
            *with_lengths(events("2 c LBTRB"), 20),
            *with_lengths(events("3 d LBs"), 1000),
            *with_lengths(events("4 e Ls"), 2000),
            *with_lengths(events("5 f LBK"), 7),
            *events("6 g Le", "7 h L"),
        ]
    )
    assert found.faults == ()
    lengths = found.lengths
    assert lengths.sampled == LengthHistogram.of([1, 100, 3, 20, 1000, 2000, 7])
    assert lengths.trained == LengthHistogram.of([1, 100, 3, 7])
    assert lengths.dropped == {DropReason.STALE: LengthHistogram.of([1000, 2000])}
    assert list(findings(found))[-3:] == [
        "7 responses sampled: 447.3 tokens in the mean, 99th percentile 2000, longest 2000",
        "  4 trained: 27.8 tokens in the mean, 99th percentile 100, longest 100; "
        "distance from sampled 0.321",
        "  2 dropped (stale): 1500.0 tokens in the mean, 99th percentile 2000, longest 2000; "
        "95.8 % of the sampled tokens",
    ]


def test_a_ledger_that_counts_other_lengths_is_named():
    found = audit(with_lengths(events("0 a LBTRA"), 40, 50))
    lengths = found.lengths.rounded()
    totals = LedgerSnapshot(granted=1, acknowledged=1, lengths=lengths)
    assert list(compare(found, totals)) == []
    other = replace(totals, lengths=replace(lengths, trained=LengthHistogram()))
    assert list(compare(found, other)) == [
        "the ledger has 0 trained responses with 0 tokens, the events 2 with 90"
    ]
