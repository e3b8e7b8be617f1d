"""Whether what a run needs is there: buffer, learner, generators that may sample, a validator.

What is absent comes by itself while a process starts, is restarted, or a person has said so. So an
absence is late, and a finding, once it has lasted longer than a start takes (`Reading.start_s`), or
the run stands still for it; before that it is pending, and neither wrong nor healthy.

Invariant: a run of which nothing is absent and nothing is wrong is healthy; of any other a sentence
says what is absent. A new absence is a function of a reading and a line in `ABSENCES`.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import wraps

from msgspec import Struct

from streamrl.diagnosis.reading import HEARTBEAT_TIMEOUT_S, Reading, reports

_NAMED = 4


class Absence(Struct, frozen=True):
    """A sentence, and whether the absence is a finding."""

    sentence: str
    is_late: bool = True


def _no_buffer(reading: Reading) -> Iterator[Absence]:
    if reading.stats is not None or reading.is_over:
        return
    sentence = reading.unreachable or "the buffer does not answer"
    yield Absence(sentence, not reading.is_starting)


def _no_learner(reading: Reading) -> Iterator[Absence]:
    """It is stopped, killed or frozen, or none has attached."""
    stats, learner = reading.stats, reading.learner
    if reading.is_over or reading.is_learner_reporting:
        return
    is_late = not reading.is_starting
    if learner is not None:
        age = _seconds(reading.learner_age_s)
        sentence = f"the learner has not reported for {age}; its last report: {learner.activity}"
        yield Absence(sentence, is_late)
    elif stats is not None and not stats.books.learner_term:
        yield Absence("no learner has attached to the buffer", is_late)
    if stats is None or stats.books.taken or not (learner or reading.is_stalled):
        return
    is_enough = stats.books.buffered >= stats.groups_per_step and not stats.awaited
    if stats.books.learner_term and is_enough:
        yield Absence(
            f"{stats.books.buffered} groups are buffered and no learner takes them: the learner "
            f"that attached last, at version {stats.policy_version}, is gone",
            is_late,
        )


def _no_generator(reading: Reading) -> Iterator[Absence]:
    stats = reading.stats
    if not reading.needs_generators or stats is None or stats.generators:
        return
    absent_s = stats.last_heartbeat_age_s
    is_late = absent_s > reading.start_s or reading.stats_if_waiting is not None
    sentence = f"no generator reports to the buffer, for {_seconds(absent_s)}"
    yield _none_reports(sentence, "buffer.url", is_late)


def _silent_generator(reading: Reading) -> Iterator[Absence]:
    """One that is started again under its id reports again."""
    if reading.is_over:
        return
    for status, age_s in reports(reading.stats):
        if age_s > HEARTBEAT_TIMEOUT_S:
            yield Absence(
                f"{status.generator_id} has not reported for {_seconds(age_s)}; its leases "
                f"({len(status.lease_ids)} then) go to others after buffer.lease_ttl_s",
                age_s > reading.start_s or reading.is_stalled,
            )


def _nothing_leased(reading: Reading) -> Iterator[Absence]:
    """Generators report, and none of them may ask for a lease, or none does."""
    stats = reading.stats
    if not reading.needs_generators or stats is None or not stats.generators:
        return
    if stats.books.leased + stats.books.buffered >= stats.groups_per_step:
        return
    is_late = reading.stats_if_waiting is not None
    states = {
        status.generator_id: stats.scheduling_states[status.generator_id]
        for status in stats.generators
        if status.generator_id in stats.scheduling_states
    }
    if stats.draining:
        yield Absence("the buffer drains (streamrl buffer drain), so it grants no lease", is_late)
    elif not stats.books.leased and (is_late or len(states) == len(stats.generators)):
        no_request = f"none of {len(stats.generators)} generators asks for a lease"
        named = [f"{name} is {state}" for name, state in states.items()]
        yield Absence("; ".join([no_request, *named[:_NAMED]]), is_late)


def _no_validator(reading: Reading) -> Iterator[Absence]:
    """The run goes on without it, and its versions are not validated."""
    learner = reading.learner
    if learner is None or reading.is_over or not reading.is_learner_reporting:
        return
    absent_s = learner.no_validator_s
    if absent_s is None or absent_s <= HEARTBEAT_TIMEOUT_S:
        return
    sentence = (
        f"no validator has reported for {_seconds(absent_s)}, and no version is validated meanwhile"
    )
    yield _none_reports(sentence, "weights.address", absent_s > reading.start_s)


ABSENCES: Mapping[str, Callable[[Reading], Iterator[Absence]]] = {
    "buffer_unreachable": _no_buffer,
    "learner_silent": _no_learner,
    "no_generator": _no_generator,
    "generator_silent": _silent_generator,
    "nothing_leased": _nothing_leased,
    "no_validator": _no_validator,
}


def late(cause: str) -> Callable[[Reading], Iterator[str]]:
    """The sentences of an absence that is a finding."""

    @wraps(ABSENCES[cause])
    def find(reading: Reading) -> Iterator[str]:
        return (found.sentence for found in ABSENCES[cause](reading) if found.is_late)

    return find


def pending(reading: Reading) -> Iterator[tuple[str, str]]:
    """Cause and sentence of each absence that is not late."""
    for cause, find in ABSENCES.items():
        yield from ((cause, found.sentence) for found in find(reading) if not found.is_late)


def may_move(reading: Reading) -> bool:
    """Whether all that makes steps is there; steps are made without a validator."""
    needed = (find for cause, find in ABSENCES.items() if cause != "no_validator")
    return not any(absence for find in needed for absence in find(reading))


def _none_reports(sentence: str, address: str, is_late: bool) -> Absence:
    """`address` is the setting at which one would report."""
    remedy = f": start one, or see whether it reaches {address}"
    return Absence(sentence + (remedy if is_late else "; one may be starting"), is_late)


def _seconds(value: float) -> str:
    return f"{value:.0f} s"
