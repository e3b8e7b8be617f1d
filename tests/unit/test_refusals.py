"""What a buffer does about those who send what it refuses, on clocks of the test's own."""

import asyncio

import msgspec
import pytest

from buffers.ledger.ledger import Ledger
from buffers.ledger.state import MAX_REOPENED, require_proportion
from buffers.messages import ErrorReply
from buffers.quarantine import BURST, EVERY_S, EventLimit, Quarantine
from buffers.zmq import client, server
from buffers.zmq.server import IGNORED_S, MAX_MALFORMED, WINDOW_S, Peers, RefusalBudget
from streamrl import wire
from streamrl.errors import (
    CorruptMessageError,
    LedgerError,
    StorageError,
    TransportError,
    WireError,
)
from streamrl.types import Books, DropReason, GeneratorStatus, OverduePolicy, PackedGroup

ERROR = CorruptMessageError("damaged")


class Sender:
    """A frame as ROUTER prepends it."""

    def __init__(self, routing_id: bytes) -> None:
        self.bytes = routing_id

    def get(self, name: str) -> str:
        return "127.0.0.1"


def flood(known: Peers, peer: bytes, count: int, now_s: float) -> None:
    for _ in range(count):
        known.note_malformed(Sender(peer), ERROR, now_s)  # type: ignore[arg-type]


def test_a_connection_is_ignored_for_a_while_and_then_read_again():
    known = Peers()
    flood(known, b"a", MAX_MALFORMED - 1, 0.0)
    assert not known.ignores(b"a", 0.0)
    flood(known, b"a", 1, 1.0)
    assert known.ignores(b"a", 1.0 + IGNORED_S - 0.1)
    assert not known.ignores(b"b", 1.0)
    assert not known.ignores(b"a", 1.0 + IGNORED_S)
    flood(known, b"a", 1, 1.0 + IGNORED_S)
    assert not known.ignores(b"a", 1.0 + IGNORED_S)
    assert known.take_num_ignored(50.0) == 1
    assert known.take_num_ignored(50.5) == 0


def test_a_malformed_message_now_and_then_is_forgiven():
    known = Peers()
    for turn in range(5 * MAX_MALFORMED):
        flood(known, b"a", 1, turn * 2 * WINDOW_S / MAX_MALFORMED)
        assert not known.ignores(b"a", turn * 2 * WINDOW_S / MAX_MALFORMED)


def test_connections_without_number_are_not_remembered(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server, "MAX_PEERS", 3)
    known = Peers()
    for name in (b"a", b"b", b"c", b"d"):
        flood(known, name, MAX_MALFORMED, 0.0)
    ignored = [known.ignores(name, 0.0) for name in (b"a", b"b", b"c", b"d")]
    assert ignored == [False, True, True, True]


def test_a_turn_ends_after_many_refusals_or_large_ones():
    budget = RefusalBudget()
    for _ in range(server.MAX_REFUSED):
        assert not budget.is_spent
        budget.add(10)
    assert budget.is_spent
    budget.start()
    assert not budget.is_spent
    budget.add(server.MAX_REFUSED_BYTES)
    assert budget.is_spent


def test_a_sampler_admits_a_burst_and_then_one_at_a_time():
    sampler = EventLimit(burst=3, every_s=10.0)
    assert [sampler.admits(0.0) for _ in range(5)] == [True, True, True, False, False]
    assert "2 more" in sampler.take_omitted()
    assert [sampler.admits(10.0) for _ in range(2)] == [True, False]
    assert [sampler.admits(1000.0) for _ in range(4)] == [True, True, True, False]


def test_of_a_flood_the_quarantine_keeps_a_sample(tmp_path):
    now_s = [0.0]
    quarantine = Quarantine(tmp_path, clock=lambda: now_s[0])
    for _ in range(10_000):
        quarantine.keep("request", [b"ab", b"c"], ERROR)
    assert len(list(tmp_path.iterdir())) == BURST
    now_s[0] = EVERY_S
    for _ in range(10_000):
        quarantine.keep("request", [b"ab", b"c"], ERROR)
    kept = sorted(tmp_path.iterdir())
    assert [path.read_bytes() for path in kept] == [b"abc"] * (BURST + 1)


def test_the_quarantine_is_bounded_and_counts_the_files_of_an_earlier_process(tmp_path):
    folder = tmp_path / "q"
    for number in range(6):
        quarantine = Quarantine(folder, max_files=3, max_bytes=25)
        quarantine.keep("../a", [bytes([number]) * 5], ERROR)
    assert [path.read_bytes()[0] for path in sorted(folder.iterdir())] == [3, 4, 5]
    quarantine.keep("b", [bytes(18)], ERROR)
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 25
    (tmp_path / "file").write_text("")
    Quarantine(tmp_path / "file").keep("c", [b""], CorruptMessageError("not kept, no crash"))


@pytest.mark.parametrize("depth", [1_100, 100_000])
@pytest.mark.parametrize("head", [b"\x91", b"\x81\xa1a", b"\x82\xa4type\xa5stats\xa1x\x91"])
@pytest.mark.parametrize("is_enveloped", [True, False])
def test_nested_bytes_are_a_wire_error(head, depth, is_enveloped):
    data = bytes([0x93, wire.SCHEMA_VERSION, 0]) + head * depth + b"\xc0"
    for kind in (Books, PackedGroup, GeneratorStatus):
        with pytest.raises(WireError):
            wire.decode(data if is_enveloped else head * depth, kind)


def test_every_number_of_a_books_record_has_a_range():
    for field in msgspec.structs.fields(Books):
        if field.name in ("dropped", "open_ranges"):
            continue
        for value in (-1, 2**53, 2**64 - 1):
            with pytest.raises(CorruptMessageError, match=field.name):
                wire.decode(wire.encode({field.name: value}), Books)


@pytest.mark.parametrize(
    ("books", "match"),
    [
        (Books(granted=2), "do not close"),
        (Books(open_ranges=((0, 2),), next_prompt_index=1), "open_ranges"),
        (Books(open_ranges=((2, 1),), next_prompt_index=5), "open_ranges"),
        (Books(open_ranges=((0, 1), (1, 2)), next_prompt_index=5), "open_ranges"),
        (Books(revision=2**50), "revision"),
        (Books(learner_term=2**50), "learner_term"),
        (Books(open_ranges=((0, MAX_REOPENED + 1),), next_prompt_index=2**30), "granted again"),
    ],
)  # fmt: skip
def test_books_out_of_proportion_are_refused_and_change_nothing(books, match):
    ledger = Ledger(groups_per_step=2, max_staleness=1, overdue=OverduePolicy.WAIT)
    before = ledger.snapshot()
    with pytest.raises(LedgerError, match=match):
        require_proportion(books, ledger.books())
    assert ledger.snapshot() == before


def test_books_that_close_are_in_proportion():
    ledger = Ledger(groups_per_step=2, max_staleness=1)
    ledger.attach(0)
    for name in ("a", "b", "c"):
        ledger.lease(name, 0.0, 10.0)
    ledger.release("b", DropReason.FAILED)
    require_proportion(ledger.books(), Ledger(groups_per_step=2, max_staleness=1).books())


async def test_while_the_disk_stays_full_a_group_is_sent_again_less_and_less_often(monkeypatch):
    now_s = [0.0]

    async def pass_time(pause_s: float) -> None:
        now_s[0] += pause_s

    monkeypatch.setattr(asyncio, "sleep", pass_time)
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now_s[0])
    buffer = client.ZmqBuffer("", deadline_s=60.0)
    refusal = memoryview(wire.encode(ErrorReply.of(StorageError("the disk is full"))))
    sent = []

    async def refused(frames: list[bytes], _: float) -> list[memoryview]:
        sent.append(frames)
        return [refusal]

    monkeypatch.setattr(buffer, "_send_and_wait", refused)
    with pytest.raises(StorageError, match="the disk is full"):
        await buffer.drain()
    assert 5 < len(sent) < 40, "each half second it would be a hundred times"


async def test_attempts_that_all_end_late_end_the_call_nevertheless(monkeypatch):
    """As on a machine whose cores do other things."""
    monkeypatch.setattr(client, "STOPPED_S", 0.01)
    buffer = client.ZmqBuffer("", deadline_s=0.1)

    async def late(_: list[bytes], timeout_s: float) -> None:
        await asyncio.sleep(timeout_s + 0.05)

    monkeypatch.setattr(buffer, "_send_and_wait", late)
    with pytest.raises(TransportError, match="has not answered"):
        async with asyncio.timeout(120):
            await buffer.drain()
