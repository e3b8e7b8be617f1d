"""The journal: a buffer's state as it changes, in a storage that outlasts the process.

    SqliteStorage   `buffers.journal.sqlite`, a file and segments        zmq://
    RedisStorage    `buffers.redis.journal_storage`, the keys of a run   redis://

Invariant: after `commit` the storage holds exactly the ledger's state, however this process ends;
after a failed commit it holds the state of the last successful one, and the next commit writes the
same changes again. If only the payloads do not fit, freed ones are still deleted: the storage then
holds the state without the payloads of groups whose putters got no reply yet, and the next commit
writes them. A group without its payload counts as lost and is sampled again. Finished entries are
deleted, so there is no log to compact; only the events grow, by about sixty bytes per lease. Leases
get a new time to live on recovery, because clocks differ between processes.
"""

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from buffers.ledger.entries import BY_BOOKS, Entry, Event, LedgerSnapshot, State
from buffers.ledger.state import GROUP, BufferState, PayloadKey
from streamrl.errors import ConfigError, StorageError
from streamrl.types import DropReason, GroupHeader, SiblingHeader

log = logging.getLogger(__name__)

# What decoding a damaged value may raise.
DAMAGED = (msgspec.MsgspecError, ValueError, KeyError)
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
EntryRow = tuple[int, int, str, int, str, int, bytes | None, bytes | None, bytes | None]
"""prompt_index, number of its lease, lease_id, min_policy_version, state, version, header,
siblings, and by sibling the places of its payloads (None for a lost one); the last three are
msgpack."""
EventRow = tuple[int, int, str, str, bytes | None]
"""Number of the lease, prompt_index, lease_id, letters of its new states, response lengths."""

_Siblings = tuple[SiblingHeader, ...]


class JournalContent(NamedTuple):
    """What a storage holds; `next_number` is the number of the next lease's events."""

    settings: dict[str, str | int] | None
    snapshot: LedgerSnapshot
    rows: Iterable[EntryRow]
    next_number: int


class Changes(NamedTuple, Generic[Place]):
    """What one commit writes; None if nothing has changed.

    `closed` are prompts that have no entry any more. `added` are places of payloads that entries
    name now, `freed` those that they named before.
    """

    settings: Mapping[str, str | int] | None
    snapshot: LedgerSnapshot | None
    events: Sequence[EventRow]
    entries: Sequence[EntryRow]
    closed: Sequence[int]
    added: Mapping[PayloadKey, Place]
    freed: Sequence[Place]


class JournalStorage(Protocol[Place]):
    """Where a journal is kept; one process at a time writes it."""

    name: str
    """The storage's name, for people to read."""
    place_type: type[Place]

    def read(self) -> JournalContent:
        """Read everything but the events; changes nothing, so it may be repeated."""

    def recover(self, places: Mapping[PayloadKey, Place]) -> Mapping[PayloadKey, Any]:
        """Read the payloads, without those that are missing or damaged."""

    def stage(self, payloads: Sequence[Any]) -> list[Place]:
        """Write the payloads; `commit` must follow, and names or frees them.

        Raises:
            StorageError: nothing was written.
        """

    def commit(self, changes: Changes[Place]) -> frozenset[PayloadKey]:
        """Write all changes or nothing; the keys of `added` whose payload is gone by now.

        Raises:
            StorageError: nothing was written, and what was staged is freed.
        """

    def close(self) -> None: ...


def events_of(
    prompt_index: int, lease_id: str, letters: str, packed: bytes | None
) -> Iterator[Event]:
    """The transitions in one row. `packed` are the response lengths of a put."""
    lengths = msgspec.msgpack.decode(packed, type=tuple[int, ...]) if packed else ()
    # A lease is granted first; if there are lengths, the next transition is its put.
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


class JournalRows(NamedTuple, Generic[Place]):
    """The entries, the numbers of their leases' events, the free prompts, and the places of
    payloads."""

    entries: list[Entry]
    numbers: dict[str, int]
    free: list[int]
    places: dict[PayloadKey, Place]


def read_rows(rows: Iterable[EntryRow], place_type: type[Place]) -> JournalRows[Place]:
    """The leases expire at 0."""
    read: JournalRows[Place] = JournalRows([], {}, [], {})
    unpack_header = msgspec.msgpack.Decoder(GroupHeader).decode
    unpack_siblings = msgspec.msgpack.Decoder(_Siblings).decode
    unpack_places = msgspec.msgpack.Decoder(dict[int, place_type | None]).decode  # type: ignore[valid-type]
    for index, number, lease_id, min_policy_version, state, version, *packed in rows:
        if state == FREE:
            read.free.append(index)
            continue
        header, siblings, places = packed
        group = unpack_header(header) if header else None
        kept = unpack_siblings(siblings) if siblings else ()
        lease = (index, lease_id, min_policy_version, 0.0)
        read.entries.append(Entry(*lease, State(state), group, version, kept))
        read.numbers[lease_id] = number
        for sibling, place in unpack_places(places).items() if places else ():
            if place is not None:
                read.places[index, sibling] = place
    return read


class Journal(Generic[Place]):
    """Writes one `BufferState` to its storage, which it closes."""

    def __init__(self, storage: JournalStorage[Place], state: BufferState[Any]) -> None:
        self._storage = storage
        self._state = state
        self._ledger = state.ledger
        self._pending: list[tuple[int, Event]] = []
        self._snapshot: LedgerSnapshot | None = LedgerSnapshot()
        self._numbers: dict[str, int] = {}
        self._next_number = 0
        # By prompt and sibling number or GROUP: the payload that the storage has, and its place. So
        # a replaced payload is recognized.
        self._stored: dict[int, dict[int, tuple[Any, Place]]] = {}
        self._touched: set[int] = set()
        """Prompts whose changes the storage may lack."""
        self._settings: dict[str, str | int] | None = None

    def recover(self, settings: Mapping[str, str | int], now_s: float) -> None:
        """Restore the storage's state into the blank one, and record every change from now on.

        `settings` identify the run; those of `learner.` and `buffer.` may differ from the stored
        ones.

        Raises:
            ConfigError: the journal is of another run, or damaged.
            StorageError: it cannot be read at present; the state is still blank.
        """
        content = self._storage.read()
        has_new_bound = self._check_settings(content.settings, settings)
        try:
            read = read_rows(content.rows, self._storage.place_type)
        except DAMAGED as error:
            name = self._storage.name
            raise ConfigError(f"the journal {name} is damaged: {error!r}; move it away") from error
        payloads = self._storage.recover(read.places)
        self._next_number, self._numbers = content.next_number, read.numbers
        for (index, number), payload in payloads.items():
            stored = self._stored.setdefault(index, {})
            stored[number] = payload, read.places[index, number]
        self._snapshot = content.snapshot
        self._ledger.entries.subscribers.append(self._on_event)
        self._state.on_sibling = self._touched.add
        if content.snapshot != LedgerSnapshot():
            self._state.restore(content.snapshot, read.entries, read.free, payloads, now_s)
            books = msgspec.structs.asdict(self._ledger.books())
            columns = {name: books[name] for name in ("leased", "buffered", "taken", "trained")}
            name, version = self._storage.name, self._ledger.version
            log.info("recovered %s at version %d: %s", name, version, columns)
        if has_new_bound and self._ledger.learner_term:
            # This fences a learner that still uses the old bound.
            self._ledger.learner_term += 1
        self._settings = dict(settings)
        # Otherwise it is written with the first commit that succeeds.
        with suppress(StorageError):
            self.commit()

    def commit(self) -> None:
        """Write everything that changed since the last commit, at once.

        Raises:
            StorageError: nothing was written, or all but the new payloads, because they do not fit;
                the next call writes what is missing.
        """
        snapshot = self._state.snapshot()
        if not (self._touched or self._settings or snapshot != self._snapshot):
            return
        touched = sorted(self._touched)
        held = {index: self._held(index) for index in touched}
        named: dict[int, dict[int, tuple[Any, Place]]] = {}
        freed: list[Place] = []
        for index in touched:
            stored = self._stored.get(index, {})
            named[index] = {n: kept for n, kept in stored.items() if kept[0] is held[index].get(n)}
            freed += (place for n, (_, place) in stored.items() if n not in named[index])
        new = [(i, n) for i in touched for n in held[i] if n not in named[i]]
        try:
            places = self._storage.stage([held[i][n] for i, n in new])
        except StorageError:
            if not freed:
                raise
            new, places = [], []
        added: dict[PayloadKey, Place] = {}
        for (index, number), place in zip(new, places, strict=True):
            named[index][number] = held[index][number], place
            added[index, number] = place
        entries, closed = self._entries(named)
        changes = Changes(
            settings=self._settings,
            snapshot=None if snapshot == self._snapshot else snapshot,
            events=self._events(),
            entries=entries,
            closed=closed,
            added=added,
            freed=freed,
        )
        # A commit that fails may still have been applied; then the next one writes the totals
        # again.
        self._snapshot = None
        missing = self._storage.commit(changes)
        self._pending.clear()
        self._settings = None
        self._snapshot = snapshot
        self._stored.update(named)
        for index in [index for index, payloads in named.items() if not payloads]:
            del self._stored[index]
        self._touched.difference_update(i for i in touched if held[i].keys() == named[i].keys())
        are_unwritten = bool(self._touched)
        if missing:
            self._state.lose(missing)
        if are_unwritten:
            # Freed payloads may leave the room that they need.
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
        self._touched.add(event.prompt_index)

    def _held(self, prompt_index: int) -> dict[int, Any]:
        """The payloads that the prompt's entry has."""
        entry = self._ledger.entries.get(prompt_index)
        return {} if entry is None else {n: payload for n, (payload, _) in entry.payloads.items()}

    def _events(self) -> list[EventRow]:
        rows: dict[int, tuple[int, str, str, bytes | None]] = {}
        for number, event in self._pending:
            *_, states, lengths = rows.get(number, ("", None))
            if event.response_lengths:
                lengths = msgspec.msgpack.encode(event.response_lengths)
            states += LETTERS[event.reason or event.state]
            rows[number] = (event.prompt_index, event.lease_id, states, lengths)
        return [(number, *row) for number, row in rows.items()]

    def _entries(
        self, named: Mapping[int, Mapping[int, tuple[Any, Place]]]
    ) -> tuple[list[EntryRow], list[int]]:
        """The current entries of these prompts, and the prompts without one."""
        last = {event.prompt_index: event for _, event in self._pending}
        rows: list[EntryRow] = []
        closed = []
        for prompt_index, payloads in named.items():
            entry = self._ledger.entries.get(prompt_index)
            if entry is not None:
                places = {number: place for number, (_, place) in payloads.items()}
                rows.append(self._row(entry, places))
            elif last[prompt_index].frees_prompt:
                rows.append((prompt_index, -1, "", 0, FREE, -1, None, None, None))
            else:
                closed.append(prompt_index)
        return rows, closed

    def _row(self, entry: Entry, places: dict[int, Place]) -> EntryRow:
        pack = msgspec.msgpack.encode
        is_lost = entry.header is not None and not entry.payloads
        header = None if entry.header is None else pack(entry.header)
        siblings = pack(entry.siblings) if entry.siblings else None
        number = self._numbers[entry.lease_id]
        key = (entry.prompt_index, number, entry.lease_id, entry.min_policy_version)
        named = {GROUP: None} if is_lost else places
        packed = (header, siblings, pack(named) if named else None)
        return (*key, str(entry.state), entry.version, *packed)

    def _check_settings(
        self, known: Mapping[str, str | int] | None, settings: Mapping[str, str | int]
    ) -> bool:
        """Check the settings against the storage's `known` ones; whether the staleness bound
        differs."""
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
    """Whether both mean the same, also if they name one file in two ways."""
    are_texts = isinstance(then, str) and isinstance(now, str)
    return then == now or (are_texts and os.path.abspath(str(then)) == os.path.abspath(str(now)))
