"""The ledger: which prompts are granted, which groups make a batch, and what was trained.

    LEASED -> BUFFERED -> TAKEN -> TRAINED -> acknowledged (gone); dropped(reason) from any

Invariants, whatever is called in whatever order:

- The books close: leases granted = leased + buffered + taken + trained + acknowledged + dropped.
- A prompt has one live lease or group at most; in the surviving history it is trained once, or
  dropped for good with a reason, and none is skipped.
- No group is handed out with a token of a version more than `max_staleness` newer than the one that
  will train it, nor, unless `overdue` is `train`, with one that much older.
- If `overdue` is `wait`, no group is dropped as stale, unless a learner or this ledger has lost its
  history; if `train`, none ever is.

Admission bounds the groups in flight to `streamrl.types.admission_capacity`, so one that is trained
in order is never too old; a lease's `min_policy_version` states the same for the group at position
p, which is trained p // groups_per_step versions from here. Groups that overtake others break that
order; what `overdue` does then, and why it keeps the bound, is in `buffers.ledger.batches`. Nothing
is granted before a learner attached, whose books give the position in the prompt stream.

A learner that goes back to an earlier version gets the groups of the steps it has lost again, the
oldest first, so that each comes up at the version that trained it; what comes up too early, because
others were freed meanwhile, is dropped as abandoned (`buffers.ledger.batches`).

Pure and deterministic: no input or output, no clock (callers pass `now_s`), no randomness.
`drain_freed` returns the prompts whose payload a backend may delete.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from buffers.ledger.admission import Admission
from buffers.ledger.batches import Batches
from buffers.ledger.entries import Entries, LedgerSnapshot
from buffers.ledger.entry import Entry, State, header_of, lease_of
from buffers.ledger.events import Event
from buffers.ledger.fencing import require_learner_term
from buffers.ledger.loans import Loans
from buffers.ledger.queues import Expiries, ReadyQueue, in_order
from streamrl.errors import ConfigError, DuplicateGroupError, LedgerError, UnknownLeaseError
from streamrl.types import Books, DropReason, GroupHeader, Lease, OverduePolicy, RefusalReason


class Ledger:
    """See the module. No more groups are admitted than are trained until `final_version`."""

    def __init__(
        self,
        *,
        groups_per_step: int,
        max_staleness: int,
        overdue: OverduePolicy = OverduePolicy.WAIT,
        final_version: int | None = None,
    ) -> None:
        if groups_per_step < 1 or max_staleness < 0:
            raise ConfigError(
                f"learner.groups_per_step must be >= 1 (was {groups_per_step}) and "
                f"buffer.max_staleness >= 0 (was {max_staleness})"
            )
        self.groups_per_step = groups_per_step
        self.max_staleness = max_staleness
        self.overdue = overdue
        self.version = self.learner_term = 0
        self.learner_id = ""
        self.finished = self.draining = False
        self._entries = Entries()
        self.responses = self._entries.responses
        self._ready = ReadyQueue(self._entries)
        self._expiries = Expiries(self._entries)
        self._loans = Loans(self._entries)
        self.admission = Admission(self._entries, groups_per_step, max_staleness, final_version)
        columns = (self._entries, self._ready, self._loans)
        self._batches = Batches(*columns, groups_per_step, max_staleness, overdue)
        self._refused: Counter[RefusalReason] = Counter()

    # The generators' side.

    def lease(self, lease_id: str, now_s: float, ttl_s: float) -> Lease | None:
        """The right to generate the next group of the stream; None while admission is closed."""
        self.expire(now_s)
        entry = self._entries.find(lease_id)
        if entry is None:
            if not self.num_admitted():
                return None
            oldest = self.admission.min_policy_version(self.version)
            entry = self._entries.grant(lease_id, oldest, now_s + ttl_s)
            self._expiries.add(entry)
        return lease_of(entry)

    def num_admitted(self) -> int:
        """How many more leases fit under the staleness bound and before the run's end."""
        is_closed = self.learner_term == 0 or self.finished
        return 0 if is_closed else self.admission.num_admitted(self.version, draining=self.draining)

    def knows(self, lease_id: str) -> bool:
        """Whether this lease is open here, with its group or without."""
        return self._entries.find(lease_id) is not None

    def renew(self, lease_ids: Iterable[str], now_s: float, ttl_s: float) -> tuple[str, ...]:
        """Extend these leases; those that are no longer honored are returned."""
        self.expire(now_s)
        lost = []
        for lease_id in lease_ids:
            entry = self._entries.find(lease_id)
            if entry is None:
                lost.append(lease_id)
            elif entry.state is State.LEASED and now_s + ttl_s > entry.expires_at_s:
                entry.expires_at_s = now_s + ttl_s
                self._expiries.add(entry)
        return tuple(lost)

    def reassert(self, lease: Lease, now_s: float, ttl_s: float) -> None:
        """Grant a forgotten lease again if its prompt is free; `renew` returns it if not."""
        self.expire(now_s)
        entry = Entry(lease.prompt_index, lease.lease_id, lease.min_policy_version, now_s + ttl_s)
        if self._entries.find(lease.lease_id) is None and self._entries.grant_again(entry):
            self._expiries.add(entry)

    def put(self, lease_id: str, header: GroupHeader, now_s: float) -> bool:
        """Take the group in. True: its payload must be kept; False: not (repeated, or too old).

        Raises:
            UnknownLeaseError, DuplicateGroupError: refused and counted; nothing else changes.
            LedgerError: the group is for another prompt than the lease.
        """
        self.expire(now_s)
        entry = self._entries.find(lease_id)
        if entry is None:
            self._refused[RefusalReason.UNKNOWN_LEASE] += 1
            raise UnknownLeaseError(f"lease {lease_id} is unknown here, or has expired")
        if entry.header is not None:
            if entry.header.group_id == header.group_id:
                return False
            self._refused[RefusalReason.DUPLICATE] += 1
            raise DuplicateGroupError(f"lease {lease_id} already holds {entry.header.group_id}")
        if header.prompt_index != entry.prompt_index:
            raise LedgerError(
                f"lease {lease_id} is for prompt {entry.prompt_index}; "
                f"the group is for {header.prompt_index}"
            )
        if self._batches.is_stale(header, self.version):
            self._entries.drop(entry, DropReason.STALE, header.response_lengths)
            return False
        entry.header = header
        self._make_ready(entry)
        return True

    def release(self, lease_id: str, reason: DropReason, lengths: Sequence[int] = ()) -> None:
        """End a lease without a group; unknown or already filled leases are left as they are."""
        entry = self._entries.find(lease_id)
        if entry is not None and entry.state is State.LEASED:
            self._entries.drop(entry, reason, lengths)

    def refuse_malformed(self, lease_id: str) -> None:
        """Drop and count the prompt of a lease whose put could not be decoded."""
        entry = self._entries.find(lease_id)
        if entry is not None and entry.state is State.LEASED:
            self._entries.drop(entry, DropReason.MALFORMED)
        else:
            self.refuse(RefusalReason.MALFORMED)

    def orphan(self, prompt_index: int) -> None:
        """Drop the group of this prompt, whose payload is lost; the prompt is granted again."""
        self._entries.drop(self._entries[prompt_index], DropReason.ORPHANED)

    def refuse(self, reason: RefusalReason, count: int = 1) -> None:
        self._refused[reason] += count

    def expire(self, now_s: float) -> tuple[str, ...]:
        """End the expired leases; their prompts are granted again. Returns their ids."""
        expired = self._expiries.pop_due(now_s)
        for entry in expired:
            self._entries.drop(entry, DropReason.EXPIRED)
        return tuple(entry.lease_id for entry in expired)

    # The learner's side.

    def attach(self, version: int, books: Books | None = None, learner_id: str = "") -> int:
        """Give a learner restored to `version` a new term, which fences every older learner.

        What was trained at versions <= `version` is acknowledged; what was taken, or trained later,
        is buffered again. With the `books` of its checkpoint, what is finished there is finished
        here, and every other prompt is open here or will be granted again.
        """
        is_older = books is not None and not self._entries.follows(books, self.learner_term)
        self._loans.settle(version)
        for entry in self._loans.give_back():
            self._make_ready(entry)
        if books is not None and (is_older or self.version < version):
            self._entries.adopt(books)
        elif books is not None:
            self._entries.reconcile(books)
        self.version, self.learner_id = version, learner_id
        self.finished = self.draining = False
        self.learner_term = max(self.learner_term, books.learner_term if books else 0) + 1
        return self.learner_term

    def take(
        self, num_groups: int, version: int, learner_term: int, num_held: int | None = None
    ) -> tuple[GroupHeader, ...]:
        """Lend the oldest groups for training at `version`; () while there are too few.

        Drops first what is too far from this version. The same version gets the same loan again.
        With `num_held` a part of the batch is lent as soon as it can be, and () returned while the
        loan has no more groups than these.
        """
        require_learner_term(learner_term, self.learner_term)
        return self._batches.take(num_groups, version, self.version, num_held)

    def awaited(self) -> tuple[Entry, ...]:
        """The leased groups that the next batch waits for although enough others are finished."""
        return self._batches.awaited(self.version)

    def advance(self, version: int, learner_term: int) -> None:
        """The step that made `version` used the loan of the version before. May be repeated."""
        require_learner_term(learner_term, self.learner_term)
        if version == self.version:
            return
        self._loans.train(version, self.version)
        self.version = version
        self._batches.evict(version)

    def acknowledge(self, version: int, learner_term: int) -> None:
        """A checkpoint of `version` is durable: what it contains is freed. May be repeated."""
        require_learner_term(learner_term, self.learner_term)
        if version > self.version:
            raise LedgerError(f"acknowledge of version {version}; the ledger is at {self.version}")
        self._loans.settle(version)

    def finish(self, learner_term: int) -> None:
        """No lease is granted from here on."""
        require_learner_term(learner_term, self.learner_term)
        self.finished = True

    def books(self) -> Books:
        return self._entries.books(self.learner_term)

    @property
    def revision(self) -> int:
        """It grows with every change of an entry, before the change."""
        return self._entries.revision

    def refused(self) -> dict[RefusalReason, int]:
        return dict(self._refused)

    def oldest_version(self) -> int | None:
        """Oldest policy version in the ready queue."""
        entry = self._ready.first()
        return None if entry is None else header_of(entry).oldest_version

    def entry(self, prompt_index: int) -> Entry | None:
        """The open entry of this prompt, to read."""
        return self._entries.get(prompt_index)

    def live_leases(self) -> tuple[str, ...]:
        return tuple(e.lease_id for e in self._entries if e.state is State.LEASED)

    def next_expiry_s(self) -> float | None:
        """When `expire` may next have something to do."""
        return self._expiries.next_s()

    def drain_freed(self) -> tuple[int, ...]:
        """Prompts whose payload is no longer needed, since the last call."""
        return self._entries.drain_freed()

    def snapshot(self) -> LedgerSnapshot:
        state = (self.version, self.learner_term, self.learner_id, self.finished, self.draining)
        return self._entries.snapshot(*state, self._refused, self.admission.final_version)

    def restore(
        self,
        snapshot: LedgerSnapshot,
        entries: Iterable[Entry],
        free: Iterable[int],
        expires_at_s: float,
    ) -> None:
        """Continue, in a blank ledger, where a journal ends; its leases get a new expiry."""
        self.version, self.learner_term = snapshot.version, snapshot.learner_term
        self.learner_id = snapshot.learner_id
        self.finished, self.draining = snapshot.finished, snapshot.draining
        self._refused = Counter(snapshot.refused)
        self.admission.end_at(snapshot.final_version)
        held = in_order(entries)
        self._entries.restore(snapshot, held, free)
        for entry in held:
            if entry.state is State.LEASED:
                entry.expires_at_s = expires_at_s
                self._expiries.add(entry)
            elif entry.state is State.BUFFERED:
                self._ready.add(entry)
            else:
                self._loans.restore(entry)

    def subscribe(self, on_event: Callable[[Event], None]) -> None:
        """Call `on_event` with every transition from here on."""
        self._entries.subscribers.append(on_event)

    def _make_ready(self, entry: Entry) -> None:
        self._entries.move(entry, State.BUFFERED)
        self._ready.add(entry)
