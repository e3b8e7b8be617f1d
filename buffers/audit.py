"""Audits the recorded events: group by group, nothing was lost, skipped or trained twice.

    leases granted = acknowledged + dropped (by reason) + waiting (leased, buffered, taken, trained)

It follows every `Event` in a journal or Redis without using the ledger's code, so that it does not
repeat the ledger's mistakes; then it compares its sums with the ledger's snapshot. After a learner
died, its groups wait again (taken or trained, then buffered); a learner that resumes from a
checkpoint may free prompts that later steps had ended.

Response lengths are summed by outcome: sampled = trained + dropped + waiting, as the ledger counts
them, but without rounding. Work that a learner lost and repeated counts each time.
"""

import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from buffers.journal.journal import FREE, read_rows
from buffers.journal.payload_segments import PayloadPlace
from buffers.journal.sqlite import open_to_read, read_events, read_snapshot
from buffers.ledger.entries import BY_BOOKS, Event, LedgerSnapshot
from buffers.ledger.state import ends_without_group, most_retried
from streamrl.extras import require
from streamrl.types import (
    DropReason,
    IndexRanges,
    LengthHistogram,
    ResponseLengths,
    length_distance,
)


def length_findings(lengths: ResponseLengths) -> Iterator[str]:
    """Lines with number, mean, 99th percentile and maximum by outcome; none without a response.

    The distance is that of Kolmogorov and Smirnov, from 0 (equal distributions) to 1.
    """
    sampled = lengths.sampled
    if not sampled.counts:
        return
    yield f"{sampled.num_responses} responses sampled: {_summary(sampled)}"
    if lengths.trained.counts:
        distance = length_distance(sampled, lengths.trained)
        summary = f"{_summary(lengths.trained)}; distance from sampled {distance:.3f}"
        yield f"  {lengths.trained.num_responses} trained: {summary}"
    for reason, dropped in sorted(lengths.dropped.items()):
        percent = 100 * dropped.num_tokens / max(1, sampled.num_tokens)
        summary = f"{_summary(dropped)}; {percent:.1f} % of the sampled tokens"
        yield f"  {dropped.num_responses} dropped ({reason}): {summary}"


def _summary(lengths: LengthHistogram) -> str:
    p99, longest = lengths.quantile(0.99), lengths.longest
    return f"{lengths.mean:.1f} tokens in the mean, 99th percentile {p99}, longest {longest}"


_WAITING = ("leased", "buffered", "taken", "trained")
_ENDED = ("acknowledged", "dropped")
_FOLLOWS = {
    "leased": ("buffered", "dropped"),
    "buffered": ("taken", "dropped"),
    "taken": ("trained", "buffered", "dropped"),
    "trained": ("acknowledged", "buffered", "dropped"),
}


class PromptState(Struct, frozen=True):
    """The state of a prompt after its last event; `is_free` means that it may be granted.

    `by_books`: a learner's books say that it is finished, rather than training recorded here.
    `lengths` are those of its waiting responses.
    """

    state: str = ""
    lease_id: str = ""
    is_free: bool = True
    by_books: bool = False
    lengths: tuple[int, ...] = ()

    @property
    def is_acknowledged(self) -> bool:
        """Whether the buffer has freed it permanently."""
        return self.state == "acknowledged"

    @property
    def may_be_trained(self) -> bool:
        """Whether its next event may lead to a training."""
        return self.is_free or self.state in ("leased", "buffered", "taken")


class EventAudit(Struct, frozen=True, kw_only=True):
    """The sums of the events; `faults` has a sentence for each thing out of order.

    `retried` counts, by prompt, leases that ended without a group, though it may have one now.
    `num_reopened` counts prompts that were acknowledged and then freed again for a learner that
    went back. `contained` are ranges of prompts without events that a learner's books contain.
    """

    granted: int
    ended: Counter[str]
    retried: Counter[int]
    num_reopened: int
    prompts: Mapping[int, PromptState]
    contained: IndexRanges
    lengths: ResponseLengths
    faults: tuple[str, ...]

    @property
    def waiting(self) -> Counter[str]:
        return Counter(prompt.state for prompt in self.prompts.values() if _waits(prompt))

    @property
    def num_free(self) -> int:
        return sum(prompt.is_free for prompt in self.prompts.values())


def audit_journal(path: Path) -> EventAudit:
    """Audit a journal file, as of one moment even if it is being written."""
    with open_to_read(path) as db:
        result = audit(read_events(db))
        return _with_faults(result, compare(result, read_snapshot(db)), _compare_rows(result, db))


async def audit_redis(url: str, run: str) -> EventAudit:
    """Audit a run in Redis that is at rest: its snapshot and events are read one after the
    other."""
    require("buffer.url: redis://", "redis")
    from buffers.redis import journal_storage as stream

    snapshot = await stream.read_snapshot(url, run)
    result = audit([event async for event in stream.read_events(url, run)])
    return _with_faults(result, compare(result, snapshot))


def audit(events: Iterable[Event]) -> EventAudit:
    """Follow every event; order matters within a prompt, and where books are adopted."""
    ended, retried = Counter[str](), Counter[int]()
    sampled, trained = Counter[int](), Counter[int]()
    dropped: defaultdict[DropReason, Counter[int]] = defaultdict(Counter)
    prompts: dict[int, PromptState] = {}
    contained: list[tuple[int, int]] = []
    granted = following = num_reopened = 0
    faults: list[str] = []
    for event in events:
        prompt = prompts.get(event.prompt_index, PromptState())
        if fault := _fault(event, prompt):
            faults.append(f"prompt {event.prompt_index}: {fault}")
        if event.reason == BY_BOOKS and event.prompt_index > following:
            contained.append((following, event.prompt_index))
        following = max(following, event.prompt_index + 1)
        lengths = event.response_lengths or prompt.lengths
        sampled.update(event.response_lengths)
        if event.state == "acknowledged":
            trained.update(lengths)
        elif lengths and event.state == "dropped" and event.reason in list(DropReason):
            dropped[DropReason(event.reason)].update(lengths)
        granted += event.state == "leased"
        if ends_without_group(event):
            retried[event.prompt_index] += 1
        num_reopened += prompt.is_acknowledged and event.state == "dropped"
        if event.lease_id and event.state in _ENDED:
            ended[_end(event)] += 1
        prompts[event.prompt_index] = PromptState(
            event.state,
            event.lease_id,
            is_free=event.frees_prompt,
            by_books=event.reason == BY_BOOKS,
            lengths=() if event.state in _ENDED else lengths,
        )
    for prompt in prompts.values():
        # It is trained and waits for its checkpoint.
        trained.update(prompt.lengths if prompt.state == "trained" else ())
    result = EventAudit(
        granted=granted,
        ended=ended,
        retried=retried,
        num_reopened=num_reopened,
        prompts=prompts,
        contained=tuple(contained),
        lengths=ResponseLengths(
            LengthHistogram.of(sampled),
            LengthHistogram.of(trained),
            {reason: LengthHistogram.of(counts) for reason, counts in dropped.items()},
        ),
        faults=tuple(faults),
    )
    return _with_faults(result, _sum_faults(result))


def compare(result: EventAudit, snapshot: LedgerSnapshot) -> Iterator[str]:
    """A sentence for each point in which the ledger's snapshot disagrees with the events."""
    granted = snapshot.granted - (snapshot.unseen or 0)
    if granted != result.granted:
        yield f"the ledger has {granted} leases granted, the events {result.granted}"
    yield from _length_faults(snapshot.lengths, result.lengths.rounded())
    if snapshot.unseen is not None:
        return
    ended = {
        "acknowledged": snapshot.acknowledged,
        **{str(reason): count for reason, count in snapshot.dropped.items()},
    }
    for name in sorted(ended.keys() | result.ended.keys()):
        if ended.get(name, 0) != result.ended[name]:
            yield f"the ledger has {ended.get(name, 0)} {name}, the events {result.ended[name]}"


def findings(result: EventAudit) -> Iterator[str]:
    """The sums, as lines."""
    yield f"{result.granted} leases granted"
    for name, count in sorted(result.ended.items()):
        yield f"  {count} {name if name == 'acknowledged' else f'dropped ({name})'}"
    for state in _WAITING:
        yield f"  {result.waiting[state]} {state}"
    yield f"{len(result.prompts)} prompts, {result.num_free} of them to be granted again"
    for prompt in most_retried(result.retried):
        yield f"  prompt {prompt.prompt_index}: {prompt.num_leases} leases ended without a group"
    yield from length_findings(result.lengths)


def _with_faults(result: EventAudit, *faults: Iterable[str]) -> EventAudit:
    more = (fault for found in faults for fault in found)
    return replace(result, faults=(*result.faults, *more))


def _length_faults(ledger: ResponseLengths, events: ResponseLengths) -> Iterator[str]:
    for name, here, there in (
        ("sampled", ledger.sampled, events.sampled),
        ("trained", ledger.trained, events.trained),
        ("dropped", ledger.all_dropped, events.all_dropped),
    ):
        if here != there:
            yield (
                f"the ledger has {here.num_responses} {name} responses with {here.num_tokens} "
                f"tokens, the events {there.num_responses} with {there.num_tokens}"
            )


def _sum_faults(result: EventAudit) -> Iterator[str]:
    last, behind = max(result.prompts, default=-1), 0
    for start, stop in sorted([*result.contained, *((i, i + 1) for i in result.prompts)]):
        for prompt_index in range(behind, start):
            yield f"prompt {prompt_index}: was never granted, {last} was"
        behind = max(behind, stop)
    total = result.waiting.total() + result.ended.total()
    if result.granted != total:
        yield f"{result.granted} leases were granted, but {total} are accounted for"


def _fault(event: Event, prompt: PromptState) -> str | None:
    """What is wrong with an event, given the prompt's state before it; None if nothing."""
    lease = f"lease {event.lease_id}" if event.lease_id else "a learner's books"
    holder = f"lease {prompt.lease_id} was {prompt.state}"
    if not event.lease_id:
        return f"ended by {lease} while {holder}" if _waits(prompt) else None
    if event.state == "leased":
        if _waits(prompt):
            return f"{lease} was granted while {holder}"
        return None if prompt.is_free else f"{lease} was granted after {_ending(prompt)}"
    if prompt.lease_id != event.lease_id:
        return f"{lease} is {event.state}, but was not granted"
    if event.state == "dropped" and event.reason not in list(DropReason):
        return f"{lease} was dropped with the reason {event.reason}"
    if event.reason == BY_BOOKS and _waits(prompt):
        return None
    if event.state not in _FOLLOWS.get(prompt.state, ()):
        return f"{lease} went from {prompt.state} to {event.state}"
    return None


def _ending(prompt: PromptState) -> str:
    """How a prompt that was granted again had ended."""
    if prompt.state == "acknowledged":
        return "it had been acknowledged: trained twice"
    return f"it had been {prompt.state} for good"


def _end(event: Event) -> str:
    return event.reason if event.state == "dropped" and event.reason else event.state


def _waits(prompt: PromptState) -> bool:
    return prompt.state in _WAITING


def _compare_rows(result: EventAudit, db: sqlite3.Connection) -> Iterator[str]:
    """A sentence for each point in which the rows that a restart would recover disagree with the
    events."""
    prompts = result.prompts
    expected = {i: (p.lease_id, p.state) for i, p in prompts.items() if _waits(p)}
    expected |= {i: ("", FREE) for i, p in prompts.items() if p.is_free}
    read = read_rows(db.execute("SELECT * FROM entry"), PayloadPlace)
    rows = {entry.prompt_index: (entry.lease_id, str(entry.state)) for entry in read.entries}
    rows |= {i: ("", FREE) for i in read.free}
    for prompt_index in sorted(expected.keys() | rows.keys()):
        if expected.get(prompt_index) != rows.get(prompt_index):
            yield (
                f"prompt {prompt_index}: is {rows.get(prompt_index)} in the journal, but the "
                f"events say {expected.get(prompt_index)}"
            )
    for prompt_index, lease_id in db.execute(_WITHOUT_PAYLOAD):
        yield f"prompt {prompt_index}: the payload of lease {lease_id} is missing"


_WITHOUT_PAYLOAD = (
    "SELECT prompt_index, lease_id FROM entry WHERE header IS NOT NULL AND places IS NULL"
)
