"""The ledger's columns: every open prompt, every count, and the only code that changes them.

Invariant: the books close after every method here, because an entry enters a column in one place
and leaves it in one place, and `subscribers` are called there. `Ledger` decides; this module
counts.

The events of a prompt come in the order in which they happened; replayed, they give its present
column. `buffered` after `taken` or `trained` is a group that was given back when a learner
attached. `lease_id` is empty if a learner's books decided instead of a lease: "dropped" (orphaned)
then means that the prompt is free again, whatever its earlier events; "acknowledged" means that a
checkpoint contains it and all earlier prompts without events.

Two orders over the entries, the ready queue and the leases by expiry: every BUFFERED entry is in
the ready queue, every LEASED one in the expiries. Entries that changed state may remain in the
heaps and are skipped when they come up, so removal costs nothing.
"""

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from typing import Any, TypeAlias

from msgspec import Struct

from streamrl.types import (
    Books,
    DropReason,
    GroupHeader,
    Lease,
    LengthHistogram,
    RefusalReason,
    ResponseLengths,
    SchedulingState,
    SiblingHeader,
    rounded_length,
)
from streamrl.types.index_ranges import IndexRangeSet


class State(StrEnum):
    LEASED = "leased"
    BUFFERED = "buffered"
    TAKEN = "taken"
    TRAINED = "trained"


# Entries are in no cycle, so the garbage collector need not visit a hundred thousand of them.
class Entry(Struct, gc=False):
    """One open prompt; `min_policy_version` is the oldest version that may sample its tokens.

    `version` is the one it is lent for, or was trained at. `siblings` are the kept ones of a leased
    group, the last put last. `ended` says why the holder of its lease is gone: the entry is then
    vacant, so it is not found by its lease, and keeps its place and its siblings for another one.
    `payloads` are what a backend keeps of it, each with its size in bytes, by sibling number or a
    number that stands for the group; a missing one was lost.
    """

    prompt_index: int
    lease_id: str
    min_policy_version: int
    expires_at_s: float
    state: State = State.LEASED
    header: GroupHeader | None = None
    version: int = -1
    siblings: tuple[SiblingHeader, ...] = ()
    ended: DropReason | None = None
    payloads: dict[int, tuple[Any, int]] = {}

    @property
    def num_bytes(self) -> int:
        """Of its payloads."""
        return sum(num_bytes for _, num_bytes in self.payloads.values())


def _session_of(entry: Entry) -> str:
    return entry.lease_id.partition("/")[0]


def lease_of(entry: Entry) -> Lease:
    return Lease(
        lease_id=entry.lease_id,
        prompt_index=entry.prompt_index,
        min_policy_version=entry.min_policy_version,
        kept_siblings=tuple(sibling.number for sibling in entry.siblings),
    )


def header_of(entry: Entry) -> GroupHeader:
    assert entry.header is not None, "only a LEASED entry has no header"
    return entry.header


def response_lengths(entry: Entry) -> tuple[int, ...]:
    """Response lengths of its group, in tokens; () if it has none yet."""
    return () if entry.header is None else entry.header.response_lengths


_RETURNS_PROMPT = frozenset(reason for reason in DropReason if reason.returns_prompt)
BY_BOOKS = "books"
"""The reason of an "acknowledged" event that comes from a learner's books, not from a training
here."""


class Event(Struct, frozen=True):
    """One transition of one lease, as a backend keeps it for an audit.

    `state`: leased, buffered, taken, trained, acknowledged, dropped (then with its `reason`).

    "acknowledged" has the reason BY_BOOKS if the group was not trained here. The transition that a
    put causes (to buffered or dropped) has the group's `response_lengths`; others have ().
    """

    prompt_index: int
    state: str
    reason: str | None
    lease_id: str
    response_lengths: tuple[int, ...] = ()

    @property
    def frees_prompt(self) -> bool:
        """Whether its prompt may be granted again."""
        return self.state == "dropped" and self.reason in _RETURNS_PROMPT


class Columns:
    """Counts of entries by state, of leased entries by the version that may sample them, and of
    buffered ones by the versions that sampled them. An entry is added when it enters a state and
    removed before it leaves it. `leased_versions` is for others to read."""

    def __init__(self) -> None:
        self._counts: Counter[State] = Counter()
        self._leases: dict[str, dict[str, None]] = {}
        self.leased_versions: Counter[int] = Counter()
        self._newest_versions: Counter[int] = Counter()

    def count(self, state: State) -> int:
        return self._counts[state]

    def newest_buffered(self) -> int:
        """The newest version of any token in the buffered groups; -1 if there are none."""
        return max(self._newest_versions, default=-1)

    def leases_of(self, session: str) -> tuple[str, ...]:
        """The ids (SESSION/NUMBER) of the session's leased entries."""
        return tuple(self._leases.get(session, ()))

    def add(self, entry: Entry) -> None:
        self._counts[entry.state] += 1
        if entry.state is State.LEASED:
            self.leased_versions[entry.min_policy_version] += 1
            self._leases.setdefault(_session_of(entry), {})[entry.lease_id] = None
        elif entry.state is State.BUFFERED:
            self._newest_versions[header_of(entry).newest_version] += 1

    def remove(self, entry: Entry) -> None:
        self._counts[entry.state] -= 1
        if entry.state is State.LEASED:
            _count_down(self.leased_versions, entry.min_policy_version)
            leases = self._leases[session := _session_of(entry)]
            del leases[entry.lease_id]
            if not leases:
                del self._leases[session]
        elif entry.state is State.BUFFERED:
            _count_down(self._newest_versions, header_of(entry).newest_version)


def _count_down(versions: Counter[int], version: int) -> None:
    versions[version] -= 1
    if not versions[version]:
        del versions[version]


class ResponseCounter:
    """Response lengths by outcome since the buffer's first start: sampled = trained + dropped +
    those of held groups that are not trained. They are rounded, so that there are few counts,
    however many responses."""

    def __init__(self) -> None:
        self.restore(ResponseLengths())

    def restore(self, lengths: ResponseLengths) -> None:
        self.sampled = _Outcome(lengths.sampled)
        self.trained = _Outcome(lengths.trained)
        self._dropped = {reason: _Outcome(counted) for reason, counted in lengths.dropped.items()}

    def drop(self, lengths: Sequence[int], reason: DropReason) -> None:
        if lengths:
            self._dropped.setdefault(reason, _Outcome(LengthHistogram())).add(lengths)

    def frozen(self) -> ResponseLengths:
        dropped = {reason: outcome.frozen() for reason, outcome in self._dropped.items()}
        return ResponseLengths(self.sampled.frozen(), self.trained.frozen(), dropped)


class _Outcome:
    def __init__(self, known: LengthHistogram) -> None:
        self._counts = Counter(known.counts)
        self._num_tokens = known.num_tokens

    def add(self, lengths: Sequence[int], sign: int = 1) -> None:
        """With a `sign` of -1, subtract what was added before."""
        for length in map(rounded_length, lengths):
            self._counts[length] += sign
        self._num_tokens += sign * sum(lengths)

    def frozen(self) -> LengthHistogram:
        counts = {length: count for length, count in self._counts.items() if count}
        return LengthHistogram(counts, self._num_tokens)


# A reasserted lease that would leave more prompts than this free is invalid; no buffer forgets so
# many.
MAX_GAP = 100_000


class LedgerSnapshot(Struct, frozen=True, kw_only=True):
    """The totals of a ledger: all of its state except the entries.

    `unseen` are leases that count as granted because a learner's books contain them; None until
    books were adopted, which from then on say how leases ended, including those seen here.
    `lengths` are counted only here, so adopted books do not change them. `final_version` is None
    until a learner has attached, which says where the run ends. `steered_bound` is as in `Books`.
    `scheduling_states` are those of inactive generators, added by `BufferState`.
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
    unseen: int | None = None
    lengths: ResponseLengths = ResponseLengths()
    final_version: int | None = None
    steered_bound: int = 0
    scheduling_states: dict[str, SchedulingState] = {}


Position: TypeAlias = tuple[int, int]


class Entries:
    """Open entries by prompt and by lease, the position in the prompt stream, and the counts."""

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}
        self._of_lease: dict[str, Entry] = {}
        self.vacant: list[Position] = []
        """Version and prompt of the vacant entries, which are LEASED; the first due comes first."""
        self.num_bytes = 0
        """The size of all payloads."""
        self.columns = Columns()
        self._dropped: Counter[DropReason] = Counter()
        self._granted = 0
        self._acknowledged = 0
        self._free: list[int] = []
        self._open = IndexRangeSet()
        self._next_prompt_index = 0
        self.revision = 0
        """Incremented before every change of an entry."""
        self._unseen: int | None = None
        self.responses = ResponseCounter()
        self.subscribers: list[Callable[[Event], None]] = []
        """Called at every transition."""

    def __iter__(self) -> Iterator[Entry]:
        return iter(tuple(self._entries.values()))

    def __getitem__(self, prompt_index: int) -> Entry:
        return self._entries[prompt_index]

    def get(self, prompt_index: int) -> Entry | None:
        return self._entries.get(prompt_index)

    def find(self, lease_id: str) -> Entry | None:
        """The open entry of this lease, unless it is vacant."""
        entry = self._of_lease.get(lease_id)
        return None if entry is None or entry.ended else entry

    def has_open(self, lease_id: str) -> bool:
        """Whether this lease has an open entry, vacant or not."""
        return lease_id in self._of_lease

    def count(self, *states: State) -> int:
        return sum(self.columns.count(state) for state in states)

    @property
    def in_flight(self) -> int:
        return self.count(State.LEASED, State.BUFFERED, State.TAKEN)

    def grant(self, lease_id: str, min_policy_version: int, expires_at_s: float) -> Entry:
        """Lease the first free prompt: one that was given back, else the next of the stream."""
        if self._free:
            prompt_index = self._free.pop(0)
        else:
            prompt_index = self._next_prompt_index
            self._next_prompt_index += 1
        return self._enter(Entry(prompt_index, lease_id, min_policy_version, expires_at_s))

    def add_sibling(self, entry: Entry, sibling: SiblingHeader) -> None:
        self.revision += 1
        others = (known for known in entry.siblings if known.number != sibling.number)
        entry.siblings = (*others, sibling)

    def vacate(self, entry: Entry, reason: DropReason) -> None:
        """Its lease lost its holder; the entry waits for another lease."""
        self.revision += 1
        entry.ended = reason
        insort(self.vacant, _due(entry))

    def grant_vacant(self, lease_id: str, expires_at_s: float) -> Entry:
        """Lease again the vacant entry that is due first.

        It keeps its version, and those siblings that this version may have sampled.
        """
        # An ended lease that is asked for again gets its own entry back: each id has one.
        ended = self._of_lease.get(lease_id) or self._entries[self.vacant[0][1]]
        oldest, siblings = ended.min_policy_version, ended.siblings
        kept = tuple(sibling for sibling in siblings if sibling.oldest_version >= oldest)
        numbers = {sibling.number for sibling in kept}
        payloads = {n: payload for n, payload in ended.payloads.items() if n in numbers}
        ended.siblings = tuple(sibling for sibling in siblings if sibling not in kept)
        self.drop_vacant(ended)
        entry = Entry(ended.prompt_index, lease_id, oldest, expires_at_s, siblings=kept)
        entry.payloads = payloads
        is_granted = self.grant_again(entry)
        assert is_granted, "its prompt was freed just then"
        return entry

    def drop_vacant(self, entry: Entry) -> None:
        assert entry.ended is not None, "it is vacant"
        self.drop(entry, entry.ended)

    def hold(self, prompt_index: int, number: int, payload: Any, num_bytes: int) -> None:
        """Keep a payload, replacing an earlier one, for as long as the entry has its group or
        sibling."""
        entry = self._entries[prompt_index]
        self.discard(entry, number)
        entry.payloads[number] = payload, num_bytes
        self.num_bytes += num_bytes

    def discard(self, entry: Entry, number: int) -> None:
        """Stop keeping this payload, if there is one."""
        self.num_bytes -= entry.payloads.pop(number, (None, 0))[1]

    def grant_again(self, entry: Entry) -> bool:
        """Grant a lease that its holder reasserts and this ledger has forgotten, if its prompt is
        free."""
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
        self._of_lease[entry.lease_id] = entry
        self.num_bytes += entry.num_bytes
        self._open.add(entry.prompt_index)
        self.columns.add(entry)
        self._granted += 1
        self._notify(entry.prompt_index, entry.state, entry.lease_id)
        return entry

    def move(self, entry: Entry, state: State, version: int = -1) -> None:
        self.revision += 1
        lengths = response_lengths(entry)
        if is_put := entry.state is State.LEASED:
            self.responses.sampled.add(lengths)
            if entry.siblings:
                self.num_bytes -= entry.num_bytes
                entry.siblings, entry.payloads = (), {}
        elif entry.state is State.TRAINED:
            # It was trained after the version that a learner has attached with.
            self.responses.trained.add(lengths, -1)
        if state is State.TRAINED:
            self.responses.trained.add(lengths)
        self.columns.remove(entry)
        entry.state = state
        entry.version = version
        self.columns.add(entry)
        self._set_open(entry.prompt_index, state is not State.TRAINED)
        self._notify(entry.prompt_index, state, entry.lease_id, lengths=lengths if is_put else ())

    def acknowledge(self, entry: Entry, *, by_books: bool = False) -> None:
        """The entry is contained in a durable checkpoint."""
        if entry.state is not State.TRAINED:
            self.responses.trained.add(response_lengths(entry))
        self._close(entry)
        self._open.discard(entry.prompt_index)
        self._acknowledged += 1
        reason = BY_BOOKS if by_books else None
        self._notify(entry.prompt_index, "acknowledged", entry.lease_id, reason)

    def drop(self, entry: Entry, reason: DropReason, lengths: Sequence[int] = ()) -> None:
        """`lengths` are the response lengths of a group that is dropped instead of taken in;
        without them its siblings are."""
        lengths = lengths or [sibling.num_tokens for sibling in entry.siblings]
        self.responses.sampled.add(lengths)
        self.responses.drop(lengths or response_lengths(entry), reason)
        self._close(entry)
        self._dropped[reason] += 1
        self._set_open(entry.prompt_index, reason.returns_prompt)
        if reason.returns_prompt:
            insort(self._free, entry.prompt_index)
        self._notify(entry.prompt_index, "dropped", entry.lease_id, reason, tuple(lengths))

    def books(self) -> Books:
        """The books, without what only the ledger knows about its learner."""
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
            open_ranges=self._open.frozen(),
        )

    def follows(self, books: Books, learner_term: int) -> bool:
        """Whether this ledger, with this `learner_term`, may be at a later state than `books`.

        A restored copy may have as many changes, but different ones: it lacks an attach or a drop.
        """
        is_later = (learner_term, self.revision) >= (books.learner_term, books.revision)
        return is_later and all(self._dropped[why] >= n for why, n in books.dropped.items())

    def reconcile(self, books: Books) -> None:
        """Go back from a later state to the books of a learner's checkpoint.

        What is finished in the books is acknowledged here, too, unless it is TRAINED still. Every
        other prompt without an open entry is free again: its later events belong to steps that the
        checkpoint does not contain.
        """
        unfinished = set(books.open_prompt_indices)
        unfinished.update(range(books.next_prompt_index, self._next_prompt_index))
        for entry in self:
            if entry.prompt_index not in unfinished and entry.state is not State.TRAINED:
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
        """Continue from the books of a checkpoint, which are later than this ledger.

        What was in flight there is orphaned; what is open in both, because its holder reasserted it
        or a restored copy has it, counts as granted once more.
        """
        self.reconcile(books)
        seen = self._granted - (self._unseen or 0)
        self._granted = books.granted + len(self._entries)
        self._unseen = self._granted - seen
        self._acknowledged = books.acknowledged + books.trained
        self._dropped = Counter(books.dropped)
        self._dropped[DropReason.ORPHANED] += books.leased + books.buffered + books.taken

    def snapshot(self) -> LedgerSnapshot:
        """A snapshot of what is counted here."""
        return LedgerSnapshot(
            granted=self._granted,
            acknowledged=self._acknowledged,
            dropped={reason: count for reason, count in self._dropped.items() if count},
            next_prompt_index=self._next_prompt_index,
            revision=self.revision,
            unseen=self._unseen,
            lengths=self.responses.frozen(),
        )

    def restore(
        self, snapshot: LedgerSnapshot, entries: Iterable[Entry], free: Iterable[int]
    ) -> None:
        """Continue, in a blank state, where a journal ends."""
        for entry in entries:
            self._entries[entry.prompt_index] = entry
            self._of_lease[entry.lease_id] = entry
            self.num_bytes += entry.num_bytes
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
        """Make exactly these prompts free to be granted again."""
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
        self.num_bytes -= entry.num_bytes
        del self._entries[entry.prompt_index]
        del self._of_lease[entry.lease_id]
        if entry.ended:
            del self.vacant[bisect_left(self.vacant, _due(entry))]

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


def _due(entry: Entry) -> Position:
    return entry.min_policy_version, entry.prompt_index


def in_order(entries: Iterable[Entry]) -> list[Entry]:
    """In the order of the ready queue, which is also the order of lending."""
    return sorted(
        entries, key=lambda e: (-1 if e.header is None else e.header.oldest_version, e.prompt_index)
    )


class ReadyQueue:
    """The BUFFERED groups by their oldest policy version, then by prompt."""

    def __init__(self, entries: Entries) -> None:
        self._entries = entries
        self._heap: list[Position] = []

    def add(self, entry: Entry) -> None:
        heapq.heappush(self._heap, (header_of(entry).oldest_version, entry.prompt_index))

    def first(self) -> Entry | None:
        """The oldest group; it remains in the queue until its state changes."""
        while self._heap:
            oldest, prompt_index = self._heap[0]
            entry = self._entries.get(prompt_index)
            if (
                entry
                and entry.state is State.BUFFERED
                and header_of(entry).oldest_version == oldest
            ):
                return entry
            heapq.heappop(self._heap)
        return None


class Expiries:
    """Leases by expiry time; a renewed lease keeps its earlier time here until that has come.

    So a renewal costs nothing here, however many leases there are.
    """

    def __init__(self, entries: Entries) -> None:
        self._entries = entries
        self._heap: list[tuple[float, str]] = []

    def add(self, entry: Entry) -> None:
        heapq.heappush(self._heap, (entry.expires_at_s, entry.lease_id))

    def pop_due(self, now_s: float) -> list[Entry]:
        """The leases that have expired."""
        due: dict[str, Entry] = {}
        while self._heap and self._heap[0][0] <= now_s:
            _, lease_id = heapq.heappop(self._heap)
            entry = self._entries.find(lease_id)
            if entry is None or entry.state is not State.LEASED:
                continue
            if entry.expires_at_s <= now_s:
                due[lease_id] = entry
            else:
                self.add(entry)
        return list(due.values())

    def next_s(self) -> float | None:
        """When `pop_due` must be called next; it may find nothing then."""
        return self._heap[0][0] if self._heap else None
