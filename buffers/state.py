"""A buffer's whole state: the ledger, the payloads it keeps, and who reported when.

Invariant: a payload is held exactly while the ledger has its group. Calls return at once and never
wait; a backend (`buffers.memory`, `buffers.zmq_server`) does the waiting and owns the clock.
"""

import uuid
from collections.abc import Iterable, Mapping
from typing import Generic, TypeVar

from buffers.account import Entry, Image
from buffers.ledger import Ledger
from buffers.roster import Roster
from streamrl.errors import LedgerError
from streamrl.types import (
    Books,
    BufferStats,
    DropReason,
    GeneratorStatus,
    GroupHeader,
    HeartbeatReply,
    Lease,
    Standing,
)

Payload = TypeVar("Payload")
RESUMES_WITHIN_S = 120.0


class BufferState(Generic[Payload]):
    """`Payload` is what the backend keeps of a group: the record itself, or its bytes."""

    def __init__(self, ledger: Ledger, *, lease_ttl_s: float) -> None:
        self.ledger = ledger
        self.lease_ttl_s = lease_ttl_s
        self.incarnation = uuid.uuid4().hex
        self._payloads: dict[int, tuple[Payload, int]] = {}
        self._num_bytes = 0
        self.roster = Roster()
        self._doubtful_until_s: float | None = None

    def lease(self, lease_id: str, generator_id: str, now_s: float) -> Lease | None:
        """A generator that is not active is granted nothing new."""
        if self.roster.standing(generator_id) is not Standing.ACTIVE:
            self.ledger.expire(now_s)
            if lease_id not in self.ledger.live_leases():
                return None
        return self.ledger.lease(lease_id, now_s, self.lease_ttl_s)

    def put(self, lease_id: str, header: GroupHeader, payload: Payload, now_s: float) -> None:
        if self.ledger.put(lease_id, header, now_s):
            self._payloads[header.sequence] = (payload, header.num_bytes)
            self._num_bytes += header.num_bytes

    def release(self, lease_id: str, reason: DropReason) -> None:
        self.ledger.release(lease_id, reason)

    def heartbeat(self, status: GeneratorStatus, now_s: float) -> HeartbeatReply:
        """Renew its leases (their ids start with its session). An earlier session's end here, and
        what that says from now on is refused."""
        is_fenced = self.roster.fences(status)
        if is_fenced:
            self._end_session(status.session, DropReason.EXPIRED)
        else:
            self._enter(status, now_s)
        return HeartbeatReply(
            policy_version=self.ledger.version,
            lost_lease_ids=self.ledger.renew(status.lease_ids, now_s, self.lease_ttl_s),
            finished=self._is_over,
            incarnation=self.incarnation,
            standing=self.roster.standing(status.generator_id),
            is_fenced=is_fenced,
        )

    def set_standing(self, generator_id: str, standing: Standing) -> None:
        self.roster.set_standing(generator_id, standing)

    def attach(self, policy_version: int, books: Books | None) -> int:
        self._doubtful_until_s = None
        epoch = self.ledger.attach(policy_version, books)
        self._forget_freed()
        return epoch

    def take(self, num_groups: int, policy_version: int, epoch: int) -> tuple[GroupHeader, ...]:
        headers = self.ledger.take(num_groups, policy_version, epoch)
        self._forget_freed()
        return headers

    def fetch(self, sequences: Iterable[int]) -> tuple[Payload, ...]:
        missing = [sequence for sequence in sequences if sequence not in self._payloads]
        if missing:
            raise LedgerError(f"no group is held for the sequences {missing}")
        return tuple(self._payloads[sequence][0] for sequence in sequences)

    def advance(self, policy_version: int, epoch: int) -> Books:
        self.ledger.advance(policy_version, epoch)
        self._forget_freed()
        return self.ledger.books()

    def acknowledge(self, policy_version: int, epoch: int) -> None:
        self.ledger.acknowledge(policy_version, epoch)
        self._forget_freed()

    def finish(self, epoch: int) -> None:
        self._doubtful_until_s = None
        self.ledger.finish(epoch)

    def drain(self) -> None:
        """From here on leases only complete the last batch; until a learner attaches."""
        self.ledger.draining = True

    def expire(self, now_s: float) -> None:
        """End overdue leases and forget generators not heard of for one lease's life."""
        self.ledger.expire(now_s)
        if self._doubtful_until_s is not None and now_s > self._doubtful_until_s:
            self._doubtful_until_s = None
        self.roster.forget_silent(now_s, self.lease_ttl_s)

    def stats(self, now_s: float, refusal: str = "") -> BufferStats:
        """`refusal` is why the backend takes nothing in at present."""
        return BufferStats(
            incarnation=self.incarnation,
            policy_version=self.ledger.version,
            groups_per_step=self.ledger.groups_per_step,
            max_staleness=self.ledger.max_staleness,
            books=self.ledger.books(),
            refused=self.ledger.refused(),
            oldest_version=self.ledger.oldest_version(),
            num_bytes=self._num_bytes,
            generators=self.roster.statuses,
            heartbeat_ages_s=self.roster.ages_s(now_s),
            standings=self.roster.standings,
            refusal=refusal,
            finished=self.ledger.finished,
            draining=self.ledger.draining,
        )

    @property
    def is_deserted(self) -> bool:
        """The run has ended and every generator has left."""
        return self._is_over and not self.roster and not self.ledger.live_leases()

    @property
    def _is_over(self) -> bool:
        """A run that a journal calls ended may be about to go on: its learner has a while."""
        return self.ledger.finished and self._doubtful_until_s is None

    def payload(self, sequence: int) -> Payload:
        return self._payloads[sequence][0]

    def restore(
        self,
        image: Image,
        entries: Iterable[Entry],
        free: Iterable[int],
        payloads: Mapping[int, Payload],
        now_s: float,
    ) -> None:
        """Continue, in a blank state, where a journal ends."""
        self._doubtful_until_s = now_s + RESUMES_WITHIN_S
        held = list(entries)
        self.ledger.restore(image, held, free, now_s + self.lease_ttl_s)
        for entry in held:
            if entry.header is not None:
                size = entry.header.num_bytes
                self._payloads[entry.sequence] = (payloads[entry.sequence], size)
                self._num_bytes += size

    def _enter(self, status: GeneratorStatus, now_s: float) -> None:
        for lease in status.held:
            self.ledger.reassert(lease, now_s, self.lease_ttl_s)
        if (older := self.roster.enter(status, now_s)) is not None:
            self._end_session(older, DropReason.EXPIRED)
        if status.is_leaving:
            self._end_session(status.session, DropReason.RELEASED)
            self.roster.leave(status.generator_id)

    def _end_session(self, session: str, reason: DropReason) -> None:
        for lease_id in self.ledger.live_leases():
            if lease_id.startswith(session):
                self.ledger.release(lease_id, reason)

    def _forget_freed(self) -> None:
        for sequence in self.ledger.drain_freed():
            _, num_bytes = self._payloads.pop(sequence)
            self._num_bytes -= num_bytes
