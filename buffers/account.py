"""The ledger's columns: every open sequence, every count, and the only code that changes them.

Invariant: the books close after every method here, because an entry enters and leaves a column in
one place each. `buffers.ledger` decides; this module only books. Nobody else imports it.
"""

import heapq
from collections import Counter
from collections.abc import Iterator
from enum import StrEnum

from msgspec import Struct

from streamrl.types import Books, DropReason, GroupHeader


class State(StrEnum):
    LEASED = "leased"
    BUFFERED = "buffered"
    TAKEN = "taken"
    TRAINED = "trained"


class Entry(Struct):
    """One open sequence; `floor` is the oldest policy version that may sample its tokens."""

    sequence: int
    lease_id: str
    floor: int
    expires_at_s: float
    state: State = State.LEASED
    header: GroupHeader | None = None


def header_of(entry: Entry) -> GroupHeader:
    assert entry.header is not None, "only a LEASED entry has no header"
    return entry.header


class Account:
    """Open entries by sequence and by lease, the position in the prompt stream, and the counts."""

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}
        self._sequence_of: dict[str, int] = {}
        self._counts: Counter[State] = Counter()
        self._dropped: Counter[DropReason] = Counter()
        self._granted = 0
        self._acknowledged = 0
        self._returned: list[int] = []
        self._next_sequence = 0
        self._revision = 0
        self._freed: list[int] = []

    def __iter__(self) -> Iterator[Entry]:
        return iter(tuple(self._entries.values()))

    def __getitem__(self, sequence: int) -> Entry:
        return self._entries[sequence]

    def get(self, sequence: int) -> Entry | None:
        return self._entries.get(sequence)

    def find(self, lease_id: str) -> Entry | None:
        """The open entry of this lease."""
        sequence = self._sequence_of.get(lease_id)
        return None if sequence is None else self._entries[sequence]

    def count(self, *states: State) -> int:
        return sum(self._counts[state] for state in states)

    def grant(self, lease_id: str, floor: int, expires_at_s: float) -> Entry:
        """A new lease on the first sequence that is free: one given back, else the next."""
        if self._returned:
            sequence = heapq.heappop(self._returned)
        else:
            sequence = self._next_sequence
            self._next_sequence += 1
        entry = Entry(sequence, lease_id, floor, expires_at_s)
        self._entries[sequence] = entry
        self._sequence_of[lease_id] = sequence
        self._counts[State.LEASED] += 1
        self._granted += 1
        self._revision += 1
        return entry

    def move(self, entry: Entry, state: State) -> None:
        self._counts[entry.state] -= 1
        self._counts[state] += 1
        entry.state = state
        self._revision += 1

    def acknowledge(self, entry: Entry) -> None:
        """The entry is contained in a durable checkpoint."""
        self._close(entry)
        self._acknowledged += 1

    def drop(self, entry: Entry, reason: DropReason) -> None:
        self._close(entry)
        self._dropped[reason] += 1
        if reason.returns_sequence:
            heapq.heappush(self._returned, entry.sequence)

    def drain_freed(self) -> tuple[int, ...]:
        """Sequences closed since the last call that had a payload."""
        freed = tuple(self._freed)
        self._freed.clear()
        return freed

    def books(self, epoch: int) -> Books:
        still_open = [e.sequence for e in self._entries.values() if e.state is not State.TRAINED]
        return Books(
            granted=self._granted,
            leased=self._counts[State.LEASED],
            buffered=self._counts[State.BUFFERED],
            taken=self._counts[State.TAKEN],
            trained=self._counts[State.TRAINED],
            acknowledged=self._acknowledged,
            dropped={reason: count for reason, count in self._dropped.items() if count},
            next_sequence=self._next_sequence,
            revision=self._revision,
            epoch=epoch,
            open_sequences=tuple(sorted([*still_open, *self._returned])),
        )

    def reconcile(self, books: Books) -> None:
        """Come to the account that a learner's checkpoint carries, from a later one.

        What the checkpoint calls finished is acknowledged here too. Every sequence that it does
        not call finished, and that nobody holds, is granted again: what became of it since belongs
        to a lost history.
        """
        unfinished = set(books.open_sequences)
        for entry in self:
            if entry.sequence < books.next_sequence and entry.sequence not in unfinished:
                self.acknowledge(entry)
        unfinished.update(range(books.next_sequence, self._next_sequence))
        self._returned = sorted(unfinished - self._entries.keys())
        self._next_sequence = max(self._next_sequence, books.next_sequence)

    def adopt(self, books: Books) -> None:
        """Continue the account of a checkpoint that is later than this one.

        This one may be blank, or a restored copy; what was in flight is orphaned.
        """
        for entry in self:
            self._close(entry)
        self._granted = books.granted
        self._acknowledged = books.acknowledged + books.trained
        self._dropped = Counter(books.dropped)
        self._dropped[DropReason.ORPHANED] += books.leased + books.buffered + books.taken
        self._returned = list(books.open_sequences)
        self._next_sequence = books.next_sequence
        self._revision = max(self._revision, books.revision)

    @property
    def revision(self) -> int:
        return self._revision

    def _close(self, entry: Entry) -> None:
        self._revision += 1
        self._counts[entry.state] -= 1
        del self._entries[entry.sequence]
        del self._sequence_of[entry.lease_id]
        if entry.header is not None:
            self._freed.append(entry.sequence)
