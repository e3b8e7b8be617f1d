"""What generators, the buffer and the learner tell each other of leases, books and themselves."""

from enum import StrEnum

from msgspec import Struct

from streamrl.types.index_ranges import IndexRanges, members
from streamrl.types.rollouts import GroupHeader, TrajectoryGroup


class DropReason(StrEnum):
    """Why a lease or its group left the books without being trained.

    `EXPIRED`, `RELEASED` and `ORPHANED` end a lease only: its prompt is granted again, so the
    prompt is not skipped. The others end the prompt.
    """

    STALE = "stale"
    FAILED = "failed"
    FILTERED = "filtered"
    MALFORMED = "malformed"
    EXPIRED = "expired"
    RELEASED = "released"
    ORPHANED = "orphaned"

    @property
    def returns_prompt(self) -> bool:
        return self in (DropReason.EXPIRED, DropReason.RELEASED, DropReason.ORPHANED)


class RefusalReason(StrEnum):
    """Why a put was turned away: it held no live lease, so it never was in the books."""

    DUPLICATE = "duplicate"
    UNKNOWN_LEASE = "unknown_lease"
    MALFORMED = "malformed"


class SchedulingState(StrEnum):
    """What a person has ordered of a generator, by its id.

    `CORDONED` is granted no lease, its groups under way finish; `DRAINING` is cordoned and leaves
    once they have.
    """

    ACTIVE = "active"
    CORDONED = "cordoned"
    DRAINING = "draining"


class Lease(Struct, frozen=True, kw_only=True):
    """The right to generate one group.

    `prompt_index` is its place in the seeded prompt stream. `min_policy_version`: sampled by an
    older version, the group would be too stale by the time its turn comes. `expires_at_s` is on the
    buffer's clock.
    """

    lease_id: str
    prompt_index: int
    min_policy_version: int
    expires_at_s: float


class Loan(Struct, frozen=True, kw_only=True):
    """Groups lent to the learner for one version, oldest first; empty if there were too few.

    `groups` are the payloads of `headers`, in the same order, if the learner asked for them.
    """

    headers: tuple[GroupHeader, ...] = ()
    groups: tuple[TrajectoryGroup, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.headers)


class Books(Struct, frozen=True, kw_only=True):
    """The ledger's account: every lease ever granted is in exactly one column.

    `open_ranges` are the prompts neither trained nor dropped for good; with `next_prompt_index`
    they are the position in the prompt stream, so a learner's checkpoint restores it from here.
    `learner_term` counts the learners that attached, and `revision` grows with every change: of two
    accounts of one run, the one with the larger term, then revision, is the later.
    """

    granted: int = 0
    leased: int = 0
    buffered: int = 0
    taken: int = 0
    trained: int = 0
    acknowledged: int = 0
    dropped: dict[DropReason, int] = {}
    next_prompt_index: int = 0
    revision: int = 0
    learner_term: int = 0
    open_ranges: IndexRanges = ()

    @property
    def open_prompt_indices(self) -> tuple[int, ...]:
        """All of `open_ranges`, one by one, ascending."""
        return tuple(members(self.open_ranges))

    @property
    def in_flight(self) -> int:
        """Groups that count for admission: leased, buffered or taken."""
        return self.leased + self.buffered + self.taken

    @property
    def balanced(self) -> bool:
        """Whether the books close: the columns add up to the leases granted."""
        columns = self.in_flight + self.trained + self.acknowledged
        return self.granted == columns + sum(self.dropped.values())


class GeneratorStatus(Struct, frozen=True, kw_only=True):
    """What a generator says of itself in each heartbeat. `session` is new for every process.

    `lease_ages_s` says of each of `lease_ids` how long it has been held; `held` is told to a buffer
    whose incarnation changed: it may have forgotten these leases. `is_catching_up`: it lacks the
    version it needs, and asks for no lease until it has it.
    """

    generator_id: str
    session: str
    policy_version: int
    lease_ids: tuple[str, ...] = ()
    held: tuple[Lease, ...] = ()
    lease_ages_s: tuple[float, ...] = ()
    num_active: int = 0
    num_waiting: int = 0
    num_tokens: int = 0
    tokens_per_s: float = 0.0
    pause_s: float = 0.0
    is_leaving: bool = False
    is_catching_up: bool = False


class HeartbeatReply(Struct, frozen=True, kw_only=True):
    """The buffer's answer: where the learner is, and which held leases are no longer honoured.

    `incarnation` is new for every start of the buffer; empty from one that cannot forget.
    `is_fenced`: a newer session of this generator's id has taken its place.
    """

    policy_version: int
    lost_lease_ids: tuple[str, ...] = ()
    finished: bool = False
    incarnation: str = ""
    scheduling_state: SchedulingState = SchedulingState.ACTIVE
    is_fenced: bool = False


class BufferStats(Struct, frozen=True, kw_only=True):
    """A reading of the buffer; `incarnation` is new for every start of its server.

    `heartbeat_ages_s` says of each of `generators` how long ago its status came, on the buffer's
    clock; `scheduling_states` has the ids of those that are not active, whether they report or not.
    `refusal` is why nothing is taken in at present, such as a full disk; empty if all is.
    """

    incarnation: str
    policy_version: int
    groups_per_step: int
    max_staleness: int
    books: Books
    refused: dict[RefusalReason, int] = {}
    oldest_version: int | None = None
    num_bytes: int = 0
    generators: tuple[GeneratorStatus, ...] = ()
    heartbeat_ages_s: tuple[float, ...] = ()
    refusal: str = ""
    scheduling_states: dict[str, SchedulingState] = {}
    finished: bool = False
    draining: bool = False

    @property
    def capacity(self) -> int:
        """Groups that admission lets in flight at a time."""
        return admission_capacity(self.max_staleness, self.groups_per_step)

    @property
    def in_flight(self) -> int:
        """Groups that count for admission: leased, buffered or taken."""
        return self.books.in_flight


def admission_capacity(max_staleness: int, groups_per_step: int) -> int:
    """Groups that may be in flight at a time.

    A group is trained `in_flight // groups_per_step` versions after its lease at the latest, so
    with one more than these it could be older than `max_staleness` by then.
    """
    return (max_staleness + 1) * groups_per_step


class LearnerActivity(StrEnum):
    """What a learner is at; the value is how a sentence says it."""

    ATTACHING = "attaches to the buffer"
    WAITING = "waits for groups"
    COMPUTING = "computes"
    PUBLISHING = "copies its weights"
    REPORTING = "reports to the buffer"
    SAVING = "saves a checkpoint"
    ENDED = "has ended"


class LearnerStatus(Struct, frozen=True, kw_only=True):
    """What a learner says of itself each second, in `learner.json` of the run's folder.

    `time_s` is Unix time, `activity_s` how long it has been at it. `behind` are the generators that
    did not answer the last weight update; `dropped` is the books' column at the end of the last
    step.
    """

    policy_version: int
    learner_term: int
    activity: LearnerActivity
    activity_s: float
    time_s: float
    num_stalls: int = 0
    num_receivers: int = 0
    behind: tuple[str, ...] = ()
    dropped: dict[DropReason, int] = {}
