"""The ledger's columns: every open prompt, every count, and the only code that changes them.

Invariant: the books close after every method here, because an entry enters and leaves a column in
one place each, and `subscribers` are called there. `Ledger` decides; this module counts.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from msgspec import Struct

from buffers.ledger.columns import Columns
from buffers.ledger.entry import Entry, State, response_lengths
from buffers.ledger.events import BY_BOOKS, Event
from buffers.ledger.response_counter import ResponseCounter
from streamrl.types import Books, DropReason, RefusalReason, ResponseLengths
from streamrl.types.index_ranges import IndexRangeSet

# A lease reasserted that leaves more prompts than this free is invalid; no buffer forgets so many.
MAX_GAP = 100_000


class LedgerSnapshot(Struct, frozen=True, kw_only=True):
    """The totals of a ledger: all of its state but the entries.

    `unseen` are the leases that count as granted because a learner's books contain them. `lengths`
    are counted here alone, so books that are adopted do not change them. `final_version` is None
    until a learner has attached, which says where the run ends.
    """

    version: int = 0
    learner_term: int = 0
    learner_id: str = ""
    finished: bool = False
    draining: bool = False
    refused: dict[RefusalReason, int] = {}
    granted: int = 0
    acknowledged: int = 0
    dropped: dict[DropReason, int] = {}
    next_prompt_index: int = 0
    revision: int = 0
    unseen: int = 0
    lengths: ResponseLengths = ResponseLengths()
    final_version: int | None = None


class Entries:
    """Open entries by prompt and by lease, the position in the prompt stream, and the counts."""

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}
        self._prompt_index_of: dict[str, int] = {}
        self.columns = Columns()
        self._dropped: Counter[DropReason] = Counter()
        self._granted = 0
        self._acknowledged = 0
        self._free: list[int] = []
        self._open = IndexRangeSet()
        self._next_prompt_index = 0
        self.revision = 0
        self._unseen = 0
        self._freed: list[int] = []
        self.responses = ResponseCounter()
        self.subscribers: list[Callable[[Event], None]] = []

    def __iter__(self) -> Iterator[Entry]:
        return iter(tuple(self._entries.values()))

    def __getitem__(self, prompt_index: int) -> Entry:
        return self._entries[prompt_index]

    def get(self, prompt_index: int) -> Entry | None:
        return self._entries.get(prompt_index)

    def find(self, lease_id: str) -> Entry | None:
        """The open entry of this lease."""
        prompt_index = self._prompt_index_of.get(lease_id)
        return None if prompt_index is None else self._entries[prompt_index]

    def count(self, *states: State) -> int:
        return sum(self.columns.count(state) for state in states)

    @property
    def in_flight(self) -> int:
        return self.count(State.LEASED, State.BUFFERED, State.TAKEN)

    def grant(self, lease_id: str, min_policy_version: int, expires_at_s: float) -> Entry:
        """A new lease on the first free prompt: one that was given back, else the next."""
        if self._free:
            prompt_index = self._free.pop(0)
        else:
            prompt_index = self._next_prompt_index
            self._next_prompt_index += 1
        return self._enter(Entry(prompt_index, lease_id, min_policy_version, expires_at_s))

    def grant_again(self, entry: Entry) -> bool:
        """A lease that its holder reasserts and this ledger forgot, if its prompt is free."""
        prompt_index = entry.prompt_index
        position = bisect_left(self._free, prompt_index)
        if position < len(self._free) and self._free[position] == prompt_index:
            del self._free[position]
        elif 0 <= prompt_index - self._next_prompt_index < MAX_GAP - len(self._free):
            for skipped in range(self._next_prompt_index, prompt_index):
                self._free.append(skipped)
                self._open.add(skipped)
                self._notify(skipped, "dropped", reason=DropReason.ORPHANED)
            self._next_prompt_index = prompt_index + 1
        else:
            return False
        self._enter(entry)
        return True

    def _enter(self, entry: Entry) -> Entry:
        self.revision += 1
        self._entries[entry.prompt_index] = entry
        self._prompt_index_of[entry.lease_id] = entry.prompt_index
        self._open.add(entry.prompt_index)
        self.columns.add(entry)
        self._granted += 1
        self._notify(entry.prompt_index, entry.state, entry.lease_id)
        return entry

    def move(self, entry: Entry, state: State, version: int = -1) -> None:
        self.revision += 1
        lengths = response_lengths(entry)
        if is_put := entry.state is State.LEASED:
            self.responses.put(lengths)
        elif entry.state is State.TRAINED:
            self.responses.give_back(lengths)
        if state is State.TRAINED:
            self.responses.train(lengths)
        self.columns.remove(entry)
        entry.state = state
        entry.version = version
        self.columns.add(entry)
        self._set_open(entry.prompt_index, state is not State.TRAINED)
        self._notify(entry.prompt_index, state, entry.lease_id, lengths=lengths if is_put else ())

    def acknowledge(self, entry: Entry, *, by_books: bool = False) -> None:
        """The entry is contained in a durable checkpoint."""
        if entry.state is not State.TRAINED:
            self.responses.train(response_lengths(entry))
        self._close(entry)
        self._open.discard(entry.prompt_index)
        self._acknowledged += 1
        reason = BY_BOOKS if by_books else None
        self._notify(entry.prompt_index, "acknowledged", entry.lease_id, reason)

    def drop(self, entry: Entry, reason: DropReason, lengths: Sequence[int] = ()) -> None:
        """`lengths` are those of a group's responses that are dropped instead of taken in."""
        self.responses.put(lengths)
        self.responses.drop(lengths or response_lengths(entry), reason)
        self._close(entry)
        self._dropped[reason] += 1
        self._set_open(entry.prompt_index, reason.returns_prompt)
        if reason.returns_prompt:
            insort(self._free, entry.prompt_index)
        self._notify(entry.prompt_index, "dropped", entry.lease_id, reason, tuple(lengths))

    def drain_freed(self) -> tuple[int, ...]:
        """Prompts with a payload that were closed since the last call."""
        freed = tuple(self._freed)
        self._freed.clear()
        return freed

    def books(self, learner_term: int) -> Books:
        return Books(
            granted=self._granted,
            leased=self.columns.count(State.LEASED),
            buffered=self.columns.count(State.BUFFERED),
            taken=self.columns.count(State.TAKEN),
            trained=self.columns.count(State.TRAINED),
            acknowledged=self._acknowledged,
            dropped={reason: count for reason, count in self._dropped.items() if count},
            next_prompt_index=self._next_prompt_index,
            revision=self.revision,
            learner_term=learner_term,
            open_ranges=self._open.frozen(),
        )

    def follows(self, books: Books, learner_term: int) -> bool:
        """Whether this ledger may be at a later state than `books`; it has this `learner_term`.

        A restored copy may have as many changes, but other ones: it lacks an attach, or a drop.
        """
        is_later = (learner_term, self.revision) >= (books.learner_term, books.revision)
        return is_later and all(self._dropped[why] >= n for why, n in books.dropped.items())

    def reconcile(self, books: Books) -> None:
        """Go back from a later state to the books of a learner's checkpoint.

        What is finished in the books is acknowledged here too. Every other prompt without an open
        entry is free again: its later events are of steps that the checkpoint does not contain.
        """
        unfinished = set(books.open_prompt_indices)
        unfinished.update(range(books.next_prompt_index, self._next_prompt_index))
        for entry in self:
            if entry.prompt_index not in unfinished:
                self.acknowledge(entry, by_books=True)
        free, was_free = unfinished - self._entries.keys(), set(self._free)
        for prompt_index in sorted(was_free - unfinished):
            self._notify(prompt_index, "acknowledged", reason=BY_BOOKS)
        if books.next_prompt_index > self._next_prompt_index:
            self._notify(books.next_prompt_index - 1, "acknowledged", reason=BY_BOOKS)
        for prompt_index in sorted(free - was_free):
            self._notify(prompt_index, "dropped", reason=DropReason.ORPHANED)
        self._set_free(free)
        self._next_prompt_index = max(self._next_prompt_index, books.next_prompt_index)

    def adopt(self, books: Books) -> None:
        """Continue from the books of a checkpoint that are later than this ledger.

        What was in flight in them is orphaned; what is open in both, because its holder reasserted
        it or a restored copy has it, counts as granted once more.
        """
        self.reconcile(books)
        seen = self._granted - self._unseen
        self._granted = books.granted + len(self._entries)
        self._unseen = self._granted - seen
        self._acknowledged = books.acknowledged + books.trained
        self._dropped = Counter(books.dropped)
        self._dropped[DropReason.ORPHANED] += books.leased + books.buffered + books.taken
        self.revision = max(self.revision, books.revision)

    def snapshot(
        self,
        version: int,
        learner_term: int,
        learner_id: str,
        finished: bool,
        draining: bool,
        refused: Counter[RefusalReason],
        final_version: int | None,
    ) -> LedgerSnapshot:
        return LedgerSnapshot(
            version=version,
            learner_term=learner_term,
            learner_id=learner_id,
            finished=finished,
            draining=draining,
            refused=dict(refused),
            granted=self._granted,
            acknowledged=self._acknowledged,
            dropped={reason: count for reason, count in self._dropped.items() if count},
            next_prompt_index=self._next_prompt_index,
            revision=self.revision,
            unseen=self._unseen,
            lengths=self.responses.frozen(),
            final_version=final_version if learner_term else None,
        )

    def restore(
        self, snapshot: LedgerSnapshot, entries: Iterable[Entry], free: Iterable[int]
    ) -> None:
        """Continue, in a blank state, where a journal ends."""
        for entry in entries:
            self._entries[entry.prompt_index] = entry
            self._prompt_index_of[entry.lease_id] = entry.prompt_index
            self.columns.add(entry)
        self._dropped = Counter(snapshot.dropped)
        self._granted = snapshot.granted
        self._acknowledged = snapshot.acknowledged
        self._set_free(free)
        self._next_prompt_index = snapshot.next_prompt_index
        self.revision = snapshot.revision
        self._unseen = snapshot.unseen
        self.responses.restore(snapshot.lengths)

    def _set_free(self, free: Iterable[int]) -> None:
        """These prompts and no others are granted again."""
        self._free = sorted(free)
        held = (e.prompt_index for e in self._entries.values() if e.state is not State.TRAINED)
        self._open = IndexRangeSet([*held, *self._free])

    def _set_open(self, prompt_index: int, is_open: bool) -> None:
        if is_open:
            self._open.add(prompt_index)
        else:
            self._open.discard(prompt_index)

    def _close(self, entry: Entry) -> None:
        self.revision += 1
        self.columns.remove(entry)
        del self._entries[entry.prompt_index]
        del self._prompt_index_of[entry.lease_id]
        if entry.header is not None:
            self._freed.append(entry.prompt_index)

    def _notify(
        self,
        prompt_index: int,
        state: str,
        lease_id: str = "",
        reason: str | None = None,
        lengths: tuple[int, ...] = (),
    ) -> None:
        event = Event(prompt_index, str(state), reason, lease_id, lengths)
        for on_event in self.subscribers:
            on_event(event)
