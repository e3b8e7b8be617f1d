"""The journal in one SQLite file, and the payloads in append-only segments beside it
(`buffers.journal.payload_segments`).

Invariant: a payload is written before the row that names it, and its bytes are freed after the row
is gone. One process at a time writes the file; others may read it while the buffer runs. Every
change is one transaction, and a failed one changes nothing. The tables:

    settings  the format and the settings of the run (one row, JSON)
    snapshot  the totals of the ledger, a `LedgerSnapshot` (one row)
    entry     every open prompt: its lease, state, header, siblings, and by their numbers (a group's
              is -1) where its payloads are (`buffers.journal.payload_segments`); or that it is free
    events    one row a lease: the states it was in, one letter each, and the lengths of the
              responses that were put (msgpack); never deleted
"""

import fcntl
import json
import os
import shutil
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TextIO

import msgspec

from buffers.journal.journal import DAMAGED, Changes, JournalContent, events_of
from buffers.journal.payload_segments import Payload, PayloadPlace, Segments
from buffers.ledger.entries import Event, LedgerSnapshot
from buffers.ledger.state import PayloadKey
from streamrl.errors import ConfigError, OtherReleaseError, StorageError

FORMAT = 10
MAX_LOG_BYTES = 4 * 2**20
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
    min_policy_version INTEGER, state TEXT, version INTEGER, header BLOB, siblings BLOB,
    places BLOB);
CREATE TABLE IF NOT EXISTS events (number INTEGER PRIMARY KEY, prompt_index INTEGER, lease_id TEXT,
    states TEXT, response_lengths BLOB);
"""
_PUT_ENTRY = "INSERT OR REPLACE INTO entry VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
_PUT_EVENTS = """INSERT INTO events VALUES (?, ?, ?, ?, ?)
    ON CONFLICT (number) DO UPDATE SET states = states || excluded.states,
    response_lengths = coalesce(excluded.response_lengths, response_lengths)"""


def journal_path(run: Path) -> Path:
    return run / "buffer" / "journal.sqlite"


class SqliteStorage:
    """`buffers.journal.journal.JournalStorage`; holds a lock on the file until it is closed."""

    place_type = PayloadPlace

    def __init__(self, path: Path, *, durability: str) -> None:
        """`durability`: a commit outlasts the death of the "process", or of the "machine".

        Raises:
            StorageError: the file cannot be opened now (a full disk).
            ConfigError: it cannot be used at all.
        """
        self.name = str(path)
        self._path = path
        self._lock = _lock(path)
        try:
            self._db = _open_to_write(path, durability)
        except StorageError:
            self._lock.close()
            raise
        is_synced = durability == "machine"
        self._segments = Segments(path.with_name("payloads"), is_synced=is_synced)

    def read(self) -> JournalContent:
        with _decoding(self._path):
            settings = self._db.execute("SELECT data FROM settings").fetchone()
            newest = self._db.execute("SELECT max(number) FROM events").fetchone()[0]
            known = settings and json.loads(settings[0])
            return JournalContent(
                settings={k: v for k, v in known.items() if k != "format"} if known else None,
                snapshot=read_snapshot(self._db),
                rows=self._db.execute("SELECT * FROM entry").fetchall(),
                next_number=0 if newest is None else newest + 1,
            )

    def recover(self, places: Mapping[PayloadKey, PayloadPlace]) -> Mapping[PayloadKey, Payload]:
        return self._segments.recover(places)

    def stage(self, payloads: Sequence[Payload]) -> list[PayloadPlace]:
        return self._segments.write(payloads)

    def commit(self, changes: Changes[PayloadPlace]) -> frozenset[PayloadKey]:
        try:
            with _transaction(self._db, self._path):
                self._write(changes)
        except StorageError:
            self._segments.discard()
            raise
        self._segments.settle(changes.added.values(), changes.freed)
        return frozenset()

    def close(self) -> None:
        self._segments.close()
        self._db.close()
        self._lock.close()

    def _write(self, changes: Changes[PayloadPlace]) -> None:
        db = self._db
        if changes.settings is not None:
            data = json.dumps({"format": FORMAT, **changes.settings})
            db.execute("INSERT OR REPLACE INTO settings VALUES (0, ?)", (data,))
        if changes.snapshot is not None:
            snapshot = msgspec.msgpack.encode(changes.snapshot)
            db.execute("INSERT OR REPLACE INTO snapshot VALUES (0, ?)", (snapshot,))
        db.executemany(_PUT_EVENTS, changes.events)
        db.executemany(_PUT_ENTRY, changes.entries)
        gone = [(prompt_index,) for prompt_index in changes.closed]
        db.executemany("DELETE FROM entry WHERE prompt_index = ?", gone)


@contextmanager
def open_to_read(path: Path) -> Iterator[sqlite3.Connection]:
    """The file as it is at one moment, while others may write it. Its folder may be read-only, as
    that of somebody else's run.

    Raises:
        OtherReleaseError: the file has another format.
    """
    if not path.exists():
        raise ConfigError(f"{path} does not exist: the run has no journal (buffer.journal)")
    # Of a file without a log SQLite makes one to read it; nobody writes this one.
    file = path.resolve()
    is_closed = not file.with_name(f"{file.name}-wal").exists()
    only_read = "&immutable=1" if is_closed and not os.access(file.parent, os.W_OK) else ""
    uri = f"{file.as_uri()}?mode=ro{only_read}"
    with _decoding(path), closing(sqlite3.connect(uri, uri=True)) as db:
        db.execute("BEGIN")
        _require_format(db, path)
        yield db


def read_events(db: sqlite3.Connection) -> Iterator[Event]:
    """Every transition of every lease, those of one prompt in their order."""
    for row in db.execute(
        "SELECT prompt_index, lease_id, states, response_lengths FROM events ORDER BY number"
    ):
        yield from events_of(*row)


def read_snapshot(db: sqlite3.Connection) -> LedgerSnapshot:
    row = db.execute("SELECT data FROM snapshot").fetchone()
    return msgspec.msgpack.decode(row[0], type=LedgerSnapshot) if row else LedgerSnapshot()


@contextmanager
def _decoding(path: Path) -> Iterator[None]:
    """As `translated_errors`; and a ConfigError for values that are damaged."""
    with translated_errors(path):
        try:
            yield
        except DAMAGED as error:
            raise ConfigError(f"the journal {path} is damaged: {error!r}; move it away") from error


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


@contextmanager
def _transaction(db: sqlite3.Connection, path: Path) -> Iterator[None]:
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


def _require_format(db: sqlite3.Connection, path: Path) -> None:
    if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'settings'").fetchone():
        return
    row = db.execute("SELECT data FROM settings").fetchone()
    found = json.loads(row[0])["format"] if row else FORMAT
    if found != FORMAT:
        what, remedy = f"the journal {path}", "start the run anew with --new"
        raise OtherReleaseError.of(what, found, FORMAT, remedy)


def _open_to_write(path: Path, durability: str) -> sqlite3.Connection:
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


def _lock(path: Path) -> TextIO:
    """Exclude other buffers from the journal, while the file is open."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_suffix(".lock").open("w")
    except OSError as error:
        raise StorageError(f"the journal {path} cannot be opened: {error}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(f"{path} is in use by another buffer") from error
    except OSError as error:
        raise ConfigError(
            f"run.folder: the file system of {path} has no locks ({error.strerror}), which the "
            "journal needs: mount it with them (flock, of Lustre), or name a folder on another one"
        ) from error
    return lock
