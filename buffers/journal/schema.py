"""The journal's ledger, one SQLite file: its tables, how it is opened, and how it is read.

    settings  the format and the settings of the run (one row, JSON)
    snapshot  the totals of the ledger, a `LedgerSnapshot` (one row)
    entry     every open prompt: its lease, state and header; or that it is free
    payload   where the payload of every group that is held is (`buffers.journal.segments`)
    scheduling_state   of each generator that is not active
    events    one row a lease: the states it was in, one letter each, and the lengths of the
              responses that were put (msgpack); never deleted

Invariant: every change is one transaction, and a failed one changes nothing. `Journal` writes the
file; others may read it while the buffer runs.
"""

import json
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import msgspec

from buffers.ledger.entries import LedgerSnapshot
from buffers.ledger.events import BY_BOOKS, Event
from streamrl.errors import ConfigError, OtherReleaseError, StorageError
from streamrl.types import DropReason

FORMAT = 7
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
    min_policy_version INTEGER, state TEXT, version INTEGER, header BLOB);
CREATE TABLE IF NOT EXISTS payload (prompt_index INTEGER PRIMARY KEY, segment INTEGER,
    position INTEGER, num_bytes INTEGER, checksum BLOB);
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
