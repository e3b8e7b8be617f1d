"""The journal: a buffer's state on disk, written as it changes, in one SQLite file.

Invariant: after `commit` the file holds exactly the ledger's state, however this process ends;
after a failed commit it holds the state of the last success, and the next commit writes the same
changes. What ends is deleted in the same transaction and its pages are used again, so there is no
log to compact; only the events grow, by about sixty bytes a lease. Leases get a new time to live
on recovery, because clocks differ between processes.
"""

import fcntl
import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from buffers.journal.schema import (
    FORMAT,
    FREE,
    LETTERS,
    open_to_write,
    read_snapshot,
    transaction,
)
from buffers.ledger.entries import LedgerSnapshot
from buffers.ledger.entry import Entry, State
from buffers.ledger.events import Event
from buffers.ledger.state import BufferState
from streamrl.errors import ConfigError
from streamrl.types import DropReason, GroupHeader, SchedulingState

log = logging.getLogger(__name__)

_PUT_ENTRY = "INSERT OR REPLACE INTO entry VALUES (?, ?, ?, ?, ?, ?, ?)"
_PUT_EVENTS = """INSERT INTO events VALUES (?, ?, ?, ?, ?)
    ON CONFLICT (number) DO UPDATE SET states = states || excluded.states,
    response_lengths = coalesce(excluded.response_lengths, response_lengths)"""


class Journal:
    """Writes one `BufferState`; one process at a time."""

    def __init__(
        self, path: Path, state: BufferState[bytes | memoryview], *, durability: str
    ) -> None:
        """`durability`: a commit outlasts the death of the "process", or of the "machine"."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._state = state
        self._ledger = state.ledger
        self._pending: list[tuple[int, Event]] = []
        self._snapshot = LedgerSnapshot()
        self._scheduling_states: dict[str, SchedulingState] = {}
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
        """Restore the file's state into the blank one, and record every change from here on.

        `settings` identify the run; those of `learner.` and `buffer.` may differ from the file's.

        Raises:
            ConfigError: the journal is of another run.
        """
        has_new_bound = self._check_settings(settings)
        self._ledger.subscribe(self._on_event)
        newest = self._db.execute("SELECT max(number) FROM events").fetchone()[0]
        self._next_number = 0 if newest is None else newest + 1
        self._snapshot = read_snapshot(self._db)
        if self._snapshot != LedgerSnapshot():
            self._restore(now_s)
        self._scheduling_states = self._read_scheduling_states()
        self._state.registry.scheduling_states = self._scheduling_states
        if has_new_bound and self._ledger.learner_term:
            # Fences a learner that still uses the old bound.
            self._ledger.learner_term += 1
        data = json.dumps({"format": FORMAT, **settings})
        with transaction(self._db, self._path):
            self._db.execute("INSERT OR REPLACE INTO settings VALUES (0, ?)", (data,))
        self.commit()

    def commit(self) -> None:
        """Write everything that changed since the last commit, in one transaction.

        Raises:
            StorageError: nothing was written; the next call writes it.
        """
        snapshot, scheduling_states = (
            self._ledger.snapshot(),
            self._state.registry.scheduling_states,
        )
        if (
            not self._pending
            and snapshot == self._snapshot
            and scheduling_states == self._scheduling_states
        ):
            return
        with transaction(self._db, self._path):
            if scheduling_states != self._scheduling_states:
                self._write_scheduling_states(scheduling_states)
            stored, deleted = self._write(snapshot)
        self._pending.clear()
        self._snapshot, self._scheduling_states = snapshot, scheduling_states
        self._stored.update(stored)
        for prompt_index in deleted:
            del self._stored[prompt_index]

    def close(self) -> None:
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

    def _write(self, snapshot: LedgerSnapshot) -> tuple[dict[int, int], list[int]]:
        """Returns the payloads stored, with their leases' numbers, and those deleted."""
        rows: dict[int, tuple[int, str, str, bytes | None]] = {}
        last: dict[int, Event] = {}
        for number, event in self._pending:
            *_, states, lengths = rows.get(number, ("", None))
            if event.response_lengths:
                lengths = msgspec.msgpack.encode(event.response_lengths)
            states += LETTERS[event.reason or event.state]
            rows[number] = (event.prompt_index, event.lease_id, states, lengths)
            last[event.prompt_index] = event
        self._db.executemany(_PUT_EVENTS, ((number, *row) for number, row in rows.items()))
        for event in last.values():
            self._write_entry(event)
        data = msgspec.msgpack.encode(snapshot)
        self._db.execute("INSERT OR REPLACE INTO snapshot VALUES (0, ?)", (data,))
        return self._write_payloads(last)

    def _write_scheduling_states(self, scheduling_states: Mapping[str, SchedulingState]) -> None:
        self._db.execute("DELETE FROM scheduling_state")
        rows = (
            (name, str(scheduling_state)) for name, scheduling_state in scheduling_states.items()
        )
        self._db.executemany("INSERT INTO scheduling_state VALUES (?, ?)", rows)

    def _read_scheduling_states(self) -> dict[str, SchedulingState]:
        rows = self._db.execute("SELECT generator_id, scheduling_state FROM scheduling_state")
        return {
            generator_id: SchedulingState(scheduling_state)
            for generator_id, scheduling_state in rows
        }

    def _write_entry(self, event: Event) -> None:
        prompt_index = event.prompt_index
        entry = self._ledger.entry(prompt_index)
        if entry is not None:
            self._db.execute(_PUT_ENTRY, self._row(entry))
        elif _frees(event):
            self._db.execute(_PUT_ENTRY, (prompt_index, -1, "", 0, FREE, -1, None))
        else:
            self._db.execute("DELETE FROM entry WHERE prompt_index = ?", (prompt_index,))

    def _write_payloads(self, prompt_indices: Iterable[int]) -> tuple[dict[int, int], list[int]]:
        stored, deleted = {}, []
        for prompt_index in prompt_indices:
            entry = self._ledger.entry(prompt_index)
            if entry is not None and entry.header is not None:
                number = self._numbers[entry.lease_id]
                if self._stored.get(prompt_index) != number:
                    stored[prompt_index] = number
            elif prompt_index in self._stored:
                deleted.append(prompt_index)
        self._db.executemany(
            "INSERT OR REPLACE INTO payload VALUES (?, ?)",
            ((prompt_index, self._state.payload(prompt_index)) for prompt_index in stored),
        )
        self._db.executemany("DELETE FROM payload WHERE prompt_index = ?", ((s,) for s in deleted))
        return stored, deleted

    def _row(self, entry: Entry) -> tuple[object, ...]:
        header = None if entry.header is None else msgspec.msgpack.encode(entry.header)
        number = self._numbers[entry.lease_id]
        key = (entry.prompt_index, number, entry.lease_id, entry.min_policy_version)
        return (*key, str(entry.state), entry.version, header)

    def _restore(self, now_s: float) -> None:
        entries, free = [], []
        for (
            prompt_index,
            number,
            lease_id,
            min_policy_version,
            state,
            version,
            header,
        ) in self._db.execute("SELECT * FROM entry"):
            if state == FREE:
                free.append(prompt_index)
                continue
            known = header and msgspec.msgpack.decode(header, type=GroupHeader)
            entries.append(
                Entry(
                    prompt_index, lease_id, min_policy_version, now_s, State(state), known, version
                )
            )
            self._numbers[lease_id] = number
            if known:
                self._stored[prompt_index] = number
        payloads = dict(self._db.execute("SELECT * FROM payload"))
        self._state.restore(self._snapshot, entries, free, payloads, now_s)
        books = msgspec.structs.asdict(self._ledger.books())
        columns = {name: books[name] for name in ("leased", "buffered", "taken", "trained")}
        log.info("recovered %s at version %d: %s", self._path, self._ledger.version, columns)

    def _check_settings(self, settings: Mapping[str, str | int]) -> bool:
        """Whether the staleness bound differs from the file's."""
        row = self._db.execute("SELECT data FROM settings").fetchone()
        if row is None:
            return False
        known = json.loads(row[0])
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
    """Whether the event's prompt may be granted again."""
    return event.state == "dropped" and DropReason(event.reason or "").returns_prompt
