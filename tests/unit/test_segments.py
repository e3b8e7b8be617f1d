"""The payloads of a journal: killed at every write, damaged, on a full disk, and gone again."""

import errno
import gc
import os
import shutil
import signal
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from buffers.audit import audit_journal
from buffers.journal import payload_segments as segments, sqlite as sqlite_module
from buffers.journal.journal import Journal, read_rows
from buffers.journal.sqlite import SqliteStorage, journal_path
from buffers.ledger.entries import State
from buffers.ledger.state import BufferState
from streamrl.errors import LostMemoryError, StorageError
from streamrl.types import Books, DropReason
from tests.unit.test_journal import (
    MEMORY,
    close_in_order,
    come_back,
    commit_and_recover,
    dump,
    header,
    make_state,
    open_journal,
)

SIZE = 5_000


def segments_of(run: Path) -> list[Path]:
    return sorted(journal_path(run).with_name("payloads").glob("*"))


def put_large(state: BufferState[bytes], *lease_ids: str) -> None:
    for lease_id in lease_ids:
        (lease,) = state.lease([lease_id], "g", 0.0)
        payload = lease_id.encode() * (SIZE // len(lease_id))
        state.put(lease_id, header(lease, state.ledger.version), payload, 0.0)


def work(state: BufferState[bytes], commit: Callable[[], None], num_steps: int = 2) -> None:
    """Two groups a step come and go, and two wait; with a commit after each call."""
    state.attach(0, None)
    commit()
    put_large(state, "a", "b")
    commit()
    for version in range(num_steps):
        put_large(state, f"{version}/c", f"{version}/d")
        commit()
        state.take(2, version, 1, 0.0)
        commit()
        state.ledger.advance(version + 1, 1)
        commit()
        state.ledger.acknowledge(version + 1, 1)
        commit()


# Kills.


class Killer:
    """Kills this process at the call of that number that changes the disk; before, in, or after."""

    def __init__(self, number: int) -> None:
        self._countdown = number

    def _may_kill(self) -> None:
        self._countdown -= 1
        if not self._countdown:
            os.kill(os.getpid(), signal.SIGKILL)

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._may_kill()
        result = function(*args, **kwargs)
        self._may_kill()
        return result

    def write(self, file: int, data: memoryview, position: int) -> int:
        self._may_kill()
        num_written = pwrite(file, data[: SIZE // 2], position)
        self._may_kill()
        return num_written

    @contextmanager
    def transaction(self, db: sqlite3.Connection, path: Path) -> Iterator[None]:
        with transaction(db, path):
            self._may_kill()
            yield
            self._may_kill()
        self._may_kill()


pwrite, transaction = os.pwrite, sqlite_module._transaction


def work_and_be_killed(run: Path, number: int, committed: int) -> None:
    """In a process of its own; a byte to the descriptor `committed` follows each commit."""
    killer = Killer(number)
    segments.SEGMENT_BYTES = 2 * SIZE
    for name in ("open", "fdatasync", "ftruncate"):
        setattr(os, name, partial(killer.call, getattr(os, name)))
    os.pwrite = killer.write
    unlink = Path.unlink
    Path.unlink = lambda path, **kwargs: killer.call(unlink, path, **kwargs)
    sqlite_module._transaction = killer.transaction
    state = make_state()
    journal = Journal(SqliteStorage(journal_path(run), durability="machine"), state)
    journal.recover({"learner.groups_per_step": 2, "run.name": "a"}, 0.0)

    def commit() -> None:
        journal.commit()
        os.write(committed, b".")

    work(state, commit)


def fork(run: Path, number: int) -> tuple[int, bool]:
    """The commits that a killed process was told of, and whether it was killed at all."""
    told, committed = os.pipe()
    child = os.fork()
    if not child:
        try:
            work_and_be_killed(run, number, committed)
        finally:
            os._exit(0)
    os.close(committed)
    with open(told, "rb") as file:
        num_commits = len(file.read())
    return num_commits, os.WIFSIGNALED(os.waitpid(child, 0)[1])


def test_killed_at_any_write_it_holds_what_was_committed():
    # What the disk does with a sync is not what this tests.
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        _kill_at_any_write(Path(folder))


def _kill_at_any_write(folder: Path) -> None:
    states: list[dict[str, Any]] = [dump(make_state())]
    reference = make_state()
    work(reference, lambda: states.append(dump(reference)))
    number, was_killed = 0, True
    while was_killed:
        number += 1
        run = folder / str(number)
        num_commits, was_killed = fork(run, number)
        recovered, journal = open_journal(run)
        assert dump(recovered) in states[num_commits : num_commits + 2]
        named = {place.segment for place in places(run)}
        assert {int(path.stem) for path in segments_of(run)} == named
        close_in_order(run, journal)
    assert num_commits == len(states) - 1
    assert number > 40


def places(run: Path) -> list[segments.PayloadPlace]:
    with closing(sqlite3.connect(journal_path(run))) as db:
        rows = db.execute("SELECT * FROM entry")
        return list(read_rows(rows, segments.PayloadPlace).places.values())


def test_a_payload_reaches_the_disk_before_the_row_that_names_it(tmp_path, monkeypatch):
    calls: list[str] = []

    def recorded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: (calls.append(name), function(*args))[1]

    for name in ("pwrite", "fdatasync", "fsync"):
        monkeypatch.setattr(os, name, recorded(name, getattr(os, name)))
    monkeypatch.setattr(sqlite_module, "_transaction", recorded("transaction", transaction))
    state = make_state()
    journal = Journal(SqliteStorage(journal_path(tmp_path), durability="machine"), state)
    journal.recover({}, 0.0)
    state.attach(0, None)
    put_large(state, "a", "b")
    calls.clear()
    journal.commit()
    # The names of the file and of its folder, both payloads, and then their rows.
    assert calls == ["fsync", "fsync", "pwrite", "pwrite", "fdatasync", "transaction"]
    journal.close()


# Damage.


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-SIZE // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [truncate, flip])
def test_a_damaged_group_is_sampled_again_and_the_others_are_kept(tmp_path, caplog, damage):
    state, journal = open_journal(tmp_path)
    state.attach(0, Books())
    put_large(state, "a", "b", "c")
    journal.commit()
    journal.close()
    damage(segments_of(tmp_path)[0])
    state, journal = open_journal(tmp_path)
    assert "to be sampled again: the groups of the prompts [2]" in caplog.text
    books = state.ledger.books()
    assert (books.buffered, books.dropped) == (2, {DropReason.ORPHANED: 1})
    assert books.balanced
    assert state.fetch([0, 1]) == (b"a" * SIZE, b"b" * SIZE)
    (again,) = state.lease(["again"], "g", 0.0)
    assert again.prompt_index == 2
    close_in_order(tmp_path, journal)


def test_a_missing_segment_costs_its_groups_wherever_they_are(tmp_path):
    """Buffered ones at once; those that a learner has taken or trained, when it attaches again."""
    state, journal = open_journal(tmp_path, max_staleness=3)
    state.attach(0, Books())
    put_large(state, *"abcdef")
    for version in (0, 1):
        state.take(2, version, 1, 0.0)
    state.ledger.advance(1, 1)
    journal.commit()
    journal.close()
    segments_of(tmp_path)[0].unlink()
    state, journal = open_journal(tmp_path, max_staleness=3)
    states = [entry.state for index in range(6) if (entry := state.ledger.entries.get(index))]
    assert states == [State.TRAINED, State.TRAINED, State.TAKEN, State.TAKEN]
    with pytest.raises(LostMemoryError, match=r"lost the groups of the prompts \[2, 3\]"):
        state.fetch([2, 3])
    journal.commit()
    state, journal = come_back(tmp_path, journal, max_staleness=3)
    # A learner that has made the step keeps what it trained; one that has not samples it again.
    state.attach(1, None)
    books = state.ledger.books()
    assert (books.acknowledged, books.buffered, books.dropped) == (2, 0, {DropReason.ORPHANED: 4})
    leases = state.lease([f"again/{number}" for number in range(4)], "g", 0.0)
    assert [lease.prompt_index for lease in leases] == [2, 3, 4, 5]
    journal.commit()
    close_in_order(tmp_path, journal)


def test_a_lost_group_that_is_trained_all_the_same_is_known_to_be_lost(tmp_path):
    state, journal = open_journal(tmp_path)
    state.attach(0, Books())
    put_large(state, "a", "b")
    state.take(2, 0, 1, 0.0)
    journal.commit()
    journal.close()
    segments_of(tmp_path)[0].unlink()
    state, journal = open_journal(tmp_path)
    state.ledger.advance(1, 1)
    journal.commit()
    close_in_order(tmp_path, journal)


def test_a_segment_that_no_row_names_is_deleted(tmp_path):
    state, journal = open_journal(tmp_path)
    state.attach(0, None)
    put_large(state, "a")
    journal.commit()
    journal.close()
    kept = segments_of(tmp_path)
    shutil.copy(kept[0], own := kept[0].with_name(f"{kept[0].stem} (copy).segment"))
    kept[0].with_name("00000007.segment").write_bytes(b"of a commit that never came")
    with kept[0].open("ab") as file:
        file.write(b"a torn end")
    state, journal = open_journal(tmp_path)
    assert segments_of(tmp_path) == [own, *kept], "a person's copy stays"
    assert state.fetch([0]) == (b"a" * SIZE,)
    put_large(state, "b")
    journal.commit()
    assert [path.name for path in segments_of(tmp_path)][2:] == ["00000008.segment"]
    journal.close()


def test_a_segment_that_was_emptied_is_written_no_more(tmp_path):
    state, journal = open_journal(tmp_path, groups_per_step=1)
    state.attach(0, None)
    put_large(state, "a")
    journal.commit()
    state.take(1, 0, 1, 0.0)
    state.ledger.advance(1, 1)
    state.ledger.acknowledge(1, 1)
    journal.commit()
    assert segments_of(tmp_path) == []
    put_large(state, "b")
    journal.commit()
    state, journal = come_back(tmp_path, journal, groups_per_step=1)
    assert state.fetch([1]) == (b"b" * SIZE,)
    journal.close()


def test_a_segment_that_cannot_be_read_now_is_no_loss(tmp_path, monkeypatch):
    state, journal = open_journal(tmp_path)
    state.attach(0, None)
    put_large(state, "a")
    journal.commit()
    before = dump(state)
    journal.close()
    monkeypatch.setattr(os, "pread", failing_read)
    blank = make_state()
    journal = Journal(SqliteStorage(journal_path(tmp_path), durability="process"), blank)
    with pytest.raises(StorageError, match=r"00000001\.segment cannot be read: .*Input/output"):
        journal.recover({"learner.groups_per_step": 2, "run.name": "a"}, 0.0)
    journal.close()
    assert dump(blank) == dump(make_state())
    monkeypatch.undo()
    state, journal = open_journal(tmp_path)
    assert dump(state) == before
    journal.close()


def failing_read(*_: int) -> bytes:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


# Space.


def test_what_a_full_disk_cut_off_is_written_when_there_is_space(tmp_path, monkeypatch):
    state, journal = open_journal(tmp_path)
    state.attach(0, None)
    put_large(state, "a")
    journal.commit()
    committed = dump(state)
    num_bytes = [path.stat().st_size for path in segments_of(tmp_path)]
    put_large(state, "b", "c")
    fill_disk(monkeypatch, tmp_path, 2 * SIZE + 100)
    for _ in range(2):
        with pytest.raises(StorageError, match=r"cannot be written: .*No space left"):
            journal.commit()
        # What was written in vain is free again.
        assert [path.stat().st_size for path in segments_of(tmp_path)] == num_bytes
    monkeypatch.undo()
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "buffer", copy / "buffer")
    killed, other = open_journal(copy)
    assert dump(killed) == committed
    other.close()
    commit_and_recover(tmp_path, state, journal)


def test_what_was_written_for_a_transaction_that_failed_is_free_again(tmp_path, monkeypatch):
    state, journal = open_journal(tmp_path)
    state.attach(0, None)
    put_large(state, "a")
    journal.commit()
    num_bytes = [path.stat().st_size for path in segments_of(tmp_path)]

    @contextmanager
    def failing_transaction(*_: object) -> Iterator[None]:
        raise StorageError("no space is left")
        yield

    monkeypatch.setattr(sqlite_module, "_transaction", failing_transaction)
    put_large(state, "b")
    with pytest.raises(StorageError):
        journal.commit()
    assert [path.stat().st_size for path in segments_of(tmp_path)] == num_bytes
    monkeypatch.undo()
    commit_and_recover(tmp_path, state, journal)


def test_a_segment_whose_name_cannot_be_synced_is_closed_and_deleted(tmp_path, monkeypatch):
    state = make_state()
    journal = Journal(SqliteStorage(journal_path(tmp_path), durability="machine"), state)
    journal.recover({}, 0.0)
    state.attach(0, None)
    put_large(state, "a")
    monkeypatch.setattr(segments, "sync", failing_read)
    gc.collect()  # What other tests left open would be closed below.
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        with pytest.raises(StorageError, match="cannot be written"):
            journal.commit()
    assert (segments_of(tmp_path), os.listdir("/proc/self/fd")) == ([], before)
    journal.close()


def fill_disk(monkeypatch: pytest.MonkeyPatch, run: Path, num_bytes: int) -> None:
    """The segments of this run have so many bytes together."""

    def write_what_fits(file: int, data: memoryview, position: int) -> int:
        left = num_bytes - sum(path.stat().st_size for path in segments_of(run))
        if left <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(file, data[:left], position)

    monkeypatch.setattr(os, "pwrite", write_what_fits)


def train_and_fill_disk(
    monkeypatch: pytest.MonkeyPatch, run: Path
) -> tuple[BufferState[bytes], Journal]:
    """Two groups are trained; for a third there is no space."""
    state, journal = open_journal(run)
    state.attach(0, None)
    put_large(state, "a", "b")
    state.take(2, 0, 1, 0.0)
    state.ledger.advance(1, 1)
    journal.commit()
    fill_disk(monkeypatch, run, 2 * SIZE + 100)
    put_large(state, "c")
    with pytest.raises(StorageError, match="No space left"):
        journal.commit()
    return state, journal


def test_on_a_full_disk_what_is_acknowledged_makes_room_for_what_waits(tmp_path, monkeypatch):
    state, journal = train_and_fill_disk(monkeypatch, tmp_path)
    state.ledger.acknowledge(1, 1)
    commit_and_recover(tmp_path, state, journal)
    assert sum(path.stat().st_size for path in segments_of(tmp_path)) == SIZE


def test_a_disk_that_is_still_full_has_freed_what_is_acknowledged(tmp_path, monkeypatch):
    state, journal = train_and_fill_disk(monkeypatch, tmp_path)
    state.ledger.acknowledge(1, 1)
    fill_disk(monkeypatch, tmp_path, 0)
    for _ in range(2):
        with pytest.raises(StorageError, match="No space left"):
            journal.commit()
        assert segments_of(tmp_path) == []
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "buffer", copy / "buffer")
    killed, other = open_journal(copy)
    books = killed.ledger.books()
    assert (books.acknowledged, books.dropped) == (2, {DropReason.ORPHANED: 1})
    other.close()
    assert audit_journal(journal_path(copy)).faults == ()
    monkeypatch.undo()
    commit_and_recover(tmp_path, state, journal)


def test_on_a_full_disk_a_freed_payload_is_not_taken_for_the_next_one(tmp_path, monkeypatch):
    """A prompt that a learner which went back has opened again, filled in the same commit."""
    state, journal = open_journal(tmp_path)
    state.attach(0, Books())
    start = state.ledger.books()
    put_large(state, "a", "b")
    state.take(2, 0, 1, 0.0)
    state.ledger.advance(1, 1)
    journal.commit()
    state.ledger.acknowledge(1, 1)
    state.attach(0, start)
    put_large(state, "c")
    fill_disk(monkeypatch, tmp_path, 0)
    with pytest.raises(StorageError, match="No space left"):
        journal.commit()
    recovered, journal = come_back(tmp_path, journal)
    assert recovered.ledger.books().buffered == 0
    assert recovered.ledger.books().dropped[DropReason.ORPHANED] >= 1
    close_in_order(tmp_path, journal)


def test_the_files_follow_what_waits(tmp_path, monkeypatch):
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 10 * SIZE)
    state, journal = open_journal(tmp_path, max_staleness=9)
    sizes = []

    def measured() -> None:
        journal.commit()
        sizes.append(sum(path.stat().st_size for path in segments_of(tmp_path)))
        # What waits, the rest of its first segment, and the segment that is written.
        assert sizes[-1] <= state.stats(0.0).num_bytes / 5 * SIZE + 20 * SIZE

    state.attach(0, None)
    put_large(state, *(f"w{number}" for number in range(10)))
    work_on = [f"{version}" for version in range(40)]
    for version, name in enumerate(work_on):
        put_large(state, f"{name}/c", f"{name}/d")
        measured()
        state.take(2, version, 1, 0.0)
        state.ledger.advance(version + 1, 1)
        state.ledger.acknowledge(version + 1, 1)
        measured()
    assert max(sizes) > 10 * SIZE
    for version in range(40, 45):
        state.take(2, version, 1, 0.0)
        state.ledger.advance(version + 1, 1)
        state.ledger.acknowledge(version + 1, 1)
        measured()
    assert state.stats(0.0).num_bytes == 0
    assert sizes[-1] == 0
    journal.close()
