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
order; below is what `overdue` does then, and why it keeps the bound. Nothing is granted before a
learner has attached; its books give the position in the prompt stream.

A learner that goes back to an earlier version gets the groups of its lost steps again, oldest
first, so that each comes up at the version that trained it before. What comes up too early, because
others were freed meanwhile, is dropped as abandoned.

Pure and deterministic: no input or output, no clock (callers pass `now_s`), no randomness.

The learner may steer admission by its own bound between `min_staleness` and `max_staleness`. That
bound only affects new leases: how many there may be, and how new their weights must be. Whether a
group is due, stale or abandoned depends on `max_staleness`, which never changes. So everything
below holds for groups admitted under any bound: a lower one only makes leases fewer and their
versions newer.

Under `overdue: train` and `drop` a batch is lent as soon as enough groups are finished, the oldest
first; `drop` evicts what is too old, `train` nothing. Under `wait` a batch leaves no due group
behind.

A group of oldest version m is due at version m + max_staleness: the step that trains this version
is the last one that may train the group. A leased group has its lease's `min_policy_version`, and a
finished one the version of its oldest token, which is not older.

Let B be `groups_per_step`, v the version that the next batch trains, r the groups that this batch
lacks (B, or fewer once a part of it is lent), and due(j) the groups that are leased or buffered and
due at version j or before.

Invariant: due(j) <= r + (j - v) B for every j >= v. With r = 0, v is over and nothing due at v is
left behind; the next batch has r = B and v + 1, and the invariant is the same. So no group grows
too old. Every transition keeps it:

- lease: with u groups leased or buffered, its `min_policy_version` makes it due at
  v + (u + B - r) // B or later. For every j from there on, r + (j - v) B >= u + 1 >= due(j).
- put, release, expiry: due(j) does not grow. A prompt that is granted again has a new lease.
- a lease that ends without its holder and has siblings stays leased, with nobody who
  holds it (it is vacant), and due when it was: its tokens are not older than its lease says. A new
  lease takes its place under the same `min_policy_version`. Neither changes due(j), r or v.
- lend: the x oldest finished groups, with x <= r + (j - v) B - leased(j) for every j: each leased
  group has a place left in the batches up to its last one. Of the finished groups that are due at j
  or before, either x are lent, and both sides fall by x, or all are, and leased(j) is what remains.
- a learner that goes back from V to v: what was trained at u in [v, V) was due at u or later, what
  was in flight at V or later, at most B + (j - V) B of it at j or before. It is all buffered or
  leased again, or freed, and r is B. So due(j) is at most (j - v + 1) B for j < V, and for j >= V
  at most (V - v) B + B + (j - V) B = r + (j - v) B.
- drop: due(j) does not grow.

No deadlock: a batch waits only for leased groups. They finish, or their leases end; where leased(j)
is 0, r groups may be lent at once. A vacant one is the next that is granted, to whoever asks first,
also while the buffer drains or admits no other. Where the learner's version may not sample it,
since the learner went back, it is dropped: else such groups could leave no room for any other.

A group is trained by no version that is further than max_staleness behind its newest token either.
Such a version comes only after the learner went back: its generators sampled the versions after v
that it has abandoned, and it makes others of the same numbers. As long as nothing of the history
from v on was freed, no group is lent so early: the queue is in the order of the oldest tokens, and
has B groups for each version from v to V, so a group of oldest version m comes up at m or later,
and its newest token is at most max_staleness after m, or it was not trained in time. Where groups
were freed, because a checkpoint of the abandoned history contained them, the batch would get groups
of its future. They are dropped as abandoned, and their prompts granted again, until what the batch
would get is within the bound. Those further back in the queue stay: their version may come. This
is no deadlock: a group that no version may train yet keeps its place for admission only until the
batch would get it, and fewer than B groups are never a batch, so they leave room for leases.

Only after a learner or a buffer has lost its history may the invariant fail: a group that was begun
before goes on with the learner's weights, which may be older than its lease says. (A generator
gives back a lease that it has not begun and that the learner's version may not sample.) What has
grown too old by then is dropped.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from buffers.ledger.entries import (
    Entries,
    Entry,
    Expiries,
    LedgerSnapshot,
    ReadyQueue,
    State,
    header_of,
    in_order,
    lease_of,
)
from streamrl.errors import (
    ConfigError,
    DuplicateGroupError,
    FencedError,
    LedgerError,
    LostMemoryError,
    UnknownLeaseError,
)
from streamrl.types import (
    Books,
    DropReason,
    GroupHeader,
    Lease,
    OverduePolicy,
    RefusalReason,
    SiblingHeader,
    admission_capacity,
    replace,
)


def require_learner_term(learner_term: int, current: int) -> None:
    """Refuse a learner of another term than the `current` one.

    Raises:
        FencedError: another learner attached later.
        LostMemoryError: the learner attached to a later state than this one.
    """
    if learner_term < current:
        raise FencedError(f"this learner is of term {learner_term}; term {current} took over")
    if learner_term > current:
        raise LostMemoryError(f"lost memory: this buffer knows term {current}, not {learner_term}")


class Ledger:
    """The state machine described above. Admits no more groups than are trained until
    `final_version`.

    Others may read `entries` and subscribe to them.
    """

    def __init__(
        self,
        *,
        groups_per_step: int,
        max_staleness: int,
        min_staleness: int | None = None,
        overdue: OverduePolicy = OverduePolicy.WAIT,
        final_version: int | None = None,
    ) -> None:
        """Without `min_staleness` the bound is always `max_staleness`."""
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
        self.final_version = final_version
        self.steered_bound = 0
        """The learner's latest value; 0 until it sends one."""
        self._min_staleness = max_staleness if min_staleness is None else min_staleness
        self.entries = Entries()
        self._expiries = Expiries(self.entries)
        self._ready = ReadyQueue(self.entries)
        # The prompts of the TAKEN and TRAINED entries, by the version that each has.
        self._lent: dict[int, list[int]] = {}
        self._trained: dict[int, list[int]] = {}
        self._refused: Counter[RefusalReason] = Counter()

    # The generators' side.

    def lease(self, lease_id: str, now_s: float, ttl_s: float) -> Lease | None:
        """Grant the right to generate the next group of the stream; None while admission is
        closed."""
        self.expire(now_s)
        entry = self.entries.find(lease_id)
        if entry is None:
            if not self.num_admitted():
                return None
            if self.entries.vacant:
                entry = self.entries.grant_vacant(lease_id, now_s + ttl_s)
            else:
                trained_at = self.version + self.entries.in_flight // self.groups_per_step
                oldest = max(0, trained_at - self.staleness_bound)
                entry = self.entries.grant(lease_id, oldest, now_s + ttl_s)
            self._expiries.add(entry)
        return lease_of(entry)

    def num_admitted(self) -> int:
        """How many more leases may be granted: those that fit under the staleness bound and before
        the run's end, and the vacant ones, which are in flight anyway."""
        if self.learner_term == 0 or self.finished:
            return 0
        in_flight, size = self.entries.in_flight, self.groups_per_step
        capacity = admission_capacity(self.staleness_bound, size)
        if self.final_version is not None:
            capacity = min(capacity, (self.final_version - self.version) * size)
        num_new = max(0, capacity - in_flight)
        if self.draining:
            # Groups that fill no batch would stay in flight forever.
            num_new = min(num_new, -in_flight % size)
        return num_new + len(self.entries.vacant)

    @property
    def staleness_bound(self) -> int:
        """In versions: a group leased now is at most this old when it is trained in order."""
        return min(max(self.steered_bound, self._min_staleness), self.max_staleness)

    def renew(self, lease_ids: Iterable[str], now_s: float, ttl_s: float) -> tuple[str, ...]:
        """Extend these leases; returns those that are no longer valid."""
        self.expire(now_s)
        lost = []
        for lease_id in lease_ids:
            entry = self.entries.find(lease_id)
            if entry is None:
                lost.append(lease_id)
            elif entry.state is State.LEASED and now_s + ttl_s > entry.expires_at_s:
                entry.expires_at_s = now_s + ttl_s
        return tuple(lost)

    def reassert(self, lease: Lease, now_s: float, ttl_s: float) -> None:
        """Grant a forgotten lease again if its prompt is free; if not, `renew` returns it."""
        self.expire(now_s)
        entry = Entry(lease.prompt_index, lease.lease_id, lease.min_policy_version, now_s + ttl_s)
        if not self.entries.has_open(lease.lease_id) and self.entries.grant_again(entry):
            self._expiries.add(entry)

    def put(self, lease_id: str, header: GroupHeader, now_s: float) -> bool:
        """Take the group in; whether its payload must be kept (not if repeated or too old).

        Raises:
            UnknownLeaseError, DuplicateGroupError: refused and counted; nothing else changes.
            LedgerError: the group is for another prompt than the lease.
        """
        self.expire(now_s)
        entry = self.entries.find(lease_id)
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
        if self._is_stale(header, self.version):
            self.entries.drop(entry, DropReason.STALE, header.response_lengths)
            return False
        entry.header = header
        self._make_ready(entry)
        return True

    def put_sibling(self, sibling: SiblingHeader, now_s: float) -> int | None:
        """Keep a sibling of a group that is still being sampled, until the group is put. It
        replaces what was kept of it under an earlier lease, or with fewer tokens.

        Returns the prompt for which its payload must be kept; None if it is repeated or too late.

        Raises:
            UnknownLeaseError: nothing changes.
        """
        self.expire(now_s)
        entry = self.entries.find(sibling.lease_id)
        if entry is None:
            raise UnknownLeaseError(f"lease {sibling.lease_id} is unknown here, or has expired")
        known = next((known for known in entry.siblings if known.number == sibling.number), None)
        if entry.state is not State.LEASED or (known is not None and not sibling.follows(known)):
            return None
        self.entries.add_sibling(entry, sibling)
        return entry.prompt_index

    def end_lease(self, lease_id: str, reason: DropReason) -> None:
        """The holder of this lease is gone. If siblings are kept, another lease takes its place;
        otherwise its prompt is free again."""
        if entry := self._leased(lease_id):
            self._end(entry, reason)

    def release(self, lease_id: str, reason: DropReason, lengths: Sequence[int] = ()) -> None:
        """End a lease without a group; ignores unknown leases and those that have a group."""
        if entry := self._leased(lease_id):
            self.entries.drop(entry, reason, lengths)

    def refuse_malformed(self, lease_id: str) -> None:
        """Drop and count the prompt of a lease whose group could not be decoded."""
        if entry := self._leased(lease_id):
            self.entries.drop(entry, DropReason.MALFORMED)
        else:
            self.refuse(RefusalReason.MALFORMED)

    def refuse(self, reason: RefusalReason, count: int = 1) -> None:
        self._refused[reason] += count

    def expire(self, now_s: float) -> tuple[str, ...]:
        """End the expired leases; their prompts are granted again. Returns their ids."""
        expired = self._expiries.pop_due(now_s)
        for entry in expired:
            self._end(entry, DropReason.EXPIRED)
        return tuple(entry.lease_id for entry in expired)

    # The learner's side.

    def end_at(self, final_version: int | None) -> None:
        """Set the version at which the run ends; None keeps what was set before."""
        if final_version is not None:
            self.final_version = final_version

    def attach(self, version: int, books: Books | None = None, learner_id: str = "") -> int:
        """Give a learner restored to `version` a new term, which fences every older learner.

        What was trained at versions <= `version` is acknowledged; what was taken, or trained later,
        is buffered again. With the `books` of its checkpoint, what is finished there is finished
        here, and every other prompt is open or will be granted again. A learner that attaches
        again need not have a checkpoint of its version: what it has trained stays trained.
        """
        is_older = books is not None and not self.entries.follows(books, self.learner_term)
        is_lost = is_older or self.version < version
        if is_lost or not learner_id or learner_id != self.learner_id:
            self._settle(version)
        self._give_back(newer_than=version)
        if books is not None and is_lost:
            self.entries.adopt(books)
        elif books is not None:
            self.entries.reconcile(books)
        if books is not None:
            self.steered_bound = books.steered_bound
        self.version, self.learner_id = version, learner_id
        self.finished = self.draining = False
        self._drop_vacant(newer_than=version)
        self.learner_term = max(self.learner_term, books.learner_term if books else 0) + 1
        return self.learner_term

    def take(
        self, num_groups: int, version: int, learner_term: int, num_held: int | None = None
    ) -> tuple[GroupHeader, ...]:
        """Lend the oldest groups for training at `version`; () while there are too few.

        First drops what is too far from this version. The same version gets the same batch again.
        With `num_held`, a part of the batch is lent as soon as possible; returns () while that part
        has no more groups than `num_held`.
        """
        require_learner_term(learner_term, self.learner_term)
        num_missing = num_groups - len(self._lent.get(version, ()))
        if num_missing > 0:
            following = self.version + len(self._lent.keys() - {version})
            if version != following:
                raise LedgerError(
                    f"take for version {version}; the next to be trained is {following}"
                )
            capacity = admission_capacity(self.max_staleness, self.groups_per_step)
            if num_groups > capacity:
                raise ConfigError(
                    f"a batch of {num_groups} groups can never fill: buffer.max_staleness "
                    f"{self.max_staleness} and learner.groups_per_step {self.groups_per_step} "
                    f"admit {capacity}"
                )
            self._evict(version)
            self._drop_abandoned(num_missing, version)
            num_lendable = self._num_lendable(num_missing, version)
            if num_lendable == num_missing or num_held is not None:
                self._lend(num_lendable, version)
        taken = self._lent.get(version, ())
        if len(taken) < num_groups and (num_held is None or len(taken) <= num_held):
            return ()
        return tuple(header_of(self.entries[prompt_index]) for prompt_index in taken)

    def awaited(self) -> tuple[Entry, ...]:
        """The leased groups that the next batch waits for because they are due, first due first; ()
        unless enough others are finished.
        """
        num_missing = self.groups_per_step - len(self._lent.get(self.version, ()))
        is_short = self.entries.count(State.BUFFERED) < num_missing
        if num_missing <= 0 or is_short or self.overdue is not OverduePolicy.WAIT:
            return ()
        places = self._free_places(num_missing, self.version)
        newest = next((oldest for oldest, num_free in places if num_free < num_missing), None)
        if newest is None:
            return ()
        newest = max(newest, self.version - self.max_staleness)
        leased = (entry for entry in self.entries if entry.state is State.LEASED)
        due = [entry for entry in leased if entry.min_policy_version <= newest]
        return tuple(sorted(due, key=lambda e: (e.min_policy_version, e.prompt_index)))

    def advance(self, version: int, learner_term: int, steered_bound: int = 0) -> None:
        """The step that made `version` used the batch taken for the previous version. May be
        repeated.

        Leases are granted under `steered_bound` from here on, within the limits of the run.
        """
        require_learner_term(learner_term, self.learner_term)
        if version != self.version:
            if version != self.version + 1 or self.version not in self._lent:
                raise LedgerError(
                    f"advance to {version}: the ledger is at {self.version} and has lent for "
                    f"{sorted(self._lent)}"
                )
            taken = self._trained[version] = self._lent.pop(self.version)
            for prompt_index in taken:
                self.entries.move(self.entries[prompt_index], State.TRAINED, version)
            self.version = version
            self._evict(version)
        self.steered_bound = steered_bound

    def acknowledge(self, version: int, learner_term: int) -> None:
        """A checkpoint of `version` is durable: what it contains is freed. May be repeated."""
        require_learner_term(learner_term, self.learner_term)
        if version > self.version:
            raise LedgerError(f"acknowledge of version {version}; the ledger is at {self.version}")
        self._settle(version)

    def finish(self, learner_term: int) -> None:
        """No lease is granted from here on."""
        require_learner_term(learner_term, self.learner_term)
        self.finished = True
        self._drop_vacant(newer_than=-1)

    def books(self) -> Books:
        books = self.entries.books()
        return replace(books, learner_term=self.learner_term, steered_bound=self.steered_bound)

    def refused(self) -> dict[RefusalReason, int]:
        return dict(self._refused)

    def oldest_version(self) -> int | None:
        """The oldest policy version in the ready queue."""
        entry = self._ready.first()
        return None if entry is None else header_of(entry).oldest_version

    def live_leases(self) -> tuple[str, ...]:
        leased = (e for e in self.entries if e.state is State.LEASED)
        return tuple(entry.lease_id for entry in leased if not entry.ended)

    def next_expiry_s(self) -> float | None:
        """When `expire` may next find an expired lease."""
        return self._expiries.next_s()

    def snapshot(self) -> LedgerSnapshot:
        return replace(
            self.entries.snapshot(),
            version=self.version,
            learner_term=self.learner_term,
            learner_id=self.learner_id,
            finished=self.finished,
            draining=self.draining,
            refused=self.refused(),
            final_version=self.final_version if self.learner_term else None,
            steered_bound=self.steered_bound,
        )

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
        self.end_at(snapshot.final_version)
        self.steered_bound = snapshot.steered_bound
        held = in_order(entries)
        self.entries.restore(snapshot, held, free)
        for entry in held:
            if entry.state is State.LEASED:
                entry.expires_at_s = expires_at_s
                self._expiries.add(entry)
            elif entry.state is State.BUFFERED:
                self._ready.add(entry)
            else:
                versions = self._lent if entry.state is State.TAKEN else self._trained
                versions.setdefault(entry.version, []).append(entry.prompt_index)
        # A journal that lost its last commits may know only part of a batch that the learner took
        # whole: the step on the whole batch would count as one on that part.
        parts = [v for v, lent in self._lent.items() if len(lent) < self.groups_per_step]
        for prompt_index in [index for version in parts for index in self._lent.pop(version)]:
            self._make_ready(self.entries[prompt_index])

    def _leased(self, lease_id: str) -> Entry | None:
        entry = self.entries.find(lease_id)
        return entry if entry is not None and entry.state is State.LEASED else None

    def _end(self, entry: Entry, reason: DropReason) -> None:
        may_go_on = entry.min_policy_version <= self.version and not self.finished
        if entry.siblings and may_go_on:
            self.entries.vacate(entry, reason)
        else:
            self.entries.drop(entry, reason)

    def _drop_vacant(self, newer_than: int) -> None:
        """Drop the vacant entries that only a version newer than this one may sample."""
        for version, prompt_index in tuple(self.entries.vacant):
            if version > newer_than:
                self.entries.drop_vacant(self.entries[prompt_index])

    # What is finished, lent and trained.

    def _settle(self, version: int) -> None:
        """Acknowledge what was trained at versions <= `version`."""
        for trained in sorted(v for v in self._trained if v <= version):
            for prompt_index in self._trained.pop(trained):
                self.entries.acknowledge(self.entries[prompt_index])

    def _give_back(self, newer_than: int) -> None:
        """Buffer again what is taken, or trained at a newer version."""
        undone = [self._trained.pop(v) for v in tuple(self._trained) if v > newer_than]
        prompt_indices = list(chain(*self._lent.values(), *undone))
        self._lent.clear()
        for prompt_index in prompt_indices:
            self._make_ready(self.entries[prompt_index])

    def _make_ready(self, entry: Entry) -> None:
        self.entries.move(entry, State.BUFFERED)
        self._ready.add(entry)

    def _evict(self, version: int) -> None:
        """Drop what is too old to be trained at `version`."""
        while (entry := self._ready.first()) and self._is_stale(header_of(entry), version):
            self.entries.drop(entry, DropReason.STALE)

    def _is_stale(self, header: GroupHeader, version: int) -> bool:
        """Whether the group is too old to be trained at `version`, and is dropped for it."""
        is_overdue = version - header.oldest_version > self.max_staleness
        return is_overdue and self.overdue is not OverduePolicy.TRAIN

    def _drop_abandoned(self, num_missing: int, version: int) -> None:
        """Drop groups that the batch for `version` would get but may not train, since their newest
        token is too far ahead, until it would get none of them."""
        newest = version + self.max_staleness
        while self.entries.columns.newest_buffered() > newest:
            buffered = (entry for entry in self.entries if entry.state is State.BUFFERED)
            first = in_order(buffered)[: self._num_lendable(num_missing, version)]
            abandoned = [entry for entry in first if header_of(entry).newest_version > newest]
            if not abandoned:
                return
            for entry in abandoned:
                self.entries.drop(entry, DropReason.ABANDONED)

    def _lend(self, num_groups: int, version: int) -> None:
        for _ in range(num_groups):
            entry = self._ready.first()
            assert entry is not None, "they were counted"
            self.entries.move(entry, State.TAKEN, version)
            self._lent.setdefault(version, []).append(entry.prompt_index)

    def _num_lendable(self, num_missing: int, version: int) -> int:
        """How many of the oldest finished groups the batch for `version` may get now.

        The batch lacks `num_missing`; it may get fewer only while it waits for groups that are due.
        """
        if self.entries.count(State.BUFFERED) < num_missing:
            return 0
        if self.overdue is not OverduePolicy.WAIT:
            return num_missing
        places = self._free_places(num_missing, version)
        return max(0, min((num_missing, *(num_free for _, num_free in places))))

    def _free_places(self, num_missing: int, version: int) -> Iterator[tuple[int, int]]:
        """For each oldest version of leased groups: the places in batches up to the one at which
        they are due, less the groups that need one."""
        leased = self.entries.columns.leased_versions
        num_leased = 0
        for oldest in sorted(leased):
            num_leased += leased[oldest]
            num_steps = max(0, oldest + self.max_staleness - version)
            yield oldest, num_missing + num_steps * self.groups_per_step - num_leased
