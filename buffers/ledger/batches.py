"""Batches: which finished groups are lent for the next step, and which are too far from it.

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

- lease: with u groups leased or buffered, `Admission.min_policy_version` makes it due at
  v + (u + B - r) // B or later. For every j from there on, r + (j - v) B >= u + 1 >= due(j).
- put, release, expiry: due(j) does not grow. A prompt that is granted again has a new lease.
- lend: the x oldest finished groups, with x <= r + (j - v) B - leased(j) for every j: each leased
  group has a place left in the batches up to its last one. Of the finished groups that are due at j
  or before, either x are lent, and both sides fall by x, or all are, and leased(j) is what remains.
- a learner that goes back from V to v: what was trained at u in [v, V) was due at u or later, what
  was in flight at V or later, at most B + (j - V) B of it at j or before. It is all buffered or
  leased again, or freed, and r is B. So due(j) is at most (j - v + 1) B for j < V, and for j >= V
  at most (V - v) B + B + (j - V) B = r + (j - v) B.
- drop: due(j) does not grow.

No deadlock: a batch waits only for leased groups. They finish, or their leases end; where leased(j)
is 0, r groups may be lent at once.

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

from collections.abc import Iterator

from buffers.ledger.admission import require_capacity
from buffers.ledger.entries import Entries
from buffers.ledger.entry import Entry, State, header_of
from buffers.ledger.loans import Loans
from buffers.ledger.queues import ReadyQueue, in_order
from streamrl.types import DropReason, GroupHeader, OverduePolicy


class Batches:
    """The batches of one ledger, from its ready queue to its loans."""

    def __init__(
        self,
        entries: Entries,
        ready: ReadyQueue,
        loans: Loans,
        groups_per_step: int,
        max_staleness: int,
        overdue: OverduePolicy,
    ) -> None:
        self._entries = entries
        self._ready = ready
        self._loans = loans
        self._groups_per_step = groups_per_step
        self._max_staleness = max_staleness
        self._overdue = overdue

    def take(
        self, num_groups: int, version: int, current: int, num_held: int | None
    ) -> tuple[GroupHeader, ...]:
        """See `Ledger.take`; the ledger is at version `current`."""
        num_missing = num_groups - len(self._loans.prompt_indices(version))
        if num_missing > 0:
            self._loans.require_turn(version, current)
            require_capacity(num_groups, self._max_staleness, self._groups_per_step)
            self.evict(version)
            self._drop_abandoned(num_missing, version)
            num_lendable = self._num_lendable(num_missing, version)
            if num_lendable == num_missing or num_held is not None:
                self._lend(num_lendable, version)
        loan = self._loans.prompt_indices(version)
        if len(loan) < num_groups and (num_held is None or len(loan) <= num_held):
            return ()
        return tuple(header_of(self._entries[prompt_index]) for prompt_index in loan)

    def awaited(self, version: int) -> tuple[Entry, ...]:
        """The leased groups among which the batch for `version` waits for some, because they are
        due; first due first. () unless enough others are finished.
        """
        num_missing = self._groups_per_step - len(self._loans.prompt_indices(version))
        is_short = self._entries.count(State.BUFFERED) < num_missing
        if num_missing <= 0 or is_short or self._overdue is not OverduePolicy.WAIT:
            return ()
        places = self._free_places(num_missing, version)
        newest = next((oldest for oldest, num_free in places if num_free < num_missing), None)
        if newest is None:
            return ()
        newest = max(newest, version - self._max_staleness)
        leased = (entry for entry in self._entries if entry.state is State.LEASED)
        due = [entry for entry in leased if entry.min_policy_version <= newest]
        return tuple(sorted(due, key=lambda e: (e.min_policy_version, e.prompt_index)))

    def evict(self, version: int) -> None:
        """Drop what is too old to be trained at `version`."""
        while (entry := self._ready.first()) and self.is_stale(header_of(entry), version):
            self._entries.drop(entry, DropReason.STALE)

    def is_stale(self, header: GroupHeader, version: int) -> bool:
        """Whether the group is too old to be trained at `version`, and is dropped for it."""
        is_overdue = version - header.oldest_version > self._max_staleness
        return is_overdue and self._overdue is not OverduePolicy.TRAIN

    def _drop_abandoned(self, num_missing: int, version: int) -> None:
        """Of the groups that the batch for `version` would get, drop those that it may not train
        because their newest token is too far ahead, until it would get none of them."""
        newest = version + self._max_staleness
        while self._entries.columns.newest_buffered() > newest:
            buffered = (entry for entry in self._entries if entry.state is State.BUFFERED)
            first = in_order(buffered)[: self._num_lendable(num_missing, version)]
            abandoned = [entry for entry in first if header_of(entry).newest_version > newest]
            if not abandoned:
                return
            for entry in abandoned:
                self._entries.drop(entry, DropReason.ABANDONED)

    def _lend(self, num_groups: int, version: int) -> None:
        for _ in range(num_groups):
            entry = self._ready.first()
            assert entry is not None, "they were counted"
            self._loans.lend(entry, version)

    def _num_lendable(self, num_missing: int, version: int) -> int:
        """How many of the oldest finished groups the batch for `version` may get now.

        The batch lacks `num_missing`; it may get fewer only where it waits for groups that are due.
        """
        if self._entries.count(State.BUFFERED) < num_missing:
            return 0
        if self._overdue is not OverduePolicy.WAIT:
            return num_missing
        places = self._free_places(num_missing, version)
        return max(0, min((num_missing, *(num_free for _, num_free in places))))

    def _free_places(self, num_missing: int, version: int) -> Iterator[tuple[int, int]]:
        """For each oldest version of leased groups, the places in batches up to the one at which
        they are due, less the groups that need one of them."""
        leased = self._entries.columns.leased_versions
        num_leased = 0
        for oldest in sorted(leased):
            num_leased += leased[oldest]
            num_steps = max(0, oldest + self._max_staleness - version)
            yield oldest, num_missing + num_steps * self._groups_per_step - num_leased
