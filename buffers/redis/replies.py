"""The answers of the scripts in `buffers/redis/lua` as records."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from streamrl import wire
from streamrl.types import (
    Books,
    BufferStats,
    DropReason,
    GeneratorStatus,
    GroupHeader,
    HeartbeatReply,
    Lease,
    LengthHistogram,
    OverduePolicy,
    PackedGroup,
    RefusalReason,
    ResponseLengths,
    RetriedPrompt,
    SchedulingState,
    TakenBatch,
    TrajectoryGroup,
    ranges_of,
)

_COLUMNS = (
    "granted",
    "leased",
    "buffered",
    "taken",
    "trained",
    "acknowledged",
    "next_prompt_index",
    "revision",
    "learner_term",
)


def leases(reply: Sequence[Any]) -> tuple[Lease, ...]:
    return tuple(
        Lease(
            lease_id=lease_id.decode(),
            prompt_index=prompt_index,
            min_policy_version=min_policy_version,
            expires_at_s=float(expires_at_s),
        )
        for lease_id, prompt_index, min_policy_version, expires_at_s in reply
    )


def group(payload: bytes) -> TrajectoryGroup:
    """Of any size that was accepted."""
    return wire.decode(payload, PackedGroup, max_bytes=len(payload)).group()


def heartbeat_reply(reply: Sequence[Any]) -> tuple[HeartbeatReply, int]:
    """And the present learner's term."""
    version, finished, lost, incarnation, scheduling_state, is_fenced, *learner = reply
    learner_term, learner_id = learner
    answer = HeartbeatReply(
        policy_version=version,
        learner_id=learner_id.decode(),
        lost_lease_ids=tuple(lease_id.decode() for lease_id in lost),
        finished=bool(finished),
        incarnation=incarnation.decode(),
        scheduling_state=SchedulingState(scheduling_state.decode()),
        is_fenced=bool(is_fenced),
    )
    return answer, learner_term


def taken(reply: Sequence[Any]) -> TakenBatch:
    """Without payloads."""
    blobs, wait_due_s = reply
    headers = tuple(wire.decode(blob, GroupHeader) for blob in blobs)
    return TakenBatch(headers=headers, wait_due_s=float(wait_due_s))


def next_expiry_s(reply: bytes, at_most: float) -> float:
    """Seconds until a lease that was not granted is attempted again."""
    return min(max(float(reply), 0.01), at_most) if reply else at_most


def books(reply: Sequence[Any]) -> Books:
    numbers, dropped, in_flight, free, *_ = reply
    values = _numbers(numbers)
    counts = {DropReason(reason): count for reason, count in _pairs(dropped) if count}
    return Books(
        **{column: values[column] for column in _COLUMNS},
        dropped=counts,
        open_ranges=ranges_of(int(prompt_index) for prompt_index in chain(in_flight, free)),
    )


def stats(reply: Sequence[Any]) -> BufferStats:
    numbers, _, _, _, refused, oldest, incarnation, registry, ages, *more = reply
    scheduling_states, sums, awaited, wait_due_s, retried, last_age_s = more
    values = _numbers(numbers)
    statuses = (wire.decode(status, GeneratorStatus) for status in registry)
    reports = sorted(
        zip(statuses, map(float, ages), strict=True), key=lambda report: report[0].generator_id
    )
    names = (name.decode() for name in scheduling_states)
    return BufferStats(
        incarnation=incarnation.decode(),
        policy_version=values["version"],
        groups_per_step=values["groups_per_step"],
        max_staleness=values["max_staleness"],
        overdue=tuple(OverduePolicy)[values["overdue"]],
        books=books(reply),
        refused={RefusalReason(reason): count for reason, count in _pairs(refused)},
        lengths=lengths(_pairs(sums)),
        oldest_version=oldest if isinstance(oldest, int) else None,
        num_bytes=values["num_bytes"],
        generators=tuple(status for status, _ in reports),
        heartbeat_ages_s=tuple(age_s for _, age_s in reports),
        last_heartbeat_age_s=float(last_age_s),
        scheduling_states={
            name: SchedulingState(scheduling_state)
            for name, scheduling_state in zip(names, names, strict=True)
        },
        finished=bool(values["finished"]),
        draining=bool(values["draining"]),
        awaited=leases(awaited),
        wait_due_s=float(wait_due_s),
        retried=tuple(
            RetriedPrompt(prompt_index=int(prompt_index), num_leases=num_leases)
            for prompt_index, num_leases in _pairs(retried)
        ),
    )


def lengths(pairs: Iterable[tuple[str, int]]) -> ResponseLengths:
    """From the fields of the hash `lengths`, see `lua/entries.lua`, and their values."""
    counts: defaultdict[str, dict[int, int]] = defaultdict(dict)
    num_tokens: dict[str, int] = {}
    for name, number in pairs:
        outcome, _, length = name.partition(":")
        if length == "tokens":
            num_tokens[outcome] = number
        elif number:
            counts[outcome][int(length)] = number
    known = {name: LengthHistogram(counts[name], total) for name, total in num_tokens.items()}
    blank = LengthHistogram()
    return ResponseLengths(
        sampled=known.pop("sampled", blank),
        trained=known.pop("trained", blank),
        dropped={DropReason(reason): histogram for reason, histogram in known.items()},
    )


def _numbers(reply: Iterable[Sequence[bytes]]) -> dict[str, int]:
    return {name.decode(): int(value) for name, value in reply}


def _pairs(reply: Sequence[bytes]) -> Iterable[tuple[str, int]]:
    """The fields and values of a hash, which alternate in the answer."""
    names = (name.decode() for name in reply[::2])
    return zip(names, map(int, reply[1::2]), strict=True)
