"""The whole state of a buffer: the ledger, the payloads, and the generator registry.

Invariant: a payload is held exactly while the ledger has its group, or its sibling. Only a journal
may have lost some: lost siblings are sampled again; lost groups are dropped and their prompts
granted again (groups that a learner has taken, when they would be buffered again). Calls return at
once and never wait; a backend (`buffers.memory`, `buffers.zmq.server`) waits and owns the clock.

`require_proportion` checks that a learner's books are plausible before the ledger adopts them. An
attach that passes costs time and memory for at most MAX_REOPENED prompts, whatever numbers the
books hold, and leaves books that close. Prompts that the books have finished and the ledger never
granted cost nothing.

`GeneratorRegistry`: which generators report to the buffer, and their scheduling states. An id
belongs to its newest session; an older session that still reports is fenced. A `SchedulingState`
belongs to the id, so it outlasts a generator's process; only DRAINING is removed when its generator
leaves.

`RetryCounter`: how many leases of a prompt ended without a group, to expose a prompt that never
gets one. Such a prompt is granted again each time, and if it kills each generator's process, it
leaves no other trace. Leases that a learner's books end are not counted. Only open prompts without
a group are counted: a count is forgotten once the prompt has a group or ends.
"""

import heapq
import logging
import math
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

from msgspec import Struct

from buffers.ledger.entries import Entry, Event, LedgerSnapshot, State, lease_of
from buffers.ledger.ledger import Ledger
from streamrl.errors import (
    LedgerError,
    LostMemoryError,
    UnknownGeneratorError,
    UnknownLeaseError,
)
from streamrl.types import (
    MAX_AWAITED,
    MAX_RETRIED,
    MIN_RETRIED_LEASES,
    Books,
    BufferStats,
    DropReason,
    GeneratorStatus,
    GroupHeader,
    HeartbeatReply,
    Lease,
    RetriedPrompt,
    SchedulingState,
    SiblingHeader,
    TakenBatch,
    replace,
)

log = logging.getLogger(__name__)

MAX_REOPENED = 2**18
# How many counts a ledger may have lost; adding it stays far below the largest `Count`.
MAX_LOST = 2**40


def require_proportion(books: Books, known: Books) -> None:
    """Refuse implausible `books` of a learner that attaches to a ledger with the books `known`.

    Raises:
        LedgerError: they are not valid books, or too far from this ledger's.
    """
    if not books.balanced:
        columns = books.in_flight + books.trained + books.acknowledged + sum(books.dropped.values())
        raise LedgerError(
            f"books: do not close: {books.granted} leases were granted, {columns} are accounted for"
        )
    _require_ranges(books)
    for name in ("granted", "next_prompt_index", "revision", "learner_term"):
        was, here = getattr(books, name), getattr(known, name)
        if was > here + MAX_LOST:
            raise LedgerError(f"books.{name}: is {was}; this buffer has {here}")
    num_open = sum(stop - start for start, stop in books.open_ranges)
    num_reopened = num_open + max(0, known.next_prompt_index - books.next_prompt_index)
    if num_reopened > MAX_REOPENED:
        raise LedgerError(
            f"books: {num_reopened} prompts would be granted again, from prompt "
            f"{books.next_prompt_index} on and {num_open} before it; this buffer reopens at most "
            f"{MAX_REOPENED}: move its journal away, and it starts from the learner's checkpoint"
        )


def _require_ranges(books: Books) -> None:
    behind = -1
    for start, stop in books.open_ranges:
        if not behind < start < stop <= books.next_prompt_index:
            raise LedgerError(
                f"books.open_ranges: ({start}, {stop}) follows {behind}; ranges ascend, are apart "
                f"and end at next_prompt_index {books.next_prompt_index}"
            )
        behind = stop


# A process that was suspended may resume after several others of its id have run.
MAX_REPLACED = 8
MAX_GENERATORS = 16_384


class _Report(Struct, frozen=True):
    """The last heartbeat, and the earlier sessions that this session has replaced."""

    status: GeneratorStatus
    seen_s: float
    replaced: tuple[str, ...]


class GeneratorRegistry:
    def __init__(self) -> None:
        self._reports: dict[str, _Report] = {}
        self.scheduling_states: dict[str, SchedulingState] = {}
        self._next_timeout_s = 0.0
        self._last_heartbeat_s: float | None = None

    def __len__(self) -> int:
        return len(self._reports)

    @property
    def statuses(self) -> tuple[GeneratorStatus, ...]:
        return tuple(report.status for report in self._reports.values())

    def ages_s(self, now_s: float) -> tuple[float, ...]:
        """The seconds since each of `statuses` was reported."""
        return tuple(now_s - report.seen_s for report in self._reports.values())

    def on_attach(self, now_s: float) -> None:
        """A learner attached: from now on the run needs generators."""
        self._last_heartbeat_s = now_s

    def last_age_s(self, now_s: float) -> float:
        """The seconds since any generator reported, or since `on_attach`."""
        return 0.0 if self._last_heartbeat_s is None else now_s - self._last_heartbeat_s

    def fences(self, status: GeneratorStatus) -> bool:
        """Whether a newer session has replaced this report's.

        Raises:
            LedgerError: there are too many generators.
        """
        known = self._reports.get(status.generator_id)
        if known is None and len(self._reports) >= MAX_GENERATORS:
            raise LedgerError(
                f"generator_id: {status.generator_id!r} is new, and {MAX_GENERATORS} generators "
                "report to this buffer, which is all that it takes"
            )
        return known is not None and status.session in known.replaced

    def update(self, status: GeneratorStatus, now_s: float) -> str | None:
        """Store a report that is not fenced; returns the session that it replaces, if any."""
        known = self._reports.get(status.generator_id)
        replaced, older = (known.replaced, known.status.session) if known else ((), status.session)
        if older != status.session:
            replaced = (*replaced, older)[-MAX_REPLACED:]
        report = _Report(replace(status, held=()), now_s, replaced)
        self._reports[status.generator_id] = report
        self._last_heartbeat_s = now_s
        return None if older == status.session else older

    def remove(self, generator_id: str) -> None:
        self._reports.pop(generator_id, None)
        if self.scheduling_state(generator_id) is SchedulingState.DRAINING:
            self.set_scheduling_state(generator_id, SchedulingState.ACTIVE)

    def forget_silent(self, now_s: float, timeout_s: float) -> None:
        """Remove the generators whose last report is older than `timeout_s`.

        It is called after every request, so it reads the reports only if one may be that old.
        """
        if now_s <= self._next_timeout_s:
            return
        self._reports = {
            generator_id: report
            for generator_id, report in self._reports.items()
            if now_s - report.seen_s <= timeout_s
        }
        oldest_s = min((report.seen_s for report in self._reports.values()), default=now_s)
        self._next_timeout_s = oldest_s + timeout_s

    def scheduling_state(self, generator_id: str) -> SchedulingState:
        return self.scheduling_states.get(generator_id, SchedulingState.ACTIVE)

    def set_scheduling_state(self, generator_id: str, scheduling_state: SchedulingState) -> None:
        """Set the scheduling state of this id.

        Raises:
            UnknownGeneratorError: no generator of this id reports or has a state.
        """
        known = self._reports.keys() | self.scheduling_states.keys()
        if generator_id not in known:
            raise UnknownGeneratorError.among(generator_id, known)
        # A new mapping, since a journal compares it with the previous one.
        self.scheduling_states = {**self.scheduling_states, generator_id: scheduling_state}
        if scheduling_state is SchedulingState.ACTIVE:
            del self.scheduling_states[generator_id]


_ENDS = ("buffered", "acknowledged", "dropped")


def ends_without_group(event: Event) -> bool:
    """Whether the event ends a lease whose prompt is granted again."""
    return bool(event.lease_id) and event.frees_prompt


class RetryCounter:
    """Counts for one ledger, from its events."""

    def __init__(self) -> None:
        self._num_leases: Counter[int] = Counter()

    def on_event(self, event: Event) -> None:
        if ends_without_group(event):
            self._num_leases[event.prompt_index] += 1
        elif event.state in _ENDS:
            self._num_leases.pop(event.prompt_index, None)

    def retried(self) -> tuple[RetriedPrompt, ...]:
        """See `BufferStats.retried`; on ties the later prompt comes first."""
        return most_retried(self._num_leases)


def most_retried(num_leases: Counter[int]) -> tuple[RetriedPrompt, ...]:
    """The prompts retried most often, by the number of leases that ended without a group."""
    counts = ((count, prompt_index) for prompt_index, count in num_leases.items())
    repeated = (count for count in counts if count[0] >= MIN_RETRIED_LEASES)
    return tuple(
        RetriedPrompt(prompt_index=prompt_index, num_leases=count)
        for count, prompt_index in heapq.nlargest(MAX_RETRIED, repeated)
    )


Payload = TypeVar("Payload")
PayloadKey: TypeAlias = tuple[int, int]
"""A payload's prompt, and its sibling number or GROUP."""
GROUP = -1
# Longer than a large model takes to load.
RESUMES_WITHIN_S = 600.0
# How many attaches are remembered to recognize repetitions; a client repeats only its last one.
MAX_REPEATED = 64


class BufferState(Generic[Payload]):
    """`Payload` is what the backend keeps of a group: the record itself, or its bytes.

    `refusal` is why the backend accepts no group at present; "" if it does. `run_name` is whose
    buffer it is; "" is of any run.
    """

    def __init__(self, ledger: Ledger, *, lease_ttl_s: float, run_name: str = "") -> None:
        self.ledger = ledger
        self.run_name = run_name
        self.lease_ttl_s = lease_ttl_s
        self.incarnation = uuid.uuid4().hex
        self.on_sibling: Callable[[int], None] = lambda _: None
        """Called with the prompt of each sibling that is stored."""
        self.on_session_end: Callable[[str, str], None] = lambda *_: None
        """Called with a generator and a session of it whose leases have ended."""
        self.registry = GeneratorRegistry()
        self.refusal = ""
        self._learner_terms: dict[str, int] = {}
        self._resumes_until_s: float | None = None
        self._due_since_s: float | None = None
        self._retries = RetryCounter()
        ledger.entries.subscribers.append(self._retries.on_event)

    def lease(
        self, lease_ids: Sequence[str], generator_id: str, now_s: float, learner_id: str = ""
    ) -> tuple[Lease, ...]:
        """Those of the given leases that are open, and new ones up to the generator's share."""
        self.ledger.expire(now_s)
        known = {lease_id for lease_id in lease_ids if self.ledger.entries.find(lease_id)}
        others = [lease_id for lease_id in lease_ids if lease_id not in known]
        chosen = known.union(others[: self._share(generator_id, learner_id)])
        asked = (lease_id for lease_id in lease_ids if lease_id in chosen)
        leases = [self.ledger.lease(lease_id, now_s, self.lease_ttl_s) for lease_id in asked]
        return tuple(lease for lease in leases if lease is not None)

    def put(self, lease_id: str, header: GroupHeader, payload: Payload, now_s: float) -> None:
        if self.ledger.put(lease_id, header, now_s):
            self.ledger.entries.hold(header.prompt_index, GROUP, payload, header.num_bytes)

    def put_sibling(
        self, sibling: SiblingHeader, payload: bytes | memoryview, now_s: float
    ) -> None:
        """Store a sibling of a leased group. See `Ledger.put_sibling`."""
        prompt_index = self.ledger.put_sibling(sibling, now_s)
        if prompt_index is not None:
            self.ledger.entries.hold(prompt_index, sibling.number, payload, sibling.num_bytes)
            self.on_sibling(prompt_index)

    def fetch_siblings(self, lease_id: str) -> tuple[bytes | memoryview, ...]:
        """The payloads of the lease's siblings, in the lease's order.

        Raises:
            UnknownLeaseError: the lease is not open.
        """
        entry = self.ledger.entries.find(lease_id)
        if entry is None:
            raise UnknownLeaseError(f"lease {lease_id} is unknown here, or has expired")
        return tuple(entry.payloads[known.number][0] for known in entry.siblings)

    def heartbeat(self, status: GeneratorStatus, now_s: float) -> HeartbeatReply:
        """Renew the generator's leases, whose ids are SESSION/NUMBER.

        Leases of an earlier session end now, and its later heartbeats are fenced.
        """
        is_fenced = self.registry.fences(status)
        if is_fenced:
            self._end_session(status.generator_id, status.session, DropReason.EXPIRED)
        else:
            self._register(status, now_s)
        return HeartbeatReply(
            policy_version=self.ledger.version,
            learner_id=self.ledger.learner_id,
            lost_lease_ids=self.ledger.renew(status.lease_ids, now_s, self.lease_ttl_s),
            finished=self.is_over,
            incarnation=self.incarnation,
            scheduling_state=self.registry.scheduling_state(status.generator_id),
            is_fenced=is_fenced,
        )

    def attach(
        self,
        policy_version: int,
        books: Books | None,
        call_id: str = "",
        final_version: int | None = None,
        learner_id: str = "",
    ) -> int:
        """Attach a learner; its term. A repeated call with the same `call_id` gets the same term.

        From now on the run ends at `final_version`; None keeps what was set before.
        """
        if call_id and call_id in self._learner_terms:
            return self._learner_terms[call_id]
        if books is not None:
            require_proportion(books, self.ledger.books())
        self._resumes_until_s = self._due_since_s = None
        learner_term = self.ledger.attach(policy_version, books, learner_id)
        self.ledger.end_at(final_version)
        self._orphan_lost(self.ledger.entries)
        latest = list(self._learner_terms.items())[1 - MAX_REPEATED :]
        self._learner_terms = {**dict(latest), call_id: learner_term}
        return learner_term

    def take(
        self,
        num_groups: int,
        policy_version: int,
        learner_term: int,
        now_s: float,
        num_held: int | None = None,
    ) -> TakenBatch:
        """The taken batch without payloads. See `Ledger.take`."""
        headers = self.ledger.take(num_groups, policy_version, learner_term, num_held)
        wait_due_s = self._wait_due_s(now_s)
        if len(headers) >= num_groups:
            self._due_since_s = None
        elif self._due_since_s is None and self.ledger.awaited():
            self._due_since_s = now_s
        return TakenBatch(headers=headers, wait_due_s=wait_due_s)

    def fetch(self, prompt_indices: Sequence[int]) -> tuple[Payload, ...]:
        """Each once.

        Raises:
            LedgerError: one is not held here, or is asked for twice.
        """
        found = {index: self.ledger.entries.get(index) for index in prompt_indices}
        if len(found) < len(prompt_indices):
            raise LedgerError(f"prompt_indices: {len(prompt_indices)} prompts, some of them twice")
        missing = {
            i: entry for i, entry in found.items() if not entry or GROUP not in entry.payloads
        }
        if any(entry and entry.header for entry in missing.values()):
            # The learner will attach again, and these prompts be sampled again.
            raise LostMemoryError(f"the journal has lost the groups of the prompts {[*missing]}")
        if missing:
            raise LedgerError(f"no group is held for the prompts {[*missing][:MAX_AWAITED]}")
        return tuple(entry.payloads[GROUP][0] for entry in found.values() if entry)

    def finish(self, learner_term: int) -> None:
        self._resumes_until_s = None
        self.ledger.finish(learner_term)

    def expire(self, now_s: float) -> None:
        """End expired leases, and remove generators that have not reported for `lease_ttl_s`."""
        self.ledger.expire(now_s)
        if self._resumes_until_s is not None and now_s > self._resumes_until_s:
            self._resumes_until_s = None
        self.registry.forget_silent(now_s, self.lease_ttl_s)

    def stats(self, now_s: float) -> BufferStats:
        return BufferStats(
            incarnation=self.incarnation,
            policy_version=self.ledger.version,
            groups_per_step=self.ledger.groups_per_step,
            max_staleness=self.ledger.max_staleness,
            staleness_bound=self.ledger.staleness_bound,
            overdue=self.ledger.overdue,
            books=self.ledger.books(),
            refused=self.ledger.refused(),
            lengths=self.ledger.entries.responses.frozen(),
            oldest_version=self.ledger.oldest_version(),
            num_bytes=self.ledger.entries.num_bytes,
            generators=self.registry.statuses,
            heartbeat_ages_s=self.registry.ages_s(now_s),
            last_heartbeat_age_s=self.registry.last_age_s(now_s),
            scheduling_states=self.registry.scheduling_states,
            refusal=self.refusal,
            finished=self.ledger.finished,
            is_over=self.is_over,
            draining=self.ledger.draining,
            awaited=tuple(map(lease_of, self.ledger.awaited()[:MAX_AWAITED])),
            wait_due_s=self._wait_due_s(now_s),
            retried=self._retries.retried(),
        )

    @property
    def is_complete(self) -> bool:
        """Whether the run has ended and every generator has left."""
        return self.is_over and not self.registry and not self.ledger.live_leases()

    @property
    def is_over(self) -> bool:
        """Whether the run is over. One that ended in its journal may be resumed, so a learner gets
        time to attach first."""
        return self.ledger.finished and self._resumes_until_s is None

    def lose(self, keys: Iterable[PayloadKey]) -> None:
        """These payloads are gone from where they were kept. Groups are sampled again (taken ones
        once their learner attaches again), and siblings together with the rest of their group."""
        touched: dict[int, Entry] = {}
        for prompt_index, number in keys:
            if (entry := self.ledger.entries.get(prompt_index)) is not None:
                touched[prompt_index] = entry
                self.ledger.entries.discard(entry, number)
                if number != GROUP:
                    entry.siblings = tuple(s for s in entry.siblings if s.number != number)
                    self.on_sibling(prompt_index)
        # Only these entries are visited: anybody may report unknown payloads as lost, again and
        # again.
        self._orphan_lost(touched.values())

    def snapshot(self) -> LedgerSnapshot:
        """A snapshot of everything but the entries and their payloads."""
        scheduling_states = self.registry.scheduling_states
        return replace(self.ledger.snapshot(), scheduling_states=scheduling_states)

    def restore(
        self,
        snapshot: LedgerSnapshot,
        entries: Iterable[Entry],
        free: Iterable[int],
        payloads: Mapping[PayloadKey, Any],
        now_s: float,
    ) -> None:
        """Continue, in a blank state, where a journal ends; it may have lost payloads."""
        self._resumes_until_s = now_s + RESUMES_WITHIN_S
        self.registry.scheduling_states = snapshot.scheduling_states
        held = list(entries)
        for entry in held:
            index = entry.prompt_index
            entry.siblings = tuple(s for s in entry.siblings if (index, s.number) in payloads)
            sizes = {s.number: s.num_bytes for s in entry.siblings}
            if entry.header is not None and (index, GROUP) in payloads:
                sizes[GROUP] = entry.header.num_bytes
            entry.payloads = {n: (payloads[index, n], size) for n, size in sizes.items()}
        self.ledger.restore(snapshot, held, free, now_s + self.lease_ttl_s)
        self._orphan_lost(self.ledger.entries)

    def _share(self, generator_id: str, learner_id: str) -> int:
        """How many new leases one call may get: this generator's share of what is admitted.

        So a generator with a large engine leaves some to those that call a moment later. A
        generator with another learner's weights gets none.
        """
        if learner_id and self.ledger.learner_id not in ("", learner_id):
            return 0
        if self.registry.scheduling_state(generator_id) is not SchedulingState.ACTIVE:
            return 0
        return math.ceil(self.ledger.num_admitted() / max(1, len(self.registry)))

    def _register(self, status: GeneratorStatus, now_s: float) -> None:
        for lease in status.held:
            self.ledger.reassert(lease, now_s, self.lease_ttl_s)
        if (older := self.registry.update(status, now_s)) is not None:
            self._end_session(status.generator_id, older, DropReason.EXPIRED)
        if status.is_leaving:
            self._end_session(status.generator_id, status.session, DropReason.RELEASED)
            self.registry.remove(status.generator_id)

    def _end_session(self, generator_id: str, session: str, reason: DropReason) -> None:
        for lease_id in self.ledger.entries.columns.leases_of(session):
            self.ledger.end_lease(lease_id, reason)
        self.on_session_end(generator_id, session)

    def _wait_due_s(self, now_s: float) -> float:
        """How long the current batch has waited for groups that are due, while others were
        finished."""
        return 0.0 if self._due_since_s is None else now_s - self._due_since_s

    def _orphan_lost(self, entries: Iterable[Entry]) -> None:
        """Drop those of these groups that are buffered and whose payload is lost."""
        buffered = (entry for entry in entries if entry.state is State.BUFFERED)
        lost = sorted(entry.prompt_index for entry in buffered if GROUP not in entry.payloads)
        for prompt_index in lost:
            self.ledger.entries.drop(self.ledger.entries[prompt_index], DropReason.ORPHANED)
        if lost:
            log.warning("lost, and to be sampled again: the groups of the prompts %s", lost)
