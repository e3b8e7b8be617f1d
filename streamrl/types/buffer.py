"""Records of the buffer's interface: leases, taken batches, books, statuses and stats."""

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

from streamrl.types.index_ranges import IndexRanges, members
from streamrl.types.lengths import ResponseLengths
from streamrl.types.ranges import (
    MAX_NAMES,
    Count,
    CountOrNone,
    Finite,
    Name,
    NotNegative,
    PolicyVersion,
    PromptIndex,
    SiblingNumber,
)
from streamrl.types.reasons import DropReason, FailedReward, FailedRow, GroupFailure, RefusalReason
from streamrl.types.rollouts import GroupHeader, TrajectoryGroup


class OverduePolicy(StrEnum):
    """What happens to a group that others overtake until it is nearly too old: the learner waits
    for it, trains it at any age (the bound then only limits admission), or drops it, so that fewer
    long groups are trained than sampled."""

    WAIT = "wait"
    TRAIN = "train"
    DROP = "drop"


class SchedulingState(StrEnum):
    """How a person has set a generator id to be scheduled: a `CORDONED` generator gets no lease and
    finishes its groups; a `DRAINING` one leaves after that."""

    ACTIVE = "active"
    CORDONED = "cordoned"
    DRAINING = "draining"


class Lease(Struct, frozen=True, kw_only=True):
    """The right to generate one group.

    `prompt_index` is its position in the seeded prompt stream. `min_policy_version` is the oldest
    version that may sample the group; with an older one it would be too stale when trained.
    `kept_siblings` are the numbers of siblings that an earlier lease left, finished or not;
    `fetch_siblings` returns them.
    """

    lease_id: Name
    prompt_index: PromptIndex
    min_policy_version: PolicyVersion
    kept_siblings: Annotated[tuple[SiblingNumber, ...], Meta(max_length=MAX_NAMES)] = ()


class TakenBatch(Struct, frozen=True, kw_only=True):
    """Groups lent to the learner for one version, in the order of lending; falsy if there are none.

    If the call was `with_payloads`, `groups` are the payloads of those `headers` that the caller
    does not hold yet, which come last. `wait_due_s` is how long enough groups were finished, but
    not those that were due.
    """

    headers: tuple[GroupHeader, ...] = ()
    groups: tuple[TrajectoryGroup, ...] = ()
    wait_due_s: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.headers)


class Books(Struct, frozen=True, kw_only=True):
    """The ledger's columns: every lease ever granted is in exactly one of them.

    `open_ranges` are the prompts neither trained nor permanently dropped; with `next_prompt_index`
    they are the position in the prompt stream, which a learner's checkpoint restores.
    `learner_term` counts the learners that attached, and `revision` grows with every change: of two
    books of one run, the later ones have the larger term, or with equal terms the larger revision.
    `steered_bound` is the bound on staleness last set by the learner, 0 if it does not steer.
    """

    granted: Count = 0
    leased: Count = 0
    buffered: Count = 0
    taken: Count = 0
    trained: Count = 0
    acknowledged: Count = 0
    dropped: dict[DropReason, Count] = {}
    next_prompt_index: PromptIndex = 0
    revision: Count = 0
    learner_term: Count = 0
    open_ranges: IndexRanges = ()
    steered_bound: Count = 0

    @property
    def open_prompt_indices(self) -> tuple[int, ...]:
        """The prompt indices in `open_ranges`, ascending."""
        return tuple(members(self.open_ranges))

    @property
    def in_flight(self) -> int:
        """Groups that count for admission: leased, buffered or taken."""
        return self.leased + self.buffered + self.taken

    @property
    def ended(self) -> int:
        """Groups whose prompt is not granted again: trained or permanently dropped."""
        dropped = (count for reason, count in self.dropped.items() if not reason.returns_prompt)
        return self.trained + self.acknowledged + sum(dropped)

    @property
    def balanced(self) -> bool:
        """Whether the books close: the columns add up to the leases granted."""
        columns = self.in_flight + self.trained + self.acknowledged
        return self.granted == columns + sum(self.dropped.values())


class GeneratorStatus(Struct, frozen=True, kw_only=True):
    """A generator's heartbeat. `session` is new for every process.

    `lease_ages_s` are the seconds since each of `lease_ids` was granted; `lease_num_tokens` are the
    tokens sampled so far by the longest sibling of each, -1 if its engine has reported none. `held`
    is sent to a buffer whose incarnation has changed, which may have forgotten these leases.
    `is_catching_up`: the generator requests no lease until it has loaded the version it needs.
    `max_num_groups` is how many groups it has room for, 0 if it does not say; of the `uptime_s`
    since its start all of that room was in use for `busy_s`, half of it counting half. `kv_usage`
    is the share of the engine's KV cache in use, None for an engine that does not say; `pause_s` is
    all the time that the engine has stood still for weights.
    `last_failure`, `failed_rows` and `failed_rewards` are of the groups that failed in this
    process, the rows with most failures first, at most MAX_FAILED_ROWS; `num_lost_agents` are those
    of them whose agent disappeared.
    """

    generator_id: Name
    session: Name
    policy_version: PolicyVersion
    lease_ids: Annotated[tuple[Name, ...], Meta(max_length=MAX_NAMES)] = ()
    held: Annotated[tuple[Lease, ...], Meta(max_length=MAX_NAMES)] = ()
    lease_ages_s: Annotated[tuple[Finite, ...], Meta(max_length=MAX_NAMES)] = ()
    lease_num_tokens: Annotated[tuple[CountOrNone, ...], Meta(max_length=MAX_NAMES)] = ()
    num_active: Count = 0
    num_waiting: Count = 0
    num_tokens: Count = 0
    tokens_per_s: Finite = 0.0
    pause_s: NotNegative = 0.0
    kv_usage: NotNegative | None = None
    max_num_groups: Count = 0
    busy_s: NotNegative = 0.0
    uptime_s: NotNegative = 0.0
    is_leaving: bool = False
    is_catching_up: bool = False
    last_failure: GroupFailure | None = None
    failed_rows: Annotated[tuple[FailedRow, ...], Meta(max_length=MAX_NAMES)] = ()
    failed_rewards: Annotated[tuple[FailedReward, ...], Meta(max_length=MAX_NAMES)] = ()
    num_lost_agents: Count = 0


class HeartbeatReply(Struct, frozen=True, kw_only=True):
    """The reply to a heartbeat: the learner's version, and which leases are no longer valid.

    Versions of a learner that went back, and those it abandoned, may have the same number:
    `learner_id` says whose this one is, "" if unknown. `incarnation` is new for every start of the
    buffer; empty if it cannot lose state.
    `is_fenced`: a newer session of this generator's id has replaced this one.
    """

    policy_version: int
    learner_id: str = ""
    lost_lease_ids: tuple[str, ...] = ()
    finished: bool = False
    incarnation: str = ""
    scheduling_state: SchedulingState = SchedulingState.ACTIVE
    is_fenced: bool = False


MAX_AWAITED = 8
MAX_RETRIED = 4
MIN_RETRIED_LEASES = 3


class RetriedPrompt(Struct, frozen=True, kw_only=True):
    """An open prompt without a group after `num_leases` leases, which expired or were released."""

    prompt_index: int
    num_leases: int


class BufferStats(Struct, frozen=True, kw_only=True):
    """The state of the buffer; `incarnation` is new for every start of its server.

    `awaited` are the leases of the groups that are due, first due first, at most MAX_AWAITED, if
    enough others are finished for the next batch; `wait_due_s` is how long that has been so.
    `retried` are the prompts that have no group after MIN_RETRIED_LEASES or more, most leases
    first, at most MAX_RETRIED; a restarted buffer counts them anew.

    `heartbeat_ages_s` are the seconds since the status of each of `generators`, on the buffer's
    clock, and `last_heartbeat_age_s` those since any generator reported, whether it is still
    listed or not, or since a learner attached if that is later; `scheduling_states` has the ids
    that are not active, whether they report or not.
    `refusal` is why the buffer accepts no group at present, such as a full disk; "" if it does.
    No group is trained that is older than `max_staleness`; leases are granted under
    `staleness_bound`, which is the same unless the learner steers it.
    `lengths` are those since the buffer's first start, rounded. `is_over` is false of a `finished`
    run that a learner may still go on with, as after a restart of the buffer.
    """

    incarnation: str
    policy_version: int
    groups_per_step: int
    max_staleness: int
    staleness_bound: int
    overdue: OverduePolicy
    books: Books
    refused: dict[RefusalReason, int] = {}
    lengths: ResponseLengths = ResponseLengths()
    oldest_version: int | None = None
    num_bytes: int = 0
    generators: tuple[GeneratorStatus, ...] = ()
    heartbeat_ages_s: tuple[float, ...] = ()
    last_heartbeat_age_s: float = 0.0
    refusal: str = ""
    scheduling_states: dict[str, SchedulingState] = {}
    finished: bool = False
    is_over: bool = False
    draining: bool = False
    awaited: tuple[Lease, ...] = ()
    wait_due_s: float = 0.0
    retried: tuple[RetriedPrompt, ...] = ()

    @property
    def capacity(self) -> int:
        """Groups that admission lets in flight at a time."""
        return admission_capacity(self.staleness_bound, self.groups_per_step)


def admission_capacity(max_staleness: int, groups_per_step: int) -> int:
    """Groups that may be in flight at a time.

    A group is trained at most `in_flight // groups_per_step` versions after its lease, so with one
    more it could be older than `max_staleness` by then.
    """
    return (max_staleness + 1) * groups_per_step


class LearnerActivity(StrEnum):
    """What a learner is doing; the value is the predicate of a sentence."""

    ATTACHING = "attaches to the buffer"
    WAITING = "waits for groups"
    COMPUTING = "computes"
    PUBLISHING = "copies its weights"
    REPORTING = "reports to the buffer"
    SAVING = "saves a checkpoint"
    VALIDATING = "waits for the validation of the last version"
    ENDED = "has ended"


class LearnerStatus(Struct, frozen=True, kw_only=True):
    """A learner's status, written each second to `learner.json` in the run's folder.

    `time_s` is Unix time, `activity_s` how long the activity lasts. `behind` are generators that
    did not answer the last weight update; `dropped` is the books' column at the end of the last
    step; `waits_for` is a sentence about what the learner waits for, if it is not sampled;
    `failures` is one about the groups that failed, "" if none did; `unsaved` is one about the
    checkpoint that cannot be written, "" if the last one was; `validating` is one about what
    validators do; `ended_early` is why the run ended before its last step. `no_validator_s` is how
    long no validator has reported, None in a run without validations; `left_out` has a sentence for
    each receiver that weights do not reach, or not in time; `stored` is one about what
    `weights.store` has, "" without a store; `signs` has one for each sign that the
    run does not learn.
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
    waits_for: str = ""
    failures: str = ""
    unsaved: str = ""
    validating: str = ""
    ended_early: str = ""
    no_validator_s: float | None = None
    left_out: tuple[str, ...] = ()
    stored: str = ""
    signs: tuple[str, ...] = ()
