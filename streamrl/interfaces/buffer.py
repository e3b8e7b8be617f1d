"""The buffer's interfaces: `GeneratorBuffer` for the generators, `LearnerBuffer` for the learner,
because no caller needs both. A backend implements both as `TrajectoryBuffer`.
"""

from collections.abc import Sequence
from typing import Protocol

from streamrl.types import (
    Books,
    BufferStats,
    DropReason,
    GeneratorStatus,
    HeartbeatReply,
    Lease,
    SchedulingState,
    SiblingHeader,
    TakenBatch,
    TrajectoryGroup,
)


class GeneratorBuffer(Protocol):
    """The generators' side of the buffer. Every call may be repeated after a lost reply."""

    async def lease(
        self, lease_ids: Sequence[str], generator_id: str, wait_s: float, learner_id: str = ""
    ) -> tuple[Lease, ...]:
        """Leases with these ids, as many as are admitted; each is the right to generate one group.

        Waits until one is admitted; () if none is within `wait_s`. The caller chooses the ids; a
        repeated call with the same ids returns the same leases, and may add some. If several
        generators report, a call grants at most this one's share of what is admitted, rounded up.
        Prompts whose lease lost its generator and has siblings come first: the new lease takes over
        the `min_policy_version` and the siblings. An inactive generator gets no new lease, nor does
        one with weights of a `learner_id` other than the attached learner's; "" stands for the
        model folder's weights.
        """
        ...

    async def put(self, lease_id: str, group: TrajectoryGroup) -> None:
        """Store the finished group; this ends the lease.

        Raises:
            UnknownLeaseError: expired or never granted; the group is not stored.
            DuplicateGroupError: another group was put under this lease.
            CorruptMessageError: the group breaks a rule of its type; it is quarantined.
        """
        ...

    async def put_sibling(self, sibling: SiblingHeader, payload: bytes) -> None:
        """Store one sibling as it is now, finished or not, while its group is being sampled.

        It is kept until the group is put or its prompt is dropped, or until the same sibling comes
        with more tokens. If the lease loses its generator, the prompt's next lease has it.

        Raises:
            UnknownLeaseError: expired or never granted; the sibling is not stored.
            MessageTooLargeError: it is larger than a group may be.
        """
        ...

    async def fetch_siblings(self, lease_id: str) -> tuple[bytes | memoryview, ...]:
        """The payloads of the lease's `kept_siblings`, in the same order.

        Raises:
            UnknownLeaseError: expired or never granted.
        """
        ...

    async def release(self, lease_id: str, reason: DropReason, lengths: Sequence[int] = ()) -> None:
        """End the lease without a group; the reason decides whether its prompt is granted again.

        `lengths` are those of the responses sampled under it, which are counted.
        """
        ...

    async def heartbeat(self, status: GeneratorStatus) -> HeartbeatReply:
        """Report a status, and renew the leases in it.

        The first report of a new session ends the old session's leases and fences it. A draining
        generator that leaves is active again when it returns.
        """
        ...


class LearnerBuffer(Protocol):
    """The learner's side of the buffer; calls of a replaced learner are fenced."""

    async def attach(
        self, policy_version: int, books: Books | None, learner_id: str = ""
    ) -> BufferStats:
        """Become the learner, at this version; groups trained by later steps are buffered again.

        Generators get leases only with the weights of `learner_id`, which sends them; "" allows
        any. `books` restores the position in the prompt stream if the buffer has lost it. Once
        another learner attaches, later calls raise FencedError.
        """
        ...

    async def take(
        self,
        num_groups: int,
        policy_version: int,
        wait_s: float,
        *,
        with_payloads: bool = False,
        num_held: int | None = None,
    ) -> TakenBatch:
        """A batch of the oldest groups, to be trained at `policy_version`.

        Waits until there are `num_groups` and, under `buffer.overdue: wait`, those that are due are
        among them; empty if that is not so after `wait_s`. A repeated call for the same version
        returns the same batch.

        A caller that holds the first `num_held` groups of the batch gets a longer part as soon as
        there is one: what can be lent while groups that are due are still being sampled. Payloads
        are those of the new groups.
        """
        ...

    async def fetch(self, prompt_indices: Sequence[int]) -> tuple[TrajectoryGroup, ...]:
        """The payloads of taken groups, in this order; used by a learner with several ranks.

        Raises:
            LedgerError: a group is not held.
        """
        ...

    async def advance(self, policy_version: int, steered_bound: int = 0) -> BufferStats:
        """The optimizer step that made this version has used its batch; returns the new stats.

        If the run steers the bound on staleness, leases are granted under `steered_bound`, in
        versions, from now on; otherwise it is ignored.
        """
        ...

    async def acknowledge(self, policy_version: int) -> None:
        """A checkpoint of this version is durable: delete the groups that it contains."""
        ...

    async def finish(self) -> None:
        """The run has ended: grant no more leases; generators leave."""
        ...


class TrajectoryBuffer(GeneratorBuffer, LearnerBuffer, Protocol):
    """The whole buffer, which every backend implements."""

    async def stats(self) -> BufferStats:
        """The books, the generator registry and the sizes."""
        ...

    async def drain(self) -> None:
        """Grant only the leases that complete the last batch, so that the groups in flight end.

        Lasts until a learner attaches or the buffer loses its memory; may be repeated.
        """
        ...

    async def set_scheduling_state(
        self, generator_id: str, scheduling_state: SchedulingState
    ) -> None:
        """Set the scheduling state of a generator id, which outlasts the generator's process.

        Raises:
            UnknownGeneratorError: no generator of this id reports.
        """
        ...

    async def close(self) -> None:
        """Close sockets and tasks; leases stay valid until they are released or expire."""
        ...
