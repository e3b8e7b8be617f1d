"""How far a run is: whether its processes work, and if they do not, how and where it ended.

Read from the learner's last report and from how the launch ended, which stay in the run's folder.
"""

from enum import StrEnum

from streamrl.diagnosis.reading import Reading
from streamrl.types import LearnerActivity


class RunState(StrEnum):
    """`STARTING`: no learner of this launch has reported yet. `RUNNING`: one does, or the buffer
    answers. `FINISHED`: all steps are made. `STOPPED`: the run was asked to end before. `FAILED`:
    its launch ended with an error before. `DEAD`: neither learner nor buffer answers, and neither
    the learner nor the launch has ended."""

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
    """By the learner's report, by how the launch ended, and by whether the buffer answers where the
    learner does not."""
    learner, stats = reading.learner, reading.stats
    if _is_finished(reading):
        return RunState.FINISHED
    if reading.is_launch_over:
        return RunState.FAILED if reading.failure else RunState.STOPPED
    if learner is None:
        answers = stats is not None and stats.books.learner_term > 0
        return RunState.RUNNING if answers else RunState.STARTING
    if learner.activity is LearnerActivity.ENDED:
        is_starting = reading.is_relaunched and stats is not None
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
    """How the run ended and at which step, as a sentence; "" while it goes on."""
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
    """In a unit of which there are two or more.

    >>> age(95), age(7300)
    ('95 s', '2 h')
    """
    for length_s, unit in ((86_400, "days"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:.0f} {unit}"
    return f"{seconds:.0f} s"
