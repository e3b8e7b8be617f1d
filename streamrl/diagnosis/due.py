"""The group that the learner waits for although enough others are finished, as a sentence.

Under `buffer.overdue: wait` such a wait belongs to the work, so it is no finding before
`run.stall_s`; displays show it once it has lasted SHOWN_AFTER_S.
"""

from streamrl.diagnosis.reading import lease_ages_s, reports
from streamrl.types import MAX_AWAITED, BufferStats, Lease

SHOWN_AFTER_S = 1.0


def lasting_wait(stats: BufferStats) -> str:
    """The group that the next batch waits for, "" if it has not waited for SHOWN_AFTER_S."""
    return due_group(stats) if stats.awaited and stats.wait_due_s >= SHOWN_AFTER_S else ""


def due_group(stats: BufferStats) -> str:
    """The first of the groups that the next batch waits for; there is one."""
    first, *others = stats.awaited
    held = _holder(stats, first.lease_id)
    sentence = f"step {stats.policy_version + 1} waits for prompt {first.prompt_index}{held}"
    num_as_due = sum(other.min_policy_version == first.min_policy_version for other in others)
    return "; ".join([sentence, *_as_due(num_as_due), _remedy(stats, first)])


def _remedy(stats: BufferStats, awaited: Lease) -> str:
    """Another bound helps a group that is sampled, not one whose generator lacks the weights."""
    needed = awaited.min_policy_version
    for status in stats.generators:
        if awaited.lease_id in status.lease_ids and status.policy_version < needed:
            return (
                f"it needs version {needed}, and its generator has {status.policy_version}: "
                "weights do not arrive there in time (weights.deadline_s)"
            )
    return "raise buffer.max_staleness or set buffer.overdue: train"


def _as_due(count: int) -> tuple[str, ...]:
    if not count:
        return ()
    more = " or more" if count == MAX_AWAITED - 1 else ""
    groups = "group is" if count == 1 else "groups are"
    return (f"{count}{more} other {groups} as due",)


def _holder(stats: BufferStats, lease_id: str) -> str:
    """Who samples the group of a lease, its tokens so far and its age, as far as is reported."""
    for status, heartbeat_age_s in reports(stats):
        if lease_id not in status.lease_ids:
            continue
        place = slice(status.lease_ids.index(lease_id), status.lease_ids.index(lease_id) + 1)
        tokens = (f"{n:,} tokens" for n in status.lease_num_tokens[place] if n >= 0)
        ages = (f"{age_s:.0f} s" for age_s in lease_ages_s(status, heartbeat_age_s)[place])
        progress = ", ".join([*tokens, *ages])
        return f" on {status.generator_id}" + (f": {progress}" if progress else "")
    return ", which no generator reports"
