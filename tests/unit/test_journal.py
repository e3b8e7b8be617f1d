"""What the journal recovers is what was committed, after any call; its events pass the audit."""

import errno
import fcntl
import os
import shutil
import sqlite3
import tempfile
from argparse import Namespace
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from buffers.audit import audit_journal
from buffers.journal.journal import Journal, read_rows
from buffers.journal.payload_segments import PayloadPlace
from buffers.journal.sqlite import SqliteStorage, journal_path, open_to_read, read_snapshot
from buffers.ledger.ledger import Ledger
from buffers.ledger.state import BufferState
from streamrl.cli.buffer.audit import main as run_audit
from streamrl.errors import ConfigError, LedgerError, OtherReleaseError, StorageError
from streamrl.types import (
    Books,
    DropReason,
    GroupHeader,
    Lease,
    SchedulingState,
)
from tests.records import make_header, make_sibling, make_status

TTL_S = 10.0
# The machine syncs a file with every call; what that survives is not what it tests.
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None


def make_state(**bounds: int) -> BufferState[bytes]:
    ledger = Ledger(**{"groups_per_step": 2, "max_staleness": 1, **bounds})
    return BufferState[bytes](ledger, lease_ttl_s=TTL_S)


def open_journal(
    run: Path, now_s: float = 0.0, **bounds: int
) -> tuple[BufferState[bytes], Journal]:
    state = make_state(**bounds)
    journal = Journal(SqliteStorage(journal_path(run), durability="process"), state)
    told = {"learner.groups_per_step": state.ledger.groups_per_step, "run.name": "a"}
    journal.recover(told, now_s)
    return state, journal


def come_back(
    run: Path, journal: Journal, now_s: float = 0.0, **bounds: int
) -> tuple[BufferState[bytes], Journal]:
    """What it is after the process died: what was not committed is lost."""
    journal.close()
    return open_journal(run, now_s, **bounds)


def close_in_order(run: Path, journal: Journal) -> None:
    journal.close()
    assert audit_journal(journal_path(run)).faults == ()


def header(lease: Lease, version: int) -> GroupHeader:
    lengths = (lease.prompt_index, 20)
    return make_header(lease, version, response_lengths=lengths, num_bytes=5)


def put(state: BufferState[bytes], lease: Lease, version: int, now_s: float = 0.0) -> None:
    state.put(lease.lease_id, header(lease, version), b"bytes of " + lease.lease_id.encode(), now_s)


def put_sibling(
    state: BufferState[bytes],
    lease: Lease,
    number: int,
    now_s: float,
    age: int = 0,
    num_tokens: int = 3,
) -> None:
    oldest = max(0, lease.min_policy_version - age)
    sibling = make_sibling(lease.lease_id, number, oldest_version=oldest, num_tokens=num_tokens)
    payload = f"sibling {number} of {lease.lease_id}"
    payload += f" with {num_tokens} tokens" * (num_tokens != 3)
    state.put_sibling(sibling, payload.encode(), now_s)


def fill(state: BufferState[bytes], *lease_ids: str, version: int = 0) -> None:
    for lease_id in lease_ids:
        (lease,) = state.lease([lease_id], "g", 0.0)
        put(state, lease, version)


def dump(state: BufferState[bytes], last_prompt_index: int = 200) -> dict[str, Any]:
    """Everything but the clock: leases get a new time to live."""
    entries = [e for s in range(last_prompt_index) if (e := state.ledger.entries.get(s))]
    held = [e.prompt_index for e in entries if e.header]
    return {
        "snapshot": state.ledger.snapshot(),
        "books": state.ledger.books(),
        "entries": [
            (e.prompt_index, e.lease_id, e.min_policy_version, e.state, e.header, e.version)
            for e in entries
        ],
        "payloads": state.fetch(held),
        "siblings": {
            (e.prompt_index, sibling): e.payloads[sibling.number][0]
            for e in entries
            for sibling in e.siblings
        },
        "oldest": state.ledger.oldest_version(),
        "bytes": state.stats(0.0).num_bytes,
        "scheduling_states": state.registry.scheduling_states,
    }


def commit_and_recover(run: Path, state: BufferState[bytes], journal: Journal) -> None:
    """What is recovered is what was committed."""
    journal.commit()
    before = dump(state)
    recovered, journal = come_back(run, journal)
    assert dump(recovered) == before
    close_in_order(run, journal)


class JournalMachine(RuleBasedStateMachine):
    """The process is killed after every call, and the run goes on with what comes back."""

    @initialize(groups_per_step=st.integers(1, 2), max_staleness=st.integers(0, 2))
    def start(self, groups_per_step: int, max_staleness: int) -> None:
        self.bounds = {"groups_per_step": groups_per_step, "max_staleness": max_staleness}
        self.folder = tempfile.TemporaryDirectory(dir=MEMORY)
        self.run_folder = Path(self.folder.name)
        self.state, self.journal = open_journal(self.run_folder, **self.bounds)
        self.now_s = 0.0
        self.is_full = False
        self.num_leases = 0
        self.held: list[Lease] = []
        self.state.attach(0, Books())
        self.checkpoint = (0, Books())
        self._die_and_come_back()

    @rule()
    def drain(self) -> None:
        self.state.ledger.draining = True
        self._die_and_come_back()

    @rule()
    def fill_disk(self) -> None:
        """There is no space for payloads at the next commit."""
        self.is_full = True

    def _die_and_come_back(self) -> None:
        if self.is_full:
            with pytest.MonkeyPatch.context() as patch, suppress(StorageError):
                patch.setattr(os, "pwrite", failing_write)
                self.journal.commit()
            self.is_full = False
        self.journal.commit()
        before = dump(self.state)
        self.state, self.journal = come_back(
            self.run_folder, self.journal, self.now_s, **self.bounds
        )
        assert dump(self.state) == before
        live = set(self.state.ledger.live_leases())
        self.held = [lease for lease in self.held if lease.lease_id in live]

    @rule(count=st.integers(1, 4))
    def lease(self, count: int) -> None:
        names = [f"lease {self.num_leases + number}" for number in range(count)]
        self.num_leases += count
        self.held += self.state.lease(names, "steady", self.now_s)
        self._die_and_come_back()

    @rule(count=st.integers(1, 4), age=st.integers(0, 3))
    def put(self, count: int, age: int) -> None:
        for lease in self.held[:count]:
            put(self.state, lease, max(0, self.state.ledger.version - age), self.now_s)
        self._die_and_come_back()

    @rule(count=st.integers(1, 4), number=st.integers(0, 2), num_tokens=st.integers(3, 5))
    def put_siblings(self, count: int, number: int, num_tokens: int) -> None:
        for lease in self.held[:count]:
            put_sibling(self.state, lease, number, self.now_s, num_tokens=num_tokens)
        self._die_and_come_back()

    @rule(number=st.integers(0, 2))
    def put_a_sibling_that_the_next_lease_gets(self, number: int) -> None:
        """In one commit, with a sibling that is older than its lease and is not granted again."""
        self.now_s += 2 * TTL_S
        self.state.expire(self.now_s)
        for lease in self.state.lease([f"lease {self.num_leases}"], "steady", self.now_s):
            put_sibling(self.state, lease, number, self.now_s)
            put_sibling(self.state, lease, 3, self.now_s, age=1)
            self.state.ledger.end_lease(lease.lease_id, DropReason.RELEASED)
            self.held += self.state.lease([f"lease {self.num_leases + 1}"], "g", self.now_s)
        self.num_leases += 2
        self._die_and_come_back()

    @precondition(lambda self: self.held)
    @rule(reason=st.sampled_from(DropReason))
    def release(self, reason: DropReason) -> None:
        self.state.ledger.release(self.held[0].lease_id, reason)
        self._die_and_come_back()

    @rule(generator_id=st.sampled_from("gh"), scheduling_state=st.sampled_from(SchedulingState))
    def set_scheduling_state(self, generator_id: str, scheduling_state: SchedulingState) -> None:
        self.state.heartbeat(make_status(generator_id), self.now_s)
        self.state.registry.set_scheduling_state(generator_id, scheduling_state)
        self._die_and_come_back()

    @rule()
    def let_leases_expire(self) -> None:
        self.now_s += 2 * TTL_S
        self.state.expire(self.now_s)
        self._die_and_come_back()

    @rule(ahead=st.integers(0, 5))
    def assert_a_lease_of_a_lost_past(self, ahead: int) -> None:
        prompt_index = self.state.ledger.books().next_prompt_index + ahead
        asserted = Lease(
            lease_id=f"lost {self.num_leases}", prompt_index=prompt_index, min_policy_version=0
        )
        self.num_leases += 1
        self.state.heartbeat(make_status(session="lost", held=(asserted,)), self.now_s)
        self.held.append(asserted)
        self._die_and_come_back()

    @rule()
    def train(self) -> None:
        ledger = self.state.ledger
        term = ledger.learner_term
        if self.state.take(ledger.groups_per_step, ledger.version, term, self.now_s):
            self._die_and_come_back()
            ledger = self.state.ledger
            self.state.ledger.advance(ledger.version + 1, ledger.learner_term)
        self._die_and_come_back()

    @rule(num_steps=st.integers(1, 3), saved_after=st.integers(0, 3))
    def run_some_steps(self, num_steps: int, saved_after: int) -> None:
        """Steady work: without this rule, random calls rarely fill a batch."""
        ledger = self.state.ledger
        for step in range(num_steps):
            if step == saved_after:
                self.checkpoint = (ledger.version, ledger.books())
            for _ in range(ledger.groups_per_step):
                for lease in self.state.lease([f"lease {self.num_leases}"], "steady", self.now_s):
                    put(self.state, lease, ledger.version, self.now_s)
                self.num_leases += 1
            if self.state.take(
                ledger.groups_per_step, ledger.version, ledger.learner_term, self.now_s
            ):
                ledger.advance(ledger.version + 1, ledger.learner_term, steered_bound=step)
        self._die_and_come_back()

    @rule()
    def prefetch(self) -> None:
        ledger = self.state.ledger
        for version in (ledger.version, ledger.version + 1):
            try:
                self.state.take(ledger.groups_per_step, version, ledger.learner_term, self.now_s)
            except LedgerError:
                break
        self._die_and_come_back()

    @rule(acknowledges=st.booleans())
    def save(self, acknowledges: bool) -> None:
        ledger = self.state.ledger
        self.checkpoint = (ledger.version, ledger.books())
        if acknowledges:
            self.state.ledger.acknowledge(ledger.version, ledger.learner_term)
        self._die_and_come_back()

    @rule(num_steps=st.integers(1, 3), saved_after=st.integers(0, 3), lost=st.booleans())
    def work_and_attach_again(self, num_steps: int, saved_after: int, lost: bool) -> None:
        self.run_some_steps(num_steps, saved_after)
        self.attach_again(True, lost)

    @rule(has_books=st.booleans(), lost=st.booleans())
    def attach_again(self, has_books: bool, lost: bool) -> None:
        """Also to a journal that was lost with everything in it."""
        if lost:
            self.journal.close()
            journal_path(self.run_folder).unlink()
            self.state, self.journal = open_journal(self.run_folder, self.now_s, **self.bounds)
            self.held = []
        version, books = self.checkpoint
        learner_id = f"of version {version}"
        self.state.attach(version, books if has_books or lost else None, learner_id=learner_id)
        self._die_and_come_back()

    def teardown(self) -> None:
        if hasattr(self, "journal"):
            close_in_order(self.run_folder, self.journal)
            self.folder.cleanup()


def failing_write(*_: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


JournalMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=20)
TestJournal = JournalMachine.TestCase


def test_an_older_copy_whose_leases_ended_otherwise_since_passes_the_audit(tmp_path):
    state, journal = open_journal(tmp_path)
    state.attach(0, Books())
    state.lease(["a"], "g", 0.0)
    journal.commit()
    older = shutil.copytree(tmp_path / "buffer", tmp_path / "older" / "buffer").parent
    state.ledger.release("a", DropReason.FILTERED)
    journal.commit()
    journal.close()
    copy, journal = open_journal(older)
    copy.attach(0, state.ledger.books())
    assert copy.ledger.books().dropped == {DropReason.FILTERED: 1}
    commit_and_recover(older, copy, journal)


def test_recovered_leases_get_a_whole_new_time_to_live(tmp_path):
    state, journal = open_journal(tmp_path)
    state.attach(0, None)
    state.lease(["a"], "g", 0.0)
    journal.commit()
    recovered, journal = come_back(tmp_path, journal, now_s=1000.0)
    assert recovered.ledger.expire(1000.0 + TTL_S - 0.1) == ()
    assert recovered.ledger.expire(1000.0 + TTL_S) == ("a",)
    journal.close()


def test_the_siblings_of_a_lease_outlast_the_buffer_and_a_damaged_one_is_sampled_again(tmp_path):
    state, journal = open_journal(tmp_path)
    state.attach(0, None)
    (lease,) = state.lease(["a"], "g", 0.0)
    for number in (2, 0, 1):
        put_sibling(state, lease, number, 0.0)
        journal.commit()
    journal.close()
    with closing(sqlite3.connect(journal_path(tmp_path))) as db:
        place = read_rows(db.execute("SELECT * FROM entry"), PayloadPlace).places[0, 0]
    segment = journal_path(tmp_path).with_name("payloads") / f"{place.segment:08d}.segment"
    with segment.open("r+b") as file:
        file.seek(place.position)
        file.write(b"damaged")
    state, journal = open_journal(tmp_path, now_s=1000.0)
    state.expire(1000.0 + TTL_S)
    assert state.ledger.live_leases() == ()
    (again,) = state.lease(["b"], "h", 1000.0 + TTL_S)
    assert (again.prompt_index, again.kept_siblings) == (0, (2, 1))
    assert state.fetch_siblings("b") == (b"sibling 2 of a", b"sibling 1 of a")
    journal.commit()
    put(state, again, 0, 1000.0 + TTL_S)
    journal.commit()
    with closing(sqlite3.connect(journal_path(tmp_path))) as db:
        assert list(read_rows(db.execute("SELECT * FROM entry"), PayloadPlace).places) == [(0, -1)]
    assert state.stats(0.0).num_bytes == 5
    close_in_order(tmp_path, journal)


def test_a_new_end_of_the_run_is_recovered(tmp_path):
    state, journal = open_journal(tmp_path, final_version=2)
    state.attach(0, None, final_version=5)
    journal.commit()
    state, journal = come_back(tmp_path, journal, final_version=2)
    assert (state.ledger.learner_term, state.ledger.final_version) == (1, 5)
    journal.close()


def test_before_a_learner_attaches_the_run_ends_where_its_settings_say(tmp_path):
    state, journal = open_journal(tmp_path, final_version=2)
    state.ledger.draining = True
    journal.commit()
    state, journal = come_back(tmp_path, journal, final_version=5)
    assert (state.ledger.draining, state.ledger.final_version) == (True, 5)
    journal.close()


def test_a_step_over_a_batch_of_which_only_a_part_is_known_is_refused(tmp_path):
    """The commit that lent the rest is lost: its groups would be trained again."""
    state, journal = open_journal(tmp_path)
    term = state.attach(0, None)
    slow, slower = (state.lease([name], "g", 0.0)[0] for name in ("slow", "slower"))
    fill(state, "a", "b")
    state.take(2, 0, term, 0.0)
    state.ledger.advance(1, term)
    fill(state, "c", "d", version=1)
    put(state, slow, 0)
    assert len(state.take(2, 1, term, 0.0, num_held=0).headers) == 1
    journal.commit()
    put(state, slower, 0)
    assert len(state.take(2, 1, term, 0.0, num_held=1).headers) == 2
    state, journal = come_back(tmp_path, journal)
    with pytest.raises(LedgerError, match="has lent for"):
        state.ledger.advance(2, term)
    close_in_order(tmp_path, journal)


def test_totals_after_a_commit_whose_answer_was_lost_are_those_of_the_next_one(
    tmp_path, monkeypatch
):
    state, journal = open_journal(tmp_path)
    state.heartbeat(make_status(), 0.0)
    journal.commit()
    commit = SqliteStorage.commit

    def applied_without_an_answer(storage: SqliteStorage, changes: Any) -> None:
        commit(storage, changes)
        raise StorageError("no answer")

    state.registry.set_scheduling_state("g", SchedulingState.CORDONED)
    with monkeypatch.context() as patch:
        patch.setattr(SqliteStorage, "commit", applied_without_an_answer)
        with pytest.raises(StorageError):
            journal.commit()
    state.registry.set_scheduling_state("g", SchedulingState.ACTIVE)
    journal.commit()
    recovered, journal = come_back(tmp_path, journal)
    journal.close()
    assert recovered.snapshot() == state.snapshot()
    assert recovered.snapshot().scheduling_states == {}


def test_the_file_does_not_grow_with_the_run(tmp_path):
    state, journal = open_journal(tmp_path)
    state.attach(0, None)

    def steps(count: int) -> int:
        for _ in range(count):
            version = state.ledger.version
            for number in range(2):
                (lease,) = state.lease([f"{version}/{number}"], "g", 0.0)
                state.put(lease.lease_id, header(lease, version), bytes(20_000), 0.0)
            journal.commit()
            state.take(2, version, 1, 0.0)
            state.ledger.advance(version + 1, 1)
            state.ledger.acknowledge(version + 1, 1)
            journal.commit()
        with closing(sqlite3.connect(journal_path(tmp_path))) as db:
            return int(db.execute("PRAGMA page_count").fetchone()[0]) * 4096

    early = steps(10)
    assert steps(200) < early + 200 * 2 * 100
    assert state.stats(0.0).num_bytes == 0
    journal.close()


@pytest.mark.parametrize(("durability", "synchronous"), [("process", 1), ("machine", 2)])
def test_each_commit_is_synced_where_it_has_to_outlast_the_machine(
    tmp_path, durability, synchronous
):
    with closing(SqliteStorage(journal_path(tmp_path), durability=durability)) as storage:
        assert storage._db.execute("PRAGMA synchronous").fetchone() == (synchronous,)


def test_a_journal_in_use_is_refused(tmp_path):
    _, journal = open_journal(tmp_path)
    with pytest.raises(ConfigError, match="in use by another buffer"):
        open_journal(tmp_path)
    journal.close()


def test_a_file_system_without_locks_is_told_from_another_buffer(tmp_path, monkeypatch):
    def flock(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(ConfigError, match="has no locks"):
        open_journal(tmp_path)


def test_a_journal_that_could_not_be_opened_is_not_in_use(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(sqlite3, "connect", failing_connect)
        with pytest.raises(StorageError) as kept_with_its_frames:
            open_journal(tmp_path)
    _, journal = open_journal(tmp_path)
    journal.close()
    assert kept_with_its_frames


def failing_connect(*_: object, **__: object) -> None:
    error = sqlite3.OperationalError("unable to open database file")
    error.sqlite_errorcode = sqlite3.SQLITE_CANTOPEN
    raise error


def test_a_journal_is_read_in_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    state, journal = open_journal(tmp_path)
    path, access = journal_path(tmp_path), os.access
    state.attach(0, None)
    fill(state, "a")
    journal.commit()
    monkeypatch.setattr(os, "access", lambda f, mode: mode != os.W_OK and access(f, mode))
    with open_to_read(path) as db:
        assert read_snapshot(db).next_prompt_index == 1, "the log has what the file lacks"
    journal.close()
    before = sorted(path.parent.iterdir())
    with open_to_read(path) as db:
        assert read_snapshot(db).next_prompt_index == 1
        assert sorted(path.parent.iterdir()) == before, "no log can be made beside it"


def test_a_journal_of_another_run_is_refused_by_name(tmp_path):
    _, journal = open_journal(tmp_path)
    journal.close()
    other = Journal(SqliteStorage(journal_path(tmp_path), durability="process"), make_state())
    with pytest.raises(ConfigError, match=r"run\.name: is 'b', .* of a run with 'a'"):
        other.recover({"run.name": "b"}, 0.0)
    other.close()


def test_another_bound_is_adopted_and_fences_who_counts_with_the_old_one(tmp_path):
    state, journal = open_journal(tmp_path)
    learner_term = state.attach(0, None)
    fill(state, *"abc")
    journal.commit()
    state, journal = come_back(tmp_path, journal, groups_per_step=3)
    with pytest.raises(LedgerError, match="took over"):
        state.take(2, 0, learner_term, 0.0)
    assert len(state.take(3, 0, state.attach(0, None), 0.0).headers) == 3
    journal.close()


def test_a_file_that_is_no_journal_is_named(tmp_path):
    path = journal_path(tmp_path)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"something else" * 1000)
    with pytest.raises(ConfigError, match="cannot be used: file is not a database"):
        Journal(SqliteStorage(path, durability="process"), make_state())


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE settings SET data = '{'",
        "UPDATE snapshot SET data = x'c1'",
        "UPDATE entry SET header = x'ff'",
        "UPDATE entry SET places = x'81'",
        "UPDATE entry SET state = 'unknown'",
    ],
)
def test_a_file_with_a_damaged_value_is_named(tmp_path, damage):
    state, journal = open_journal(tmp_path)
    state.attach(0, None)
    fill(state, "a")
    journal.commit()
    journal.close()
    with closing(sqlite3.connect(journal_path(tmp_path))) as db:
        db.execute(damage)
        db.commit()
    for read in (open_journal, lambda run: audit_journal(journal_path(run))):
        with pytest.raises(ConfigError, match=r"journal\.sqlite is damaged: .*; move it away"):
            read(tmp_path)


def test_what_a_full_file_refused_is_written_when_there_is_space(tmp_path):
    state, journal = open_journal(tmp_path, max_staleness=200)
    state.attach(0, None)
    fill(state, "a")
    journal.commit()
    committed = dump(state)
    with closing(sqlite3.connect(journal_path(tmp_path))) as db:
        num_pages = db.execute("PRAGMA page_count").fetchone()[0]
    journal._storage._db.execute(f"PRAGMA max_page_count = {num_pages}")
    for lease in state.lease([f"{number:0200}" for number in range(300)], "g", 0.0):
        put(state, lease, 0)
    for _ in range(2):
        with pytest.raises(StorageError, match="database or disk is full"):
            journal.commit()
    copy = tmp_path / "copy" / "buffer"
    shutil.copytree(journal_path(tmp_path).parent, copy)
    killed, other = open_journal(tmp_path / "copy")
    assert dump(killed) == committed
    other.close()
    journal._storage._db.execute("PRAGMA max_page_count = 1000000")
    commit_and_recover(tmp_path, state, journal)


def test_a_journal_of_another_release_is_refused_and_left_as_it_is(tmp_path):
    path = journal_path(tmp_path)
    path.parent.mkdir()
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("CREATE TABLE settings (id INTEGER PRIMARY KEY, data TEXT)")
        db.execute("CREATE TABLE image (id INTEGER PRIMARY KEY, data BLOB)")
        db.execute("INSERT INTO settings VALUES (0, ?)", ('{"format": 1, "run.name": "a"}',))
        db.commit()
    before = path.read_bytes()
    sentence = (
        f"the journal {path} has format 1, and this release knows format 10: another release of "
        "StreamRL wrote it; start the run anew with --new, or go on with that release"
    )
    with pytest.raises(OtherReleaseError) as refusal:
        open_journal(tmp_path)
    assert str(refusal.value) == sentence
    with pytest.raises(OtherReleaseError) as refusal:
        run_audit(Namespace(folder=tmp_path))
    assert str(refusal.value) == sentence
    assert path.read_bytes() == before
    with closing(sqlite3.connect(path)) as db:
        names = {name for (name,) in db.execute("SELECT name FROM sqlite_master")}
    assert names == {"settings", "image"}
