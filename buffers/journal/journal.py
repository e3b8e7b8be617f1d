"""The journal: a buffer's state as it changes, in a storage that outlasts the process.

    SqliteStorage   `buffers.journal.sqlite`, a file and segments        zmq://
    RedisStorage    `buffers.redis.journal_storage`, the keys of a run   redis://

Invariant: after `commit` the storage holds exactly the ledger's state, however this process ends;
after a failed commit it holds the state of the last success, and the next commit writes the same
changes. Where only the payloads do not fit, what was freed is deleted all the same: then the
storage holds the state without the payloads of groups that nobody was told are kept, and the next
commit writes them. A group without its payload was lost, and is sampled again. What ends is
deleted, so there is no log to compact; only the events grow, by about sixty bytes a lease. Leases
get a new time to live on recovery, because clocks differ between processes.
"""

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

import msgspec

from buffers.ledger.entries import BY_BOOKS, Entry, Event, LedgerSnapshot, State
from buffers.ledger.state import GROUP, BufferState, PayloadKey
from streamrl.errors import ConfigError, StorageError
from streamrl.types import DropReason, GroupHeader, SchedulingState, SiblingHeader

log = logging.getLogger(__name__)

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
_GRANTED = LETTERS["leased"]

Place = TypeVar("Place")
EntryRow = tuple[int, int, str, int, str, int, bytes | None, bytes | None]
"""prompt_index, number of its lease, lease_id, min_policy_version, state, version, header, finished
siblings."""
EventRow = tuple[int, int, str, str, bytes | None]
"""number of the lease, prompt_index, lease_id, the letters of its new states, lengths."""


_Siblings = tuple[SiblingHeader, ...]
Owner: TypeAlias = int | SiblingHeader


class JournalContent(NamedTuple, Generic[Place]):
    """What a storage holds; `numbers` and `next_number` are those of the leases' events."""

    settings: dict[str, str | int] | None
    snapshot: LedgerSnapshot
    entries: list[Entry]
    numbers: dict[str, int]
    free: list[int]
    places: dict[PayloadKey, Place]
    scheduling_states: dict[str, SchedulingState]
    next_number: int


class Changes(NamedTuple, Generic[Place]):
    """What one commit writes; None where nothing has changed.

    `closed` are prompts without an entry from here on. `added` and `freed` are the places of
    payloads; one may be in both, as of a group that follows another. What was lost has no place.
    """

    settings: Mapping[str, str | int] | None
    snapshot: LedgerSnapshot | None
    scheduling_states: Mapping[str, SchedulingState] | None
    events: Sequence[EventRow]
    entries: Sequence[EntryRow]
    closed: Sequence[int]
    added: Mapping[PayloadKey, Place]
    freed: Mapping[PayloadKey, Place | None]


class JournalStorage(Protocol[Place]):
    """Where a journal is; one process at a time writes it."""

    name: str
    """Of the storage, for people to read."""

    def read(self, now_s: float) -> JournalContent[Place]:
        """Everything but the events; changes nothing, so it may be repeated. Leases expire at
        `now_s`."""

    def recover(self, places: Mapping[PayloadKey, Place]) -> Mapping[PayloadKey, Any]:
        """The payloads, without those that are missing or damaged."""

    def stage(self, payloads: Sequence[Any]) -> list[Place]:
        """Write the payloads; `commit` must follow, which names them or frees them again.

        Raises:
            StorageError: nothing was written.
        """

    def commit(self, changes: Changes[Place]) -> frozenset[PayloadKey]:
        """Write all of it, or nothing; the keys of `added` whose payload is gone by now.

        Raises:
            StorageError: nothing was written, and what was staged is freed.
        """

    def close(self) -> None: ...


def events_of(
    prompt_index: int, lease_id: str, letters: str, packed: bytes | None
) -> Iterator[Event]:
    """The transitions of one row. `packed` are the lengths of the responses that were put."""
    lengths = msgspec.msgpack.decode(packed, type=tuple[int, ...]) if packed else ()
    # A lease is granted first; what follows, if it has lengths, is its put.
    put = int(letters.startswith(_GRANTED))
    for place, letter in enumerate(letters):
        yield _event(prompt_index, lease_id, letter, lengths if place == put else ())


def _event(prompt_index: int, lease_id: str, letter: str, lengths: tuple[int, ...]) -> Event:
    word = _WORDS[letter]
    if isinstance(word, DropReason):
        return Event(prompt_index, "dropped", str(word), lease_id, lengths)
    if word == BY_BOOKS:
        return Event(prompt_index, "acknowledged", word, lease_id)
    return Event(prompt_index, word, None, lease_id, lengths)


def read_entries(
    rows: Iterable[EntryRow], now_s: float
) -> tuple[list[Entry], dict[str, int], list[int]]:
    """The entries, the numbers of their leases, and the prompts that are free."""
    entries, numbers, free = [], {}, []
    for prompt_index, number, lease_id, min_policy_version, state, version, *packed in rows:
        if state == FREE:
            free.append(prompt_index)
            continue
        header, siblings = packed
        group = msgspec.msgpack.decode(header, type=GroupHeader) if header else None
        kept = msgspec.msgpack.decode(siblings, type=_Siblings) if siblings else ()
        lease = (prompt_index, lease_id, min_policy_version, now_s)
        entries.append(Entry(*lease, State(state), group, version, kept))
        numbers[lease_id] = number
    return entries, numbers, free


class _Stored(NamedTuple, Generic[Place]):
    """A payload that the storage names: whose it is, and its place if it is not lost.

    A group's has the number of its lease, a sibling's what is known of it when it was put.
    """

    owner: Owner
    place: Place | None


class Journal(Generic[Place]):
    """Writes one `BufferState` to its storage, which it closes."""

    def __init__(self, storage: JournalStorage[Place], state: BufferState[Any]) -> None:
        self._storage = storage
        self._state = state
        self._ledger = state.ledger
        self._pending: list[tuple[int, Event]] = []
        self._snapshot = LedgerSnapshot()
        self._scheduling_states: dict[str, SchedulingState] = {}
        self._numbers: dict[str, int] = {}
        self._next_number = 0
        self._stored: dict[int, dict[int, _Stored[Place]]] = {}
        self._unwritten: set[int] = set()
        self._with_sibling: set[int] = set()
        self._settings: dict[str, str | int] | None = None

    def recover(self, settings: Mapping[str, str | int], now_s: float) -> None:
        """Restore the storage's state into the blank one, and record every change from here on.

        `settings` identify the run; those of `learner.` and `buffer.` may differ from what is kept.

        Raises:
            ConfigError: the journal is of another run.
            StorageError: it cannot be read now; the state is still blank.
        """
        content = self._storage.read(now_s)
        has_new_bound = self._check_settings(content.settings, settings)
        payloads = self._storage.recover(content.places)
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
        self._settings = dict(settings)
        # Else it is written with the first commit that succeeds.
        with suppress(StorageError):
            self.commit()

    def commit(self) -> None:
        """Write everything that changed since the last commit, at once.

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
        touched = {*last, *self._with_sibling, *self._unwritten}
        held, stored = self._held(touched), self._stored_of(touched)
        freed = dict(stored.items() - held.items())
        try:
            added = self._stage(dict(sorted(held.items() - stored.items())))
        except StorageError:
            if not freed:
                raise
            added = {}
        entries, closed = self._entries(last)
        changes = Changes(
            settings=self._settings,
            snapshot=None if snapshot == self._snapshot else snapshot,
            scheduling_states=None
            if scheduling_states == self._scheduling_states
            else scheduling_states,
            events=self._events(),
            entries=entries,
            closed=closed,
            added={key: stored.place for key, stored in added.items() if stored.place is not None},
            freed={
                (index, sibling): self._stored[index][sibling].place for index, sibling in freed
            },
        )
        missing = self._storage.commit(changes)
        self._pending.clear()
        self._with_sibling.clear()
        self._settings = None
        self._snapshot, self._scheduling_states = snapshot, scheduling_states
        self._note(added, freed)
        self._unwritten = {index for index, _ in held.keys() - self._stored_of(touched).keys()}
        if missing:
            self._state.lose(missing)
        if self._unwritten:
            # What was freed may be the room that they need.
            self.commit()

    def close(self) -> None:
        self._storage.close()

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

    def _owners(self, entry: Entry) -> dict[PayloadKey, Owner]:
        """The payloads that the entry has, and whose they are. See `_Stored`."""
        index = entry.prompt_index
        if entry.header is not None:
            return {(index, GROUP): self._numbers[entry.lease_id]}
        return {(index, sibling.number): sibling for sibling in entry.siblings}

    def _held(self, prompt_indices: Iterable[int]) -> dict[PayloadKey, Owner]:
        """Those that these prompts have."""
        entries = (entry for entry in map(self._ledger.entry, prompt_indices) if entry is not None)
        return {key: owner for entry in entries for key, owner in self._owners(entry).items()}

    def _stored_of(self, prompt_indices: Iterable[int]) -> dict[PayloadKey, Owner]:
        """Those of these prompts that the storage names."""
        return {
            (index, sibling): payload.owner
            for index in prompt_indices
            for sibling, payload in self._stored.get(index, {}).items()
        }

    def _note(
        self, added: Mapping[PayloadKey, _Stored[Place]], freed: Iterable[PayloadKey]
    ) -> None:
        """What the storage names from here on."""
        for index, sibling in freed:
            del self._stored[index][sibling]
            if not self._stored[index]:
                del self._stored[index]
        for (index, sibling), payload in added.items():
            self._stored.setdefault(index, {})[sibling] = payload

    def _stage(self, new: Mapping[PayloadKey, Owner]) -> dict[PayloadKey, _Stored[Place]]:
        """Write these payloads, whose owners are given."""
        places = self._storage.stage([self._state.payload(key) for key in new])
        payloads = zip(new.items(), places, strict=True)
        return {key: _Stored(owner, place) for (key, owner), place in payloads}

    def _events(self) -> list[EventRow]:
        rows: dict[int, tuple[int, str, str, bytes | None]] = {}
        for number, event in self._pending:
            *_, states, lengths = rows.get(number, ("", None))
            if event.response_lengths:
                lengths = msgspec.msgpack.encode(event.response_lengths)
            states += LETTERS[event.reason or event.state]
            rows[number] = (event.prompt_index, event.lease_id, states, lengths)
        return [(number, *row) for number, row in rows.items()]

    def _entries(self, last: Mapping[int, Event]) -> tuple[list[EntryRow], list[int]]:
        """The present entry of each prompt that has a last event or another sibling, and the
        prompts that have none."""
        rows: list[EntryRow] = []
        closed = []
        for prompt_index in (*last, *(self._with_sibling - last.keys())):
            entry = self._ledger.entry(prompt_index)
            if entry is not None:
                rows.append(self._row(entry))
            elif _frees(last[prompt_index]):
                rows.append((prompt_index, -1, "", 0, FREE, -1, None, None))
            else:
                closed.append(prompt_index)
        return rows, closed

    def _row(self, entry: Entry) -> EntryRow:
        header = None if entry.header is None else msgspec.msgpack.encode(entry.header)
        number = self._numbers[entry.lease_id]
        key = (entry.prompt_index, number, entry.lease_id, entry.min_policy_version)
        siblings = msgspec.msgpack.encode(entry.siblings) if entry.siblings else None
        return (*key, str(entry.state), entry.version, header, siblings)

    def _restore(
        self, content: JournalContent[Place], payloads: Mapping[PayloadKey, Any], now_s: float
    ) -> None:
        self._state.restore(content.snapshot, content.entries, content.free, payloads, now_s)
        books = msgspec.structs.asdict(self._ledger.books())
        columns = {name: books[name] for name in ("leased", "buffered", "taken", "trained")}
        name, version = self._storage.name, self._ledger.version
        log.info("recovered %s at version %d: %s", name, version, columns)

    def _check_settings(
        self, known: Mapping[str, str | int] | None, settings: Mapping[str, str | int]
    ) -> bool:
        """Whether the staleness bound differs from the `known` one, which is the storage's."""
        if known is None:
            return False
        changed = {name: (known.get(name), now) for name, now in settings.items()}
        changed = {name: pair for name, pair in changed.items() if not _is_same(*pair)}
        for name, (then, now) in changed.items():
            if not name.startswith(("learner.", "buffer.")):
                raise ConfigError(
                    f"{name}: is {now!r}, but the journal {self._storage.name} is of a run with "
                    f"{then!r}: set it back, or start the run anew with --new"
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
