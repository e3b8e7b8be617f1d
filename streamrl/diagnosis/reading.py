"""What is known of a run at one moment: the buffer's stats, the learner's status and their ages;
and the state of the run: whether its processes work, and if not, how and at which step it ended.

Pure: ages are in seconds, and the caller reads the clock.
"""

from enum import StrEnum

from msgspec import Struct

from streamrl.config import RunConfig
from streamrl.types import BufferStats, GeneratorStatus, LearnerActivity, LearnerStatus

HEARTBEAT_TIMEOUT_S = 10.0
"""A generator or learner whose last report is older counts as gone.

Generators and learner report every second; on a busy machine some reports are late.
"""
START_S = 120.0
"""How long a process may take from its command to its first report, unless the run says."""


class Reading(Struct, frozen=True, kw_only=True):
    """What is known of a run at one moment.

    `stats` is None if the buffer did not answer, with the reason in `unreachable`; `learner` is
    None if nothing is known of it, else `learner_age_s` old. `is_relaunched`: a launch has begun
    since that report, and goes on. `is_launch_over`: the newest launch has ended, and no learner
    has reported since; `failure` says why, if it failed. `idle_s` is the time since the last step
    ended, and `launched_s` the time since the newest launch began; like `max_steps` they are None
    if unknown. `startup_s` is how long the start of a generator may take.
    """

    stall_s: float
    stats: BufferStats | None
    unreachable: str = ""
    learner: LearnerStatus | None = None
    learner_age_s: float = 0.0
    is_relaunched: bool = False
    is_launch_over: bool = False
    failure: str = ""
    idle_s: float | None = None
    launched_s: float | None = None
    startup_s: float = START_S
    max_steps: int | None = None

    @property
    def start_s(self) -> float:
        """How long a process may be away before it counts as gone; a run that stands still for
        `stall_s` is reported in any case."""
        return min(self.startup_s, self.stall_s)

    @property
    def is_starting(self) -> bool:
        """Whether a launch began less than `start_s` ago, and no learner has reported since."""
        has_reported = self.learner is not None and not self.is_relaunched
        is_new = self.launched_s is not None and self.launched_s <= self.start_s
        return is_new and not has_reported

    @property
    def stats_if_sampling(self) -> BufferStats | None:
        """The buffer's stats, if the run has a learner that still takes groups."""
        stats, learner = self.stats, self.learner
        if stats is None or self.is_over or not stats.books.learner_term:
            return None
        is_validating = learner is not None and learner.activity is LearnerActivity.VALIDATING
        return None if is_validating else stats

    @property
    def is_learner_reporting(self) -> bool:
        return self.learner is not None and self.learner_age_s <= HEARTBEAT_TIMEOUT_S

    @property
    def working_learner(self) -> LearnerStatus | None:
        """The learner's status, if it reports and the run is not over."""
        return self.learner if self.is_learner_reporting and not self.is_over else None

    @property
    def waited_s(self) -> float:
        """How long nothing has changed, as far as the reading shows."""
        if self.learner is not None and self.is_learner_reporting:
            return self.learner.activity_s + self.learner_age_s
        if self.idle_s is not None:
            return self.idle_s
        leases = [lease for report in reports(self.stats) for lease in lease_ages_s(*report)]
        return max(leases, default=0.0)

    @property
    def is_over(self) -> bool:
        has_ended = self.learner is not None and self.learner.activity is LearnerActivity.ENDED
        return has_ended or self.is_launch_over or (self.stats is not None and self.stats.finished)

    @property
    def is_stalled(self) -> bool:
        return not self.is_over and self.waited_s >= self.stall_s

    @property
    def stats_if_waiting(self) -> BufferStats | None:
        """The buffer's stats, if a stalled run waits for groups."""
        stats, learner = self.stats, self.learner
        if not self.is_stalled or stats is None:
            return None
        if learner is not None and self.is_learner_reporting:
            return stats if learner.activity is LearnerActivity.WAITING else None
        is_short = not stats.books.taken and stats.books.buffered < stats.groups_per_step
        return stats if stats.books.learner_term and (is_short or stats.awaited) else None


def startup_s(config: RunConfig) -> float:
    """How long the start of a generator may take; one that starts its own server waits for it."""
    generator = config.generator
    return generator.served.start_timeout_s if generator.starts_server else START_S


def reports(stats: BufferStats | None) -> list[tuple[GeneratorStatus, float]]:
    """Each generator's last heartbeat, and its age in seconds."""
    return [] if stats is None else list(zip(stats.generators, stats.heartbeat_ages_s, strict=True))


def lease_ages_s(status: GeneratorStatus, heartbeat_age_s: float) -> list[float]:
    """How long each lease has been held by now."""
    return [age_s + heartbeat_age_s for age_s in status.lease_ages_s]


class RunState(StrEnum):
    """`STARTING`: no learner of this launch has reported yet. `RUNNING`: a learner reports, or the
    buffer answers. `FINISHED`: all steps are made. `STOPPED`: the run was asked to end earlier.
    `FAILED`: its launch ended with an error. `DEAD`: neither learner nor buffer answers, and
    neither the learner nor the launch has ended."""

    STARTING = "starting"
    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"
    DEAD = "dead"

    @property
    def has_ended(self) -> bool:
        return self not in (RunState.STARTING, RunState.RUNNING)


def state_of(reading: Reading) -> RunState:
    """Determine the state from the learner's report, from how the launch ended, and, if the learner
    is silent, from whether the buffer answers."""
    learner, stats = reading.learner, reading.stats
    if _is_finished(reading):
        return RunState.FINISHED
    if reading.is_launch_over:
        return RunState.FAILED if reading.failure else RunState.STOPPED
    if learner is None:
        answers = stats is not None and stats.books.learner_term > 0
        return RunState.RUNNING if answers else RunState.STARTING
    if learner.activity is LearnerActivity.ENDED:
        is_starting = reading.is_starting or (reading.is_relaunched and stats is not None)
        return RunState.STARTING if is_starting else RunState.STOPPED
    if reading.is_learner_reporting or stats is not None:
        return RunState.RUNNING
    return RunState.STARTING if reading.is_starting else RunState.DEAD


def _is_finished(reading: Reading) -> bool:
    learner, stats = reading.learner, reading.stats
    if learner is None:
        return stats is not None and stats.finished
    is_complete = learner.policy_version >= (reading.max_steps or 0) or bool(learner.ended_early)
    return learner.activity is LearnerActivity.ENDED and is_complete


def outcome(reading: Reading) -> str:
    """Say how the run ended and at which step; "" while it goes on."""
    learner, state = reading.learner, state_of(reading)
    if state is RunState.FAILED:
        return f"failed: {reading.failure}"
    if state is RunState.STOPPED and (learner is None or not learner.policy_version):
        return "stopped before the first step"
    if learner is None:
        return ""
    step = f"step {learner.policy_version}"
    if reading.max_steps is not None:
        step += f" of {reading.max_steps}"
    ago = f"{age(reading.learner_age_s)} ago"
    match state:
        case RunState.FINISHED if learner.ended_early:
            return f"{learner.ended_early}, {ago}"
        case RunState.FINISHED:
            return f"finished with {step}, {ago}"
        case RunState.STOPPED:
            return f"stopped at {step}, {ago}"
        case RunState.DEAD:
            return (
                f"dead at {step}: its learner reported last {ago} ({learner.activity}) and its "
                "buffer does not answer"
            )
        case _:
            return ""


def age(seconds: float) -> str:
    """Show a duration in the largest unit that it is at least two of.

    >>> age(95), age(7300)
    ('95 s', '2 h')
    """
    for length_s, unit in ((86_400, "days"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:.0f} {unit}"
    return f"{seconds:.0f} s"
