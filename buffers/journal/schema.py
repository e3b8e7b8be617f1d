"""The journal's file: its tables, how it is opened, and what a reader finds in it.

    image     the scalars of the ledger (one row)
    entry     every prompt that is open: its lease, its state, its header; or that it is free
    payload   the bytes of every group that is held
    scheduling state  what a person has ordered of a generator
    history   one short line a lease: the states it went through, one letter each; kept for good

Invariant: every change is one transaction, and a failed one has changed nothing. `Journal` writes,
`buffers.audit` reads, also while the buffer runs.
"""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import msgspec

from buffers.ledger.entries import LedgerSnapshot
from buffers.ledger.events import BY_BOOKS, Event
from streamrl.errors import ConfigError, OtherReleaseError, StorageError
from streamrl.types import DropReason

FORMAT = 2
MAX_LOG_BYTES = 64 * 2**20
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
    DropReason.MALFORMED: "m",
    DropReason.EXPIRED: "e",
    DropReason.RELEASED: "r",
    DropReason.ORPHANED: "o",
}
_WORDS = {letter: word for word, letter in LETTERS.items()}

# What another reader, a full disk or a failing one says; the same statement may work later.
_PASSING = {
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
CREATE TABLE IF NOT EXISTS payload (prompt_index INTEGER PRIMARY KEY, data BLOB);
CREATE TABLE IF NOT EXISTS scheduling_state (generator_id TEXT PRIMARY KEY, scheduling_state TEXT);
CREATE TABLE IF NOT EXISTS history (number INTEGER PRIMARY KEY, prompt_index INTEGER, lease_id TEXT,
    path TEXT);
"""


def journal_path(run: Path) -> Path:
    """Where the buffer of a run keeps its journal."""
    return run / "buffer" / "journal.sqlite"


@contextmanager
def open_to_read(path: Path) -> Iterator[sqlite3.Connection]:
    """One moment of the file, whatever is written meanwhile.

    Raises:
        OtherReleaseError: the file has another format.
    """
    if not path.exists():
        raise ConfigError(f"{path} does not exist: the run has no journal (buffer.journal)")
    with (
        explained(path),
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


def read_history(db: sqlite3.Connection) -> Iterator[Event]:
    """Every transition of every lease, those of one prompt in their order."""
    for prompt_index, lease_id, letters in db.execute(
        "SELECT prompt_index, lease_id, path FROM history ORDER BY number"
    ):
        for letter in letters:
            word = _WORDS[letter]
            if isinstance(word, DropReason):
                yield Event(prompt_index, "dropped", str(word), lease_id)
            elif word == BY_BOOKS:
                yield Event(prompt_index, "acknowledged", word, lease_id)
            else:
                yield Event(prompt_index, word, None, lease_id)


def read_snapshot(db: sqlite3.Connection) -> LedgerSnapshot:
    row = db.execute("SELECT data FROM snapshot").fetchone()
    return msgspec.msgpack.decode(row[0], type=LedgerSnapshot) if row else LedgerSnapshot()


def open_to_write(path: Path, durability: str) -> sqlite3.Connection:
    """The file with its tables; one of another format is left as it is, and refused."""
    if path.exists():
        with open_to_read(path):
            pass
    with explained(path):
        # The server is made in one thread and serves in another, never in two at a time.
        db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute(f"PRAGMA synchronous = {'FULL' if durability == 'machine' else 'NORMAL'}")
        db.execute(f"PRAGMA journal_size_limit = {MAX_LOG_BYTES}")
        db.execute("PRAGMA wal_autocheckpoint = 4000")
        db.executescript(_SCHEMA)
    return db


@contextmanager
def transaction(db: sqlite3.Connection, path: Path) -> Iterator[None]:
    """All of the block or nothing of it."""
    with explained(path):
        db.execute("BEGIN IMMEDIATE")
        try:
            yield
            db.execute("COMMIT")
        except sqlite3.Error:
            with suppress(sqlite3.Error):
                db.execute("ROLLBACK")
            # On a full disk, the space of the log may be what is missing.
            with suppress(sqlite3.Error):
                db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            raise


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """SQLite's errors as ours."""
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in _PASSING:
            raise StorageError(f"the journal {path} cannot be written: {error}") from error
        raise ConfigError(f"the journal {path} cannot be used: {error}; move it away") from error
