"""A buffer's whole state: the ledger, the payloads, and the generator registry.

Invariant: a payload is held exactly while the ledger has its group. Only a journal may have lost
some: their groups are dropped and their prompts granted again, those that a learner has taken when
they would be buffered again. Calls return at once and never wait; a backend (`buffers.memory`,
`buffers.zmq.server`) waits and owns the clock.
"""

import logging
import math
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Generic, TypeVar

from buffers.ledger.entries import LedgerSnapshot
from buffers.ledger.entry import Entry, State, lease_of
from buffers.ledger.generator_registry import GeneratorRegistry
from buffers.ledger.ledger import Ledger
from buffers.ledger.proportion import require_proportion
from buffers.retries import RetryCounter
from streamrl.errors import LedgerError, LostMemoryError
from streamrl.types import (
    MAX_AWAITED,
    Books,
    BufferStats,
    DropReason,
    GeneratorStatus,
    GroupHeader,
    HeartbeatReply,
    Lease,
    Loan,
    SchedulingState,
)

log = logging.getLogger(__name__)

Payload = TypeVar("Payload")
# Longer than a large model takes to load.
RESUMES_WITHIN_S = 600.0
# Attaches whose repetition is recognized; a client repeats only its last one.
MAX_REPEATED = 64


class BufferState(Generic[Payload]):
    """`Payload` is what the backend keeps of a group: the record itself, or its bytes.

    `refusal` is why the backend accepts no group at present; "" if it does.
    """

    def __init__(self, ledger: Ledger, *, lease_ttl_s: float) -> None:
        self.ledger = ledger
        self.lease_ttl_s = lease_ttl_s
        self.incarnation = uuid.uuid4().hex
        self._payloads: dict[int, tuple[Payload, int]] = {}
        self._num_bytes = 0
        self._lost: frozenset[int] = frozenset()
        self.registry = GeneratorRegistry()
        self.refusal = ""
        self._learner_terms: dict[str, int] = {}
        self._resumes_until_s: float | None = None
        self._due_since_s: float | None = None
        self._retries = RetryCounter()
        ledger.subscribe(self._retries.on_event)

    def lease(
        self, lease_ids: Sequence[str], generator_id: str, now_s: float, learner_id: str = ""
    ) -> tuple[Lease, ...]:
        """Those of these leases that are open, and new ones up to the generator's share."""
        self.ledger.expire(now_s)
        known = {lease_id for lease_id in lease_ids if self.ledger.knows(lease_id)}
        others = [lease_id for lease_id in lease_ids if lease_id not in known]
        chosen = known.union(others[: self._share(generator_id, learner_id)])
        asked = (lease_id for lease_id in lease_ids if lease_id in chosen)
        leases = (self.ledger.lease(lease_id, now_s, self.lease_ttl_s) for lease_id in asked)
        return tuple(lease for lease in leases if lease is not None)

    def put(self, lease_id: str, header: GroupHeader, payload: Payload, now_s: float) -> None:
        if self.ledger.put(lease_id, header, now_s):
            self._payloads[header.prompt_index] = (payload, header.num_bytes)
            self._num_bytes += header.num_bytes

    def release(self, lease_id: str, reason: DropReason, lengths: Sequence[int] = ()) -> None:
        self.ledger.release(lease_id, reason, lengths)

    def heartbeat(self, status: GeneratorStatus, now_s: float) -> HeartbeatReply:
        """Renew the generator's leases, whose ids are SESSION/NUMBER.

        The leases of an earlier session end here, and its later heartbeats are fenced.
        """
        is_fenced = self.registry.fences(status)
        if is_fenced:
            self._end_session(status.session, DropReason.EXPIRED)
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

    def set_scheduling_state(self, generator_id: str, scheduling_state: SchedulingState) -> None:
        self.registry.set_scheduling_state(generator_id, scheduling_state)

    def attach(
        self,
        policy_version: int,
        books: Books | None,
        call_id: str = "",
        final_version: int | None = None,
        learner_id: str = "",
    ) -> int:
        """The learner's term; a repeated call with the same `call_id` gets the same one.

        The run now ends at `final_version`; None keeps what was set before.
        """
        if call_id and call_id in self._learner_terms:
            return self._learner_terms[call_id]
        if books is not None:
            require_proportion(books, self.ledger.books())
        self._resumes_until_s = self._due_since_s = None
        learner_term = self.ledger.attach(policy_version, books, learner_id)
        self.ledger.admission.end_at(final_version)
        self._orphan_lost()
        self._delete_freed()
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
    ) -> Loan:
        """The loan without payloads. See `Ledger.take`."""
        headers = self.ledger.take(num_groups, policy_version, learner_term, num_held)
        self._delete_freed()
        wait_due_s = self._wait_due_s(now_s)
        if len(headers) >= num_groups:
            self._due_since_s = None
        elif self._due_since_s is None and self.ledger.awaited():
            self._due_since_s = now_s
        return Loan(headers=headers, wait_due_s=wait_due_s)

    def fetch(self, prompt_indices: Sequence[int]) -> tuple[Payload, ...]:
        """Each once.

        Raises:
            LedgerError: one is not held here, or is asked for twice.
        """
        if len(set(prompt_indices)) < len(prompt_indices):
            raise LedgerError(f"prompt_indices: {len(prompt_indices)} prompts, some of them twice")
        missing = [
            prompt_index for prompt_index in prompt_indices if prompt_index not in self._payloads
        ]
        if not self._lost.isdisjoint(missing):
            # The learner attaches again, and these prompts are sampled again.
            raise LostMemoryError(f"the journal has lost the groups of the prompts {missing}")
        if missing:
            raise LedgerError(f"no group is held for the prompts {missing[:MAX_AWAITED]}")
        return tuple(self._payloads[prompt_index][0] for prompt_index in prompt_indices)

    def advance(self, policy_version: int, learner_term: int) -> None:
        self.ledger.advance(policy_version, learner_term)
        self._delete_freed()

    def acknowledge(self, policy_version: int, learner_term: int) -> None:
        self.ledger.acknowledge(policy_version, learner_term)
        self._delete_freed()

    def finish(self, learner_term: int) -> None:
        self._resumes_until_s = None
        self.ledger.finish(learner_term)

    def drain(self) -> None:
        """Grant only the leases that complete the last batch, until a learner attaches."""
        self.ledger.draining = True

    def expire(self, now_s: float) -> None:
        """End expired leases; remove generators that have not reported for `lease_ttl_s`."""
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
            overdue=self.ledger.overdue,
            books=self.ledger.books(),
            refused=self.ledger.refused(),
            lengths=self.ledger.responses.frozen(),
            oldest_version=self.ledger.oldest_version(),
            num_bytes=self._num_bytes,
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
        """A run that has ended in its journal may be resumed: a learner has time to attach."""
        return self.ledger.finished and self._resumes_until_s is None

    def payload(self, prompt_index: int) -> Payload:
        return self._payloads[prompt_index][0]

    def restore(
        self,
        snapshot: LedgerSnapshot,
        entries: Iterable[Entry],
        free: Iterable[int],
        payloads: Mapping[int, Payload],
        now_s: float,
    ) -> None:
        """Continue, in a blank state, where a journal ends, which may have lost payloads."""
        self._resumes_until_s = now_s + RESUMES_WITHIN_S
        held = list(entries)
        self.ledger.restore(snapshot, held, free, now_s + self.lease_ttl_s)
        for entry in held:
            if entry.header is not None and entry.prompt_index in payloads:
                size = entry.header.num_bytes
                self._payloads[entry.prompt_index] = (payloads[entry.prompt_index], size)
                self._num_bytes += size
        with_group = (entry.prompt_index for entry in held if entry.header is not None)
        self._lost = frozenset(with_group) - payloads.keys()
        self._orphan_lost()
        self._delete_freed()

    def _share(self, generator_id: str, learner_id: str) -> int:
        """New leases that one call may be granted: this generator's share of what is admitted.

        A generator with a large engine thus leaves some to those that call a moment later. One with
        weights of another learner has no share.
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
            self._end_session(older, DropReason.EXPIRED)
        if status.is_leaving:
            self._end_session(status.session, DropReason.RELEASED)
            self.registry.remove(status.generator_id)

    def _end_session(self, session: str, reason: DropReason) -> None:
        for lease_id in self.ledger.live_leases():
            if lease_id.partition("/")[0] == session:
                self.ledger.release(lease_id, reason)

    def _wait_due_s(self, now_s: float) -> float:
        """How long the batch at hand has waited for groups that are due, others being finished."""
        return 0.0 if self._due_since_s is None else now_s - self._due_since_s

    def _orphan_lost(self) -> None:
        """Drop the buffered groups that the journal has lost."""
        lost = ((index, self.ledger.entry(index)) for index in sorted(self._lost))
        orphaned = [index for index, entry in lost if entry and entry.state is State.BUFFERED]
        for prompt_index in orphaned:
            self.ledger.orphan(prompt_index)
        if orphaned:
            log.warning("lost, and to be sampled again: the groups of the prompts %s", orphaned)

    def _delete_freed(self) -> None:
        freed = self.ledger.drain_freed()
        self._lost = self._lost.difference(freed)
        for prompt_index in freed:
            _, num_bytes = self._payloads.pop(prompt_index, (None, 0))
            self._num_bytes -= num_bytes
