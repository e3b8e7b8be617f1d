"""What is known of a run at one moment: the buffer's stats, the learner's status, their ages.

Pure: ages are in seconds, and the caller reads the clock.
"""

from msgspec import Struct

from streamrl.types import BufferStats, GeneratorStatus, LearnerActivity, LearnerStatus

HEARTBEAT_TIMEOUT_S = 10.0
"""A generator or learner whose last report is older counts as gone.

Generators and learner report every second; on a busy machine some reports are late.
"""


class Reading(Struct, frozen=True, kw_only=True):
    """What is known of a run at one moment.

    `stats` is None if the buffer did not answer, with the reason in `unreachable`; `learner` is
    None if nothing is known of it, else `learner_age_s` old. `is_relaunched`: a launch has begun
    since that report. `idle_s` is the time since the last step ended, and `max_steps` the run's, if
    they are known.
    """

    stall_s: float
    stats: BufferStats | None
    unreachable: str = ""
    learner: LearnerStatus | None = None
    learner_age_s: float = 0.0
    is_relaunched: bool = False
    idle_s: float | None = None
    max_steps: int | None = None

    @property
    def is_learner_reporting(self) -> bool:
        return self.learner is not None and self.learner_age_s <= HEARTBEAT_TIMEOUT_S

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
        return has_ended or (self.stats is not None and self.stats.finished)

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


def reports(stats: BufferStats | None) -> list[tuple[GeneratorStatus, float]]:
    """Each generator's last heartbeat, and its age in seconds."""
    return [] if stats is None else list(zip(stats.generators, stats.heartbeat_ages_s, strict=True))


def lease_ages_s(status: GeneratorStatus, heartbeat_age_s: float) -> list[float]:
    """How long each lease has been held by now."""
    return [age_s + heartbeat_age_s for age_s in status.lease_ages_s]
