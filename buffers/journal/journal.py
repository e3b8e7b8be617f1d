"""The journal: a buffer's state on disk, written as it changes.

The ledger is in one SQLite file (`buffers.journal.schema`), the payloads are in append-only
segments beside it (`buffers.journal.segments`).

Invariant: after `commit` the disk holds exactly the ledger's state, however this process ends;
after a failed commit it holds the state of the last success, and the next commit writes the same
changes. Where only the payloads do not fit, what was freed is deleted all the same: then the disk
holds the state without the payloads of groups that nobody was told are kept, and the next commit
writes them. A payload is written before the row that names it, and its bytes are freed after the
row is gone: so a group without its payload was lost, and is sampled again.
What ends is deleted, so there is no log to compact; only the events grow, by about sixty bytes a
lease. Leases get a new time to live on recovery, because clocks differ between processes.
"""

import fcntl
import json
import logging
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TextIO

import msgspec

from buffers.journal.recovery import JournalContent, read_content
from buffers.journal.schema import (
    FORMAT,
    FREE,
    LETTERS,
    open_to_write,
    transaction,
    translated_errors,
)
from buffers.journal.segments import Place, Segments
from buffers.ledger.entries import LedgerSnapshot
from buffers.ledger.entry import Entry, State
from buffers.ledger.events import Event
from buffers.ledger.state import BufferState
from streamrl.errors import ConfigError, StorageError
from streamrl.types import DropReason, SchedulingState

log = logging.getLogger(__name__)

_PUT_ENTRY = "INSERT OR REPLACE INTO entry VALUES (?, ?, ?, ?, ?, ?, ?)"
_PUT_EVENTS = """INSERT INTO events VALUES (?, ?, ?, ?, ?)
    ON CONFLICT (number) DO UPDATE SET states = states || excluded.states,
    response_lengths = coalesce(excluded.response_lengths, response_lengths)"""


class _Stored(NamedTuple):
    """A group whose payload row is in the file: its lease's number, and its place if it is not
    lost."""

    number: int
    place: Place | None


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
        self._stored: dict[int, _Stored] = {}
        self._unwritten: set[int] = set()
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
            if entry.header is not None:
                is_kept = entry.prompt_index in payloads
                place = content.places[entry.prompt_index] if is_kept else None
                self._stored[entry.prompt_index] = _Stored(content.numbers[entry.lease_id], place)
        self._snapshot = content.snapshot
        self._scheduling_states = content.scheduling_states
        self._state.registry.scheduling_states = content.scheduling_states
        self._ledger.subscribe(self._on_event)
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
        if not (self._pending or self._unwritten or self._settings or has_changed):
            return
        last = {event.prompt_index: event for _, event in self._pending}
        groups = self._groups((*self._unwritten, *last))
        stored = {index: self._stored[index].number for index in last if index in self._stored}
        freed = dict(stored.items() - groups.items())
        try:
            added = self._write_payloads(dict(sorted(groups.items() - stored.items())))
        except StorageError:
            if not freed:
                raise
            added = {}
        try:
            with transaction(self._db, self._path):
                self._write_totals(snapshot, scheduling_states)
                self._write_events()
                self._write_entries(last.values())
                self._write_places(added, freed)
        except StorageError:
            self._segments.discard()
            raise
        self._pending.clear()
        self._settings = None
        self._snapshot, self._scheduling_states = snapshot, scheduling_states
        gone = [self._stored.pop(index) for index in freed]
        self._stored |= added
        self._unwritten = groups.keys() - self._stored.keys()
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

    def _groups(self, prompt_indices: Iterable[int]) -> dict[int, int]:
        """The numbers of the leases whose groups these prompts have."""
        entries = map(self._ledger.entry, prompt_indices)
        held = (entry for entry in entries if entry is not None and entry.header is not None)
        return {entry.prompt_index: self._numbers[entry.lease_id] for entry in held}

    def _write_payloads(self, new: Mapping[int, int]) -> dict[int, _Stored]:
        """Write the payloads of these groups, by prompt and number."""
        places = self._segments.write([self._state.payload(prompt_index) for prompt_index in new])
        groups = zip(new.items(), places, strict=True)
        return {prompt_index: _Stored(number, place) for (prompt_index, number), place in groups}

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

    def _write_entries(self, events: Iterable[Event]) -> None:
        """The present entry of each event's prompt, or none."""
        rows, deleted = [], []
        for event in events:
            prompt_index = event.prompt_index
            entry = self._ledger.entry(prompt_index)
            if entry is not None:
                rows.append(self._row(entry))
            elif _frees(event):
                rows.append((prompt_index, -1, "", 0, FREE, -1, None))
            else:
                deleted.append((prompt_index,))
        self._db.executemany(_PUT_ENTRY, rows)
        self._db.executemany("DELETE FROM entry WHERE prompt_index = ?", deleted)

    def _write_places(self, added: Mapping[int, _Stored], freed: Iterable[int]) -> None:
        gone = [(index,) for index in freed]
        self._db.executemany("DELETE FROM payload WHERE prompt_index = ?", gone)
        rows = [(index, *stored.place) for index, stored in added.items() if stored.place]
        self._db.executemany("INSERT OR REPLACE INTO payload VALUES (?, ?, ?, ?, ?)", rows)

    def _row(self, entry: Entry) -> tuple[object, ...]:
        header = None if entry.header is None else msgspec.msgpack.encode(entry.header)
        number = self._numbers[entry.lease_id]
        key = (entry.prompt_index, number, entry.lease_id, entry.min_policy_version)
        return (*key, str(entry.state), entry.version, header)

    def _restore(self, content: JournalContent, payloads: dict[int, bytes], now_s: float) -> None:
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


def _places(groups: Iterable[_Stored]) -> list[Place]:
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
