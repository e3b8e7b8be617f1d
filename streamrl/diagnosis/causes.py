"""Every known cause of a stalled run, each a function of a reading to sentences.

Invariant: a cause is reported only if the reading shows it. The causes that a person can change
most directly come first.

Something absent (the buffer, the learner, generators that may sample, a validator) may only be
starting or restarting, or a person asked for its absence. An absence is late, and so a finding,
once it has lasted longer than a start takes (`Reading.start_s`) or the run stands still because of
it; before that it is pending, neither wrong nor healthy.

Displays show two causes before they are findings: `lasting_wait` and `failed_groups`.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from msgspec import Struct

from streamrl.diagnosis.reading import HEARTBEAT_TIMEOUT_S, Reading, lease_ages_s, reports
from streamrl.findings import Area, Finding
from streamrl.types import (
    MAX_AWAITED,
    BufferStats,
    DropReason,
    GeneratorStatus,
    LearnerActivity,
    Lease,
)

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
    """The learner is stopped, killed or frozen, or none has attached."""
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
    stats = reading.stats_if_sampling
    if stats is None or stats.generators:
        return
    absent_s = stats.last_heartbeat_age_s
    is_late = absent_s > reading.start_s or reading.stats_if_waiting is not None
    sentence = f"no generator reports to the buffer, for {_seconds(absent_s)}"
    yield _none_reports(sentence, "buffer.url", is_late)


def _silent_generator(reading: Reading) -> Iterator[Absence]:
    """A generator is silent; if it is restarted under the same id, its reports resume."""
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
    """Generators report, but none of them may ask for a lease, or none does."""
    stats = reading.stats_if_sampling
    if stats is None or not stats.generators:
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
    """No validator reports: the run goes on without one, and its versions are not validated."""
    learner = reading.working_learner
    absent_s = 0.0 if learner is None else learner.no_validator_s or 0.0
    if absent_s > HEARTBEAT_TIMEOUT_S:
        silence = f"no validator has reported for {_seconds(absent_s)}"
        sentence = f"{silence}, and no version is validated meanwhile"
        yield _none_reports(sentence, "weights.address", absent_s > reading.start_s)


def _none_reports(sentence: str, address: str, is_late: bool) -> Absence:
    """`address` is the setting with the address to which it would report."""
    remedy = f": start one, or see whether it reaches {address}"
    return Absence(sentence + (remedy if is_late else "; one may be starting"), is_late)


SHOWN_AFTER_S = 1.0


def lasting_wait(stats: BufferStats) -> str:
    """Describe the group that the next batch waits for although enough others are finished; "" if
    the wait is shorter than SHOWN_AFTER_S. With `buffer.overdue: wait` such a wait is normal, and
    no finding until `run.stall_s`."""
    return due_group(stats) if stats.awaited and stats.wait_due_s >= SHOWN_AFTER_S else ""


def due_group(stats: BufferStats) -> str:
    """Describe the first of the groups that the next batch waits for; `stats.awaited` is not
    empty."""
    first, *others = stats.awaited
    held = _holder(stats, first.lease_id)
    sentence = f"step {stats.policy_version + 1} waits for prompt {first.prompt_index}{held}"
    if count := sum(other.min_policy_version == first.min_policy_version for other in others):
        more = " or more" if count == MAX_AWAITED - 1 else ""
        groups = "group is" if count == 1 else "groups are"
        sentence += f"; {count}{more} other {groups} as due"
    return f"{sentence}; {_remedy(stats, first)}"


def _remedy(stats: BufferStats, awaited: Lease) -> str:
    """A larger bound helps a group that is being sampled, not one whose generator lacks the
    weights."""
    needed = awaited.min_policy_version
    for status in stats.generators:
        if awaited.lease_id in status.lease_ids and status.policy_version < needed:
            return (
                f"it needs version {needed}, and its generator has {status.policy_version}: "
                "weights do not arrive there in time (weights.deadline_s)"
            )
    return "raise buffer.max_staleness or set buffer.overdue: train"


def _holder(stats: BufferStats, lease_id: str) -> str:
    """The generator that samples the group of a lease, its tokens so far and its age, as far as
    reported."""
    for status, heartbeat_age_s in reports(stats):
        if lease_id in status.lease_ids:
            at = status.lease_ids.index(lease_id)
            tokens = [f"{n:,} tokens" for n in status.lease_num_tokens[at : at + 1] if n >= 0]
            ages = [_seconds(s) for s in lease_ages_s(status, heartbeat_age_s)[at : at + 1]]
            progress = ", ".join(tokens + ages)
            return f" on {status.generator_id}" + (f": {progress}" if progress else "")
    return ", which no generator reports"


_NAMED_PROMPTS = 3


def failed_groups(stats: BufferStats) -> str:
    """Describe failed and malformed groups; "" if there are none.

    The books count all failures of the run; the error and the rows come from the generators that
    report now, each since its start.
    """
    return "; ".join(_failures(stats))


def _failures(stats: BufferStats) -> Iterator[str]:
    books, generators = stats.books, stats.generators
    # It names the version, since the sentence is also shown beside counts of another moment.
    ended = f"{books.ended} groups up to version {stats.policy_version}"
    if num_malformed := books.dropped.get(DropReason.MALFORMED, 0):
        yield (
            f"{num_malformed} of {ended} were refused as malformed (see quarantine/ in the run's "
            "folder, and streamrl check)"
        )
    if not (num_failed := books.dropped.get(DropReason.FAILED, 0)):
        return
    yield f"{num_failed} of {ended} failed"
    if failures := [g.last_failure for g in generators if g.last_failure is not None]:
        last = max(failures, key=lambda failure: failure.prompt_index)
        yield f"the last one, prompt {last.prompt_index}: {last.sentence}"
    yield from _repeated(stats)
    is_alone = num_failed == books.ended and not (books.buffered or books.taken)
    if is_alone and any(generator.failed_rewards for generator in generators):
        yield NOTHING_SCORED


NOTHING_SCORED = (
    "no group has been scored yet: mend the reward and launch again; `streamrl check CONFIG "
    "--deep` samples one group and scores it"
)


def _repeated(stats: BufferStats) -> Iterator[str]:
    """The rewards that failed, if there are several, and the rows that failed more than once, over
    all generators."""
    rewards: Counter[str] = Counter()
    rows: Counter[str] = Counter()
    for generator in stats.generators:
        rewards.update({failed.reward: failed.num_failures for failed in generator.failed_rewards})
        rows.update({failed.row: failed.num_failures for failed in generator.failed_rows})
    for reward, n in rewards.most_common(_NAMED_PROMPTS if len(rewards) > 1 else 0):
        yield f"reward {reward} failed {n} times"
    yield from (f"{row} failed {n} times" for row, n in rows.most_common(_NAMED_PROMPTS) if n > 1)


# A smaller share may be a few bad rows of the data; displays show those anyway.
_MIN_FAILED_FRAC = 0.05


def _buffer_refuses(reading: Reading) -> Iterator[str]:
    if reading.stats is not None and reading.stats.refusal:
        yield f"the buffer accepts no groups: {reading.stats.refusal}"


def _groups_failed(reading: Reading) -> Iterator[str]:
    """Groups failed or were malformed. A run may go on, but learns only from the remaining
    groups."""
    stats = reading.stats
    if stats is None or reading.is_over:
        return
    reasons = (DropReason.FAILED, DropReason.MALFORMED)
    num_failed = sum(stats.books.dropped.get(reason, 0) for reason in reasons)
    if num_failed and num_failed >= _MIN_FAILED_FRAC * stats.books.ended:
        yield failed_groups(stats)


def _learner_busy(reading: Reading) -> Iterator[str]:
    learner = reading.working_learner
    if learner is None or not reading.is_stalled:
        return
    lasted, version = _seconds(reading.waited_s), learner.policy_version
    match learner.activity:
        case LearnerActivity.WAITING:
            return
        case LearnerActivity.COMPUTING:
            yield f"step {version + 1} has computed for {lasted}"
        case activity:
            yield f"the learner, at version {version}, {activity}, for {lasted} so far"


def _checkpoint_unsaved(reading: Reading) -> Iterator[str]:
    learner = reading.learner
    if learner is not None and learner.unsaved and not reading.is_over:
        yield learner.unsaved


def _learner_fenced(reading: Reading) -> Iterator[str]:
    stats, learner = reading.stats, reading.working_learner
    if stats and learner and stats.books.learner_term > learner.learner_term > 0:
        yield (
            f"another learner attached to the buffer (number {stats.books.learner_term}, this one "
            f"was number {learner.learner_term}); this one ends at its next call"
        )


def _due_group(reading: Reading) -> Iterator[str]:
    """Enough groups are finished, but not a due one, which `buffer.overdue: wait` does not
    overtake."""
    stats = reading.stats_if_waiting
    if stats is not None and stats.awaited:
        yield due_group(stats)


def _too_few_groups(reading: Reading) -> Iterator[str]:
    stats = reading.stats_if_waiting
    if stats is None or stats.awaited:
        return
    enough, version = stats.groups_per_step, stats.policy_version
    ready = f"{min(stats.books.buffered, enough)} of {enough} groups at version {version}"
    yield "; ".join([ready, *_holders(stats)])


def _old_weights(reading: Reading) -> Iterator[str]:
    """A lease is sampled only by its `min_policy_version` or a newer one."""
    stats, learner = reading.stats_if_waiting, reading.learner
    if stats is None:
        return
    # Generators that catch up ask for no lease before they have newer weights.
    behind = (s for s in stats.generators if s.is_catching_up and not s.lease_ids)
    for status in (*_idle_holders(stats), *behind):
        if status.policy_version < stats.policy_version:
            sentence = (
                f"{status.generator_id} holds {_leases(status)} and samples nothing: "
                f"it has version {status.policy_version}, the learner {stats.policy_version}"
            )
            if learner is not None and status.generator_id in learner.behind:
                sentence += "; it has not answered the last weight update"
            elif learner is not None and learner.stored:
                sentence += f"; there is {learner.stored}"
            elif learner is not None and not learner.num_receivers:
                sentence += "; no generator is on the weight channel (weights.address)"
            yield sentence


def _left_out(reading: Reading) -> Iterator[str]:
    if (learner := reading.working_learner) is not None:
        yield from learner.left_out


def _outside_the_engine(reading: Reading) -> Iterator[str]:
    stats = reading.stats_if_waiting
    if stats is None:
        return
    for status in _idle_holders(stats):
        if status.policy_version >= stats.policy_version:
            yield (
                f"{status.generator_id} holds {_leases(status)} and its engine is "
                "idle: they wait for its environment, its reward, or to be put"
            )


def _prompt_retried(reading: Reading) -> Iterator[str]:
    """Each generator that samples it may end, though the run as a whole goes on."""
    if reading.stats is None or reading.is_over:
        return
    for prompt in reading.stats.retried:
        yield (
            f"prompt {prompt.prompt_index} has been leased {prompt.num_leases} times without a "
            "result: its generator died or gave it back each time; see the generators' logs"
        )


def _groups_dropped(reading: Reading) -> Iterator[str]:
    stats, learner = reading.stats_if_waiting, reading.learner
    if stats is None or learner is None:
        return
    new = {r: count - learner.dropped.get(r, 0) for r, count in stats.books.dropped.items()}
    if dropped := ", ".join(f"{reason} {count}" for reason, count in new.items() if count > 0):
        yield f"groups dropped since the last step: {dropped}"


def _launch_failed(reading: Reading) -> Iterator[str]:
    """The launch failed; it may have failed after all steps were made, because of its validator."""
    if reading.failure:
        yield f"failed: {reading.failure}"


CAUSES: Mapping[str, Callable[[Reading], Iterator[str] | Iterator[Absence]]] = {
    "launch_failed": _launch_failed,
    "buffer_unreachable": _no_buffer,
    "buffer_refuses": _buffer_refuses,
    "groups_failed": _groups_failed,
    "checkpoint_unsaved": _checkpoint_unsaved,
    "learner_busy": _learner_busy,
    "learner_silent": _no_learner,
    "learner_fenced": _learner_fenced,
    "left_out": _left_out,
    "due_group": _due_group,
    "too_few_groups": _too_few_groups,
    "no_generator": _no_generator,
    "generator_silent": _silent_generator,
    "old_weights": _old_weights,
    "outside_the_engine": _outside_the_engine,
    "nothing_leased": _nothing_leased,
    "no_validator": _no_validator,
    "prompt_retried": _prompt_retried,
    "groups_dropped": _groups_dropped,
}


def found_in(reading: Reading) -> Iterator[Finding]:
    """Yield problems, and warnings of what is pending. For a cause with many sentences (one per
    generator, say), only the first ones and the number of the others."""
    for cause, find in CAUSES.items():
        found = [one if isinstance(one, Absence) else Absence(one) for one in find(reading)]
        for is_late, make in ((True, Area.RUN.problem), (False, Area.RUN.warning)):
            sentences = [one.sentence for one in found if one.is_late is is_late]
            if more := sentences[_NAMED:]:
                sentences[_NAMED:] = [f"{len(more)} more like these"]
            yield from (make(sentence, cause=cause) for sentence in sentences)


def may_move(reading: Reading) -> bool:
    """Whether everything that a step needs is there; a validator is not needed."""
    needed = (find for cause, find in CAUSES.items() if cause != "no_validator")
    return not any(isinstance(found, Absence) for find in needed for found in find(reading))


def _holders(stats: BufferStats) -> Iterator[str]:
    """Which generators hold the missing groups; the longest held first."""
    holders = [report for report in reports(stats) if report[0].lease_ids]
    oldest_first = sorted(holders, key=lambda report: -max(lease_ages_s(*report), default=0.0))
    for status, age_s in oldest_first[:_NAMED]:
        silent = f", silent for {_seconds(age_s)}" if age_s > HEARTBEAT_TIMEOUT_S else ""
        held = f"{len(status.lease_ids)} held by {status.generator_id}"
        known = f"{held} (version {status.policy_version}{silent})"
        oldest = max(lease_ages_s(status, age_s), default=None)
        yield known if oldest is None else f"{known}, oldest {_seconds(oldest)}"
    if rest := oldest_first[_NAMED:]:
        num_held = sum(len(status.lease_ids) for status, _ in rest)
        yield f"{num_held} held by {len(rest)} other generators"
    unknown = stats.books.leased - sum(len(status.lease_ids) for status, _ in holders)
    if unknown > 0:
        yield f"{unknown} leased and not reported yet"


def _idle_holders(stats: BufferStats) -> Iterator[GeneratorStatus]:
    """Generators that report and hold leases while their engine has nothing to do."""
    for status, age_s in reports(stats):
        is_idle = not (status.num_active or status.num_waiting)
        if status.lease_ids and is_idle and age_s <= HEARTBEAT_TIMEOUT_S:
            yield status


def _leases(status: GeneratorStatus) -> str:
    count = len(status.lease_ids)
    return "1 lease" if count == 1 else f"{count} leases"


def _seconds(value: float) -> str:
    return f"{value:.0f} s"
