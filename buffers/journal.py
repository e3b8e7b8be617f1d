"""The journal: a buffer's state on disk, written as it changes, in one SQLite file.

Invariant: after `commit` the file holds exactly the state that the ledger is in, whatever kills
this process; after a failed one it holds that of the last success, and the next writes the same
changes. What ends is deleted in the same transaction and its pages are used again, so there is no
log to compact; only the history grows, some thirty bytes a lease. `buffers.zmq_server` commits
before it answers. Leases get a new time to live on recovery: clocks do not survive.
"""

import fcntl
import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from buffers.account import Entry, Image, State
from buffers.history import Event
from buffers.journal_file import FREE, LETTERS, open_to_write, read_image, transaction
from buffers.state import BufferState
from streamrl.errors import ConfigError
from streamrl.types import DropReason, GroupHeader, Standing

log = logging.getLogger(__name__)

FORMAT = 1
_PUT_ENTRY = "INSERT OR REPLACE INTO entry VALUES (?, ?, ?, ?, ?, ?, ?)"
_PUT_HISTORY = """INSERT INTO history VALUES (?, ?, ?, ?)
    ON CONFLICT (number) DO UPDATE SET path = path || excluded.path"""


class Journal:
    """Writes one `BufferState`; one process at a time."""

    def __init__(
        self, path: Path, state: BufferState[bytes | memoryview], *, durability: str
    ) -> None:
        """`durability`: "process" survives the process's death, "machine" the machine's."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._state = state
        self._ledger = state.ledger
        self._pending: list[tuple[int, Event]] = []
        self._image = Image()
        self._standings: dict[str, Standing] = {}
        self._numbers: dict[str, int] = {}
        self._next_number = 0
        self._stored: dict[int, int] = {}
        self._lock = path.with_suffix(".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(f"{path} is in use by another buffer") from error
        self._db = open_to_write(path, durability)

    def recover(self, settings: Mapping[str, str | int], now_s: float) -> None:
        """Put the state that the file holds into the blank one, and record from here on.

        `settings` name the run; those of `learner.` and `buffer.` may differ from the file's.

        Raises:
            ConfigError: the journal is of another run.
        """
        has_new_bound = self._check_settings(settings)
        self._ledger.listen(self._hear)
        newest = self._db.execute("SELECT max(number) FROM history").fetchone()[0]
        self._next_number = 0 if newest is None else newest + 1
        self._image = read_image(self._db)
        if self._image != Image():
            self._restore(now_s)
        self._standings = self._read_standings()
        self._state.roster.standings = self._standings
        if has_new_bound and self._ledger.epoch:
            # Fences a learner that still counts with the old one.
            self._ledger.epoch += 1
        data = json.dumps({"format": FORMAT, **settings})
        with transaction(self._db, self._path):
            self._db.execute("INSERT OR REPLACE INTO settings VALUES (0, ?)", (data,))
        self.commit()

    def commit(self) -> None:
        """Everything that changed since the last commit, in one transaction.

        Raises:
            StorageError: nothing was written; the next call tries it again.
        """
        image, standings = self._ledger.image(), self._state.roster.standings
        if not self._pending and image == self._image and standings == self._standings:
            return
        with transaction(self._db, self._path):
            if standings != self._standings:
                self._write_standings(standings)
            stored, deleted = self._write(image)
        self._pending.clear()
        self._image, self._standings = image, standings
        self._stored.update(stored)
        for sequence in deleted:
            del self._stored[sequence]

    def close(self) -> None:
        self._db.close()
        self._lock.close()

    def _hear(self, event: Event) -> None:
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

    def _write(self, image: Image) -> tuple[dict[int, int], list[int]]:
        """Which payloads it has stored, with their leases' numbers, and which it has deleted."""
        lines: dict[int, tuple[int, str, str]] = {}
        last: dict[int, Event] = {}
        for number, event in self._pending:
            path = lines[number][2] if number in lines else ""
            letter = LETTERS[event.reason or event.state]
            lines[number] = (event.sequence, event.lease_id, path + letter)
            last[event.sequence] = event
        self._db.executemany(_PUT_HISTORY, ((number, *line) for number, line in lines.items()))
        for event in last.values():
            self._write_entry(event)
        data = msgspec.msgpack.encode(image)
        self._db.execute("INSERT OR REPLACE INTO image VALUES (0, ?)", (data,))
        return self._write_payloads(last)

    def _write_standings(self, standings: Mapping[str, Standing]) -> None:
        self._db.execute("DELETE FROM standing")
        rows = ((name, str(standing)) for name, standing in standings.items())
        self._db.executemany("INSERT INTO standing VALUES (?, ?)", rows)

    def _read_standings(self) -> dict[str, Standing]:
        rows = self._db.execute("SELECT generator_id, standing FROM standing")
        return {generator_id: Standing(standing) for generator_id, standing in rows}

    def _write_entry(self, event: Event) -> None:
        sequence = event.sequence
        entry = self._ledger.entry(sequence)
        if entry is not None:
            self._db.execute(_PUT_ENTRY, self._row(entry))
        elif _frees(event):
            self._db.execute(_PUT_ENTRY, (sequence, -1, "", 0, FREE, -1, None))
        else:
            self._db.execute("DELETE FROM entry WHERE sequence = ?", (sequence,))

    def _write_payloads(self, sequences: Iterable[int]) -> tuple[dict[int, int], list[int]]:
        stored, deleted = {}, []
        for sequence in sequences:
            entry = self._ledger.entry(sequence)
            if entry is not None and entry.header is not None:
                number = self._numbers[entry.lease_id]
                if self._stored.get(sequence) != number:
                    stored[sequence] = number
            elif sequence in self._stored:
                deleted.append(sequence)
        self._db.executemany(
            "INSERT OR REPLACE INTO payload VALUES (?, ?)",
            ((sequence, self._state.payload(sequence)) for sequence in stored),
        )
        self._db.executemany("DELETE FROM payload WHERE sequence = ?", ((s,) for s in deleted))
        return stored, deleted

    def _row(self, entry: Entry) -> tuple[object, ...]:
        header = None if entry.header is None else msgspec.msgpack.encode(entry.header)
        number = self._numbers[entry.lease_id]
        place = (entry.sequence, number, entry.lease_id, entry.floor)
        return (*place, str(entry.state), entry.version, header)

    def _restore(self, now_s: float) -> None:
        entries, free = [], []
        for sequence, number, lease_id, floor, state, version, header in self._db.execute(
            "SELECT * FROM entry"
        ):
            if state == FREE:
                free.append(sequence)
                continue
            known = header and msgspec.msgpack.decode(header, type=GroupHeader)
            entries.append(Entry(sequence, lease_id, floor, now_s, State(state), known, version))
            self._numbers[lease_id] = number
            if known:
                self._stored[sequence] = number
        payloads = dict(self._db.execute("SELECT * FROM payload"))
        self._state.restore(self._image, entries, free, payloads, now_s)
        books = msgspec.structs.asdict(self._ledger.books())
        told = {name: books[name] for name in ("leased", "buffered", "taken", "trained")}
        log.info("recovered %s at version %d: %s", self._path, self._ledger.version, told)

    def _check_settings(self, settings: Mapping[str, str | int]) -> bool:
        """Whether the staleness bound is another one than the file's."""
        row = self._db.execute("SELECT data FROM settings").fetchone()
        if row is None:
            return False
        known = json.loads(row[0])
        if known.pop("format") != FORMAT:
            raise ConfigError(f"{self._path} was written by another release of StreamRL")
        changed = {name: (known.get(name), now) for name, now in settings.items()}
        changed = {name: pair for name, pair in changed.items() if pair[0] != pair[1]}
        for name, (then, now) in changed.items():
            if not name.startswith(("learner.", "buffer.")):
                raise ConfigError(
                    f"{name}: is {now!r}, but the journal {self._path} is of a run with {then!r}: "
                    f"give this run a folder of its own, or move the journal away"
                )
            log.warning("%s was %s in the journal; from here on it is %s", name, then, now)
        return bool(changed)


def _frees(event: Event) -> bool:
    """Whether its sequence may be granted again."""
    return event.state == "dropped" and DropReason(event.reason or "").returns_sequence
