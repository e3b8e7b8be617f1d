"""The journal: a buffer's state on disk, written as it changes.

The ledger is in one SQLite file, the payloads are in append-only segments beside it
(`buffers.journal.segments`).

Invariant: after `commit` the disk holds exactly the ledger's state, however this process ends;
after a failed commit it holds the state of the last success, and the next commit writes the same
changes. Where only the payloads do not fit, what was freed is deleted all the same: then the disk
holds the state without the payloads of groups that nobody was told are kept, and the next commit
writes them. A payload is written before the row that names it, and its bytes are freed after the
row is gone: so a group without its payload was lost, and is sampled again.
What ends is deleted, so there is no log to compact; only the events grow, by about sixty bytes a
lease. Leases get a new time to live on recovery, because clocks differ between processes.

The SQLite file has these tables:

    settings  the format and the settings of the run (one row, JSON)
    snapshot  the totals of the ledger, a `LedgerSnapshot` (one row)
    entry     every open prompt: its lease, state, header and finished siblings; or that it is free
    payload   where the payload of every group that is held is (`buffers.journal.segments`), and,
              by its number, that of every sibling that is held before its group (a group has -1)
    scheduling_state   of each generator that is not active
    events    one row a lease: the states it was in, one letter each, and the lengths of the
              responses that were put (msgpack); never deleted

Invariant: every change is one transaction, and a failed one changes nothing. `Journal` writes the
file; others may read it while the buffer runs. `read_content`, which a buffer begins with, changes
nothing, so it can be repeated after an error.
"""

import fcntl
import json
import logging
import os
import shutil
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, TextIO, TypeAlias

import msgspec

from buffers.journal.segments import PayloadPlace, Segments
from buffers.ledger.entries import BY_BOOKS, Entry, Event, LedgerSnapshot, State
from buffers.ledger.state import GROUP, BufferState, PayloadKey
from streamrl.errors import ConfigError, OtherReleaseError, StorageError
from streamrl.types import DropReason, GroupHeader, SchedulingState, SiblingHeader

FORMAT = 8
MAX_LOG_BYTES = 4 * 2**20
FREE = "free"
LETTERS = {
    "leased": "L",
    "buffered": "B",
    "taken": "T",
    "trained": "R",
    "acknowledged": "A",
    BY_BOOKS: "K",
    DropReason.STALE: "s",
    DropReason.FAILED: "f",
    DropReason.FILTERED: "i",
    DropReason.UNIFORM: "u",
    DropReason.MALFORMED: "m",
    DropReason.EXPIRED: "e",
    DropReason.RELEASED: "r",
    DropReason.ORPHANED: "o",
    DropReason.ABANDONED: "a",
}
_WORDS = {letter: word for word, letter in LETTERS.items()}


# Another reader, a full disk or a failing one; the same statement may succeed later.
_TEMPORARY = {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_CANTOPEN,
}


_SCHEMA = """
CREATE TABLE IF NOT EXISTS settings (id INTEGER PRIMARY KEY CHECK (id = 0), data TEXT);
CREATE TABLE IF NOT EXISTS snapshot (id INTEGER PRIMARY KEY CHECK (id = 0), data BLOB);
CREATE TABLE IF NOT EXISTS entry (prompt_index INTEGER PRIMARY KEY, number INTEGER, lease_id TEXT,
    min_policy_version INTEGER, state TEXT, version INTEGER, header BLOB, siblings BLOB);
CREATE TABLE IF NOT EXISTS payload (prompt_index INTEGER, sibling INTEGER, segment INTEGER,
    position INTEGER, num_bytes INTEGER, checksum BLOB, PRIMARY KEY (prompt_index, sibling));
CREATE TABLE IF NOT EXISTS scheduling_state (generator_id TEXT PRIMARY KEY, scheduling_state TEXT);
CREATE TABLE IF NOT EXISTS events (number INTEGER PRIMARY KEY, prompt_index INTEGER, lease_id TEXT,
    states TEXT, response_lengths BLOB);
"""


def journal_path(run: Path) -> Path:
    """The journal's path in the folder of a run."""
    return run / "buffer" / "journal.sqlite"


@contextmanager
def open_to_read(path: Path) -> Iterator[sqlite3.Connection]:
    """The file as it is at one moment, while others may write it.

    Raises:
        OtherReleaseError: the file has another format.
    """
    if not path.exists():
        raise ConfigError(f"{path} does not exist: the run has no journal (buffer.journal)")
    with (
        translated_errors(path),
        closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as db,
    ):
        db.execute("BEGIN")
        _require_format(db, path)
        yield db


def _require_format(db: sqlite3.Connection, path: Path) -> None:
    if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'settings'").fetchone():
        return
    row = db.execute("SELECT data FROM settings").fetchone()
    found = json.loads(row[0])["format"] if row else FORMAT
    if found != FORMAT:
        what, remedy = f"the journal {path}", "start the run anew with --new"
        raise OtherReleaseError.of(what, found, FORMAT, remedy)


def read_events(db: sqlite3.Connection) -> Iterator[Event]:
    """Every transition of every lease, those of one prompt in their order."""
    for prompt_index, lease_id, letters, packed in db.execute(
        "SELECT prompt_index, lease_id, states, response_lengths FROM events ORDER BY number"
    ):
        lengths = msgspec.msgpack.decode(packed, type=tuple[int, ...]) if packed else ()
        for place, letter in enumerate(letters):
            # A lease is granted first; what follows, if it has lengths, is its put.
            yield _event(prompt_index, lease_id, letter, lengths if place == 1 else ())


def _event(prompt_index: int, lease_id: str, letter: str, lengths: tuple[int, ...]) -> Event:
    word = _WORDS[letter]
    if isinstance(word, DropReason):
        return Event(prompt_index, "dropped", str(word), lease_id, lengths)
    if word == BY_BOOKS:
        return Event(prompt_index, "acknowledged", word, lease_id)
    return Event(prompt_index, word, None, lease_id, lengths)


def read_snapshot(db: sqlite3.Connection) -> LedgerSnapshot:
    row = db.execute("SELECT data FROM snapshot").fetchone()
    return msgspec.msgpack.decode(row[0], type=LedgerSnapshot) if row else LedgerSnapshot()


def open_to_write(path: Path, durability: str) -> sqlite3.Connection:
    """Open the file and create its tables; a file of another format is refused unchanged."""
    if path.exists():
        with open_to_read(path):
            pass
    with translated_errors(path):
        # The server is created in one thread and serves in another, never in both at a time.
        db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute(f"PRAGMA synchronous = {'FULL' if durability == 'machine' else 'NORMAL'}")
        db.execute(f"PRAGMA journal_size_limit = {MAX_LOG_BYTES}")
        db.execute("PRAGMA wal_autocheckpoint = 4000")
        db.executescript(_SCHEMA)
    return db


@contextmanager
def transaction(db: sqlite3.Connection, path: Path) -> Iterator[None]:
    """Commit all of the block, or nothing of it."""
    with translated_errors(path):
        db.execute("BEGIN IMMEDIATE")
        try:
            yield
            db.execute("COMMIT")
        except sqlite3.Error:
            with suppress(sqlite3.Error):
                db.execute("ROLLBACK")
            # On a full disk, truncating the log may free the space that is missing.
            with suppress(sqlite3.Error):
                db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            raise


@contextmanager
def translated_errors(path: Path) -> Iterator[None]:
    """Raise StorageError or ConfigError for SQLite's errors."""
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in _TEMPORARY:
            full = ", no space is left" if shutil.disk_usage(path.parent).free < 2**16 else ""
            raise StorageError(f"the journal {path} cannot be written: {error}{full}") from error
        raise ConfigError(f"the journal {path} cannot be used: {error}; move it away") from error


Siblings: TypeAlias = tuple[SiblingHeader, ...]


class JournalContent(NamedTuple):
    """The rows of every table; `numbers` and `next_number` are those of the leases' events."""

    settings: dict[str, str | int] | None
    snapshot: LedgerSnapshot
    entries: list[Entry]
    numbers: dict[str, int]
    free: list[int]
    places: dict[PayloadKey, PayloadPlace]
    scheduling_states: dict[str, SchedulingState]
    next_number: int


def read_content(db: sqlite3.Connection, now_s: float) -> JournalContent:
    """Everything but the events. Leases expire at `now_s` unless the ledger extends them."""
    entries, numbers, free = [], {}, []
    for prompt_index, number, lease_id, min_policy_version, state, version, *packed in db.execute(
        "SELECT * FROM entry"
    ):
        if state == FREE:
            free.append(prompt_index)
            continue
        header = packed[0] and msgspec.msgpack.decode(packed[0], type=GroupHeader)
        siblings = msgspec.msgpack.decode(packed[1], type=Siblings) if packed[1] else ()
        lease = (prompt_index, lease_id, min_policy_version, now_s)
        entries.append(Entry(*lease, State(state), header, version, siblings))
        numbers[lease_id] = number
    settings = db.execute("SELECT data FROM settings").fetchone()
    newest = db.execute("SELECT max(number) FROM events").fetchone()[0]
    return JournalContent(
        settings=settings and json.loads(settings[0]),
        snapshot=read_snapshot(db),
        entries=entries,
        numbers=numbers,
        free=free,
        places={
            (prompt_index, sibling): PayloadPlace(*place)
            for prompt_index, sibling, *place in db.execute("SELECT * FROM payload")
        },
        scheduling_states={
            generator_id: SchedulingState(scheduling_state)
            for generator_id, scheduling_state in db.execute("SELECT * FROM scheduling_state")
        },
        next_number=0 if newest is None else newest + 1,
    )


log = logging.getLogger(__name__)


_PUT_ENTRY = "INSERT OR REPLACE INTO entry VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
_PUT_EVENTS = """INSERT INTO events VALUES (?, ?, ?, ?, ?)
    ON CONFLICT (number) DO UPDATE SET states = states || excluded.states,
    response_lengths = coalesce(excluded.response_lengths, response_lengths)"""


class _Stored(NamedTuple):
    """A payload whose row is in the file: whose it is, and its place if it is not lost.

    A group's has the number of its lease, a sibling's the lease under which it was sampled."""

    owner: int | str
    place: PayloadPlace | None


class Journal:
    """Writes one `BufferState`; one process at a time."""

    def __init__(
        self, path: Path, state: BufferState[bytes | memoryview], *, durability: str
    ) -> None:
        """`durability`: a commit outlasts the death of the "process", or of the "machine".

        Raises:
            StorageError: the file cannot be opened now (a full disk).
            ConfigError: it cannot be used at all.
        """
        self._path = path
        self._state = state
        self._ledger = state.ledger
        self._pending: list[tuple[int, Event]] = []
        self._snapshot = LedgerSnapshot()
        self._scheduling_states: dict[str, SchedulingState] = {}
        self._numbers: dict[str, int] = {}
        self._next_number = 0
        self._stored: dict[int, dict[int, _Stored]] = {}
        self._unwritten: set[int] = set()
        self._with_sibling: set[int] = set()
        self._settings: str | None = None
        self._lock = _lock(path)
        try:
            self._db = open_to_write(path, durability)
        except StorageError:
            self._lock.close()
            raise
        is_synced = durability == "machine"
        self._segments = Segments(path.with_name("payloads"), is_synced=is_synced)

    def recover(self, settings: Mapping[str, str | int], now_s: float) -> None:
        """Restore the file's state into the blank one, and record every change from here on.

        `settings` identify the run; those of `learner.` and `buffer.` may differ from the file's.

        Raises:
            ConfigError: the journal is of another run.
            StorageError: it cannot be read now; the state is still blank.
        """
        with translated_errors(self._path):
            content = read_content(self._db, now_s)
        has_new_bound = self._check_settings(content.settings, settings)
        payloads = self._segments.recover(content.places)
        self._next_number, self._numbers = content.next_number, content.numbers
        for entry in content.entries:
            for key, owner in self._owners(entry).items():
                place = content.places[key] if key in payloads else None
                self._stored.setdefault(key[0], {})[key[1]] = _Stored(owner, place)
        self._snapshot = content.snapshot
        self._scheduling_states = content.scheduling_states
        self._state.registry.scheduling_states = content.scheduling_states
        self._ledger.subscribe(self._on_event)
        self._state.on_sibling = self._with_sibling.add
        if content.snapshot != LedgerSnapshot():
            self._restore(content, payloads, now_s)
        if has_new_bound and self._ledger.learner_term:
            # Fences a learner that still uses the old bound.
            self._ledger.learner_term += 1
        self._settings = json.dumps({"format": FORMAT, **settings})
        # Else it is written with the first commit that succeeds.
        with suppress(StorageError):
            self.commit()

    def commit(self) -> None:
        """Write everything that changed since the last commit, in one transaction.

        Raises:
            StorageError: nothing was written, or all but the new payloads, because they do not fit;
                the next call writes what is missing.
        """
        snapshot = self._ledger.snapshot()
        scheduling_states = self._state.registry.scheduling_states
        has_changed = (snapshot, scheduling_states) != (self._snapshot, self._scheduling_states)
        has_payloads = self._unwritten or self._with_sibling
        if not (self._pending or has_payloads or self._settings or has_changed):
            return
        last = {event.prompt_index: event for _, event in self._pending}
        changed = {*last, *self._with_sibling, *self._unwritten}
        held = self._held(changed)
        stored = self._stored_of(changed)
        freed = dict(stored.items() - held.items())
        try:
            added = self._write_payloads(dict(sorted(held.items() - stored.items())))
        except StorageError:
            if not freed:
                raise
            added = {}
        try:
            with transaction(self._db, self._path):
                self._write_totals(snapshot, scheduling_states)
                self._write_events()
                self._write_entries(last, self._with_sibling)
                self._write_places(added, freed)
        except StorageError:
            self._segments.discard()
            raise
        self._pending.clear()
        self._with_sibling.clear()
        self._settings = None
        self._snapshot, self._scheduling_states = snapshot, scheduling_states
        gone = [self._forget(*key) for key in freed]
        for (prompt_index, sibling), payload in added.items():
            self._stored.setdefault(prompt_index, {})[sibling] = payload
        self._unwritten = {index for index, _ in held.keys() - self._stored_of(changed).keys()}
        self._segments.settle(_places(added.values()), _places(gone))
        if self._unwritten:
            # What was freed may be the room that they need.
            self.commit()

    def close(self) -> None:
        self._segments.close()
        self._db.close()
        self._lock.close()

    def _on_event(self, event: Event) -> None:
        if event.state == State.LEASED or not event.lease_id:
            number = self._next_number
            self._next_number += 1
        else:
            number = self._numbers[event.lease_id]
        if event.lease_id:
            self._numbers[event.lease_id] = number
        if event.state in ("acknowledged", "dropped"):
            self._numbers.pop(event.lease_id, None)
        self._pending.append((number, event))

    def _owners(self, entry: Entry) -> dict[PayloadKey, int | str]:
        """Whose the payloads are that the entry has. See `_Stored`."""
        index = entry.prompt_index
        if entry.header is not None:
            return {(index, GROUP): self._numbers[entry.lease_id]}
        return {(index, sibling.number): sibling.lease_id for sibling in entry.siblings}

    def _held(self, prompt_indices: Iterable[int]) -> dict[PayloadKey, int | str]:
        """The payloads that these prompts have, and whose they are."""
        entries = (entry for entry in map(self._ledger.entry, prompt_indices) if entry is not None)
        return {key: owner for entry in entries for key, owner in self._owners(entry).items()}

    def _stored_of(self, prompt_indices: Iterable[int]) -> dict[PayloadKey, int | str]:
        """Those of these prompts that the file has, and whose they are."""
        return {
            (index, sibling): payload.owner
            for index in prompt_indices
            for sibling, payload in self._stored.get(index, {}).items()
        }

    def _forget(self, prompt_index: int, sibling: int) -> _Stored:
        of_prompt = self._stored[prompt_index]
        payload = of_prompt.pop(sibling)
        if not of_prompt:
            del self._stored[prompt_index]
        return payload

    def _write_payloads(self, new: Mapping[PayloadKey, int | str]) -> dict[PayloadKey, _Stored]:
        """Write these payloads, whose owners are given."""
        places = self._segments.write([self._state.payload(key) for key in new])
        payloads = zip(new.items(), places, strict=True)
        return {key: _Stored(owner, place) for (key, owner), place in payloads}

    def _write_totals(
        self, snapshot: LedgerSnapshot, scheduling_states: Mapping[str, SchedulingState]
    ) -> None:
        """Everything that is not of one prompt, where it has changed."""
        if self._settings is not None:
            self._db.execute("INSERT OR REPLACE INTO settings VALUES (0, ?)", (self._settings,))
        if snapshot != self._snapshot:
            data = msgspec.msgpack.encode(snapshot)
            self._db.execute("INSERT OR REPLACE INTO snapshot VALUES (0, ?)", (data,))
        if scheduling_states != self._scheduling_states:
            self._db.execute("DELETE FROM scheduling_state")
            rows = ((name, str(state)) for name, state in scheduling_states.items())
            self._db.executemany("INSERT INTO scheduling_state VALUES (?, ?)", rows)

    def _write_events(self) -> None:
        rows: dict[int, tuple[int, str, str, bytes | None]] = {}
        for number, event in self._pending:
            *_, states, lengths = rows.get(number, ("", None))
            if event.response_lengths:
                lengths = msgspec.msgpack.encode(event.response_lengths)
            states += LETTERS[event.reason or event.state]
            rows[number] = (event.prompt_index, event.lease_id, states, lengths)
        self._db.executemany(_PUT_EVENTS, [(number, *row) for number, row in rows.items()])

    def _write_entries(self, last: Mapping[int, Event], with_sibling: Iterable[int]) -> None:
        """The present entry of each prompt that has a last event or a new sibling, or none."""
        rows, deleted = [], []
        for prompt_index in (*last, *(set(with_sibling) - last.keys())):
            entry = self._ledger.entry(prompt_index)
            if entry is not None:
                rows.append(self._row(entry))
            elif _frees(last[prompt_index]):
                rows.append((prompt_index, -1, "", 0, FREE, -1, None, None))
            else:
                deleted.append((prompt_index,))
        self._db.executemany(_PUT_ENTRY, rows)
        self._db.executemany("DELETE FROM entry WHERE prompt_index = ?", deleted)

    def _write_places(
        self, added: Mapping[PayloadKey, _Stored], freed: Iterable[PayloadKey]
    ) -> None:
        gone = "DELETE FROM payload WHERE prompt_index = ? AND sibling = ?"
        self._db.executemany(gone, list(freed))
        rows = [(*key, *stored.place) for key, stored in added.items() if stored.place]
        self._db.executemany("INSERT OR REPLACE INTO payload VALUES (?, ?, ?, ?, ?, ?)", rows)

    def _row(self, entry: Entry) -> tuple[object, ...]:
        header = None if entry.header is None else msgspec.msgpack.encode(entry.header)
        number = self._numbers[entry.lease_id]
        key = (entry.prompt_index, number, entry.lease_id, entry.min_policy_version)
        siblings = msgspec.msgpack.encode(entry.siblings) if entry.siblings else None
        return (*key, str(entry.state), entry.version, header, siblings)

    def _restore(
        self, content: JournalContent, payloads: dict[PayloadKey, bytes], now_s: float
    ) -> None:
        self._state.restore(content.snapshot, content.entries, content.free, payloads, now_s)
        books = msgspec.structs.asdict(self._ledger.books())
        columns = {name: books[name] for name in ("leased", "buffered", "taken", "trained")}
        log.info("recovered %s at version %d: %s", self._path, self._ledger.version, columns)

    def _check_settings(
        self, known: Mapping[str, str | int] | None, settings: Mapping[str, str | int]
    ) -> bool:
        """Whether the staleness bound differs from the `known` one, which is the file's."""
        if known is None:
            return False
        changed = {name: (known.get(name), now) for name, now in settings.items()}
        changed = {name: pair for name, pair in changed.items() if not _is_same(*pair)}
        for name, (then, now) in changed.items():
            if not name.startswith(("learner.", "buffer.")):
                raise ConfigError(
                    f"{name}: is {now!r}, but the journal {self._path} is of a run with {then!r}: "
                    "set it back, or start the run anew with --new"
                )
            log.warning("%s was %s in the journal; from here on it is %s", name, then, now)
        return bool(changed)


def _is_same(then: object, now: object) -> bool:
    """Also of two ways to name one file."""
    are_texts = isinstance(then, str) and isinstance(now, str)
    return then == now or (are_texts and os.path.abspath(str(then)) == os.path.abspath(str(now)))


def _frees(event: Event) -> bool:
    """Whether the event's prompt may be granted again."""
    return event.state == "dropped" and DropReason(event.reason or "").returns_prompt


def _places(groups: Iterable[_Stored]) -> list[PayloadPlace]:
    return [stored.place for stored in groups if stored.place is not None]


def _lock(path: Path) -> TextIO:
    """Exclude other buffers from the journal, while the file is open."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_suffix(".lock").open("w")
    except OSError as error:
        raise StorageError(f"the journal {path} cannot be opened: {error}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise ConfigError(f"{path} is in use by another buffer") from error
    return lock
