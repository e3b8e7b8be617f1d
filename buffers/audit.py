"""The audit: proves group by group that nothing was lost, skipped or trained twice.

    leases granted = acknowledged + dropped (by reason) + waiting (leased, buffered, taken, trained)

Reads a history of `Event`s and needs no ledger, so that it does not repeat the ledger's mistakes;
then compares what it counted with the account. A learner that died makes groups wait again (taken
or trained, then buffered); one that goes on from a checkpoint may free what a lost history ended.
Started by `streamrl buffer audit RUN`: exit code 1 if anything is not in order.
"""

import argparse
import asyncio
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from msgspec import Struct, field

from buffers.connect import require_redis
from buffers.journal.schema import (
    FREE,
    journal_path,
    open_to_read,
    read_events,
    read_snapshot,
)
from buffers.ledger.entries import LedgerSnapshot
from buffers.ledger.events import BY_BOOKS, Event
from streamrl.config import RunConfig
from streamrl.run_folder import config_of
from streamrl.types import DropReason

WAITING = ("leased", "buffered", "taken", "trained")
_ENDED = ("acknowledged", "dropped")
_FOLLOWS = {
    "leased": ("buffered", "dropped"),
    "buffered": ("taken", "dropped"),
    "taken": ("trained", "buffered", "dropped"),
    "trained": ("acknowledged", "buffered", "dropped"),
}


class PromptState(Struct):
    """The last that is known of a prompt; `is_free` means that it may be granted."""

    state: str = ""
    lease_id: str = ""
    is_free: bool = True


class Audit(Struct):
    """What the history adds up to; `faults` has a sentence for each thing out of order."""

    granted: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    prompt_states: dict[int, PromptState] = {}
    faults: list[str] = []

    @property
    def waiting(self) -> Counter[str]:
        return Counter(s.state for s in self.prompt_states.values() if s.state in WAITING)

    @property
    def num_free(self) -> int:
        return sum(s.is_free for s in self.prompt_states.values())


def main(arguments: argparse.Namespace) -> int:
    folder = Path(arguments.folder)
    config = None if journal_path(folder).exists() else config_of(folder)
    # A run whose buffer is no daemon of ours has its history on somebody's server.
    is_elsewhere = config is not None and not config.buffer.has_daemon
    found = _of_redis(config) if config and is_elsewhere else _of_journal(folder)
    print("\n".join(report(found)))
    return 1 if found.faults else 0


def _of_journal(folder: Path) -> Audit:
    with open_to_read(journal_path(folder)) as db:
        found = audit(read_events(db))
        found.faults.extend(compare(found, read_snapshot(db)))
        found.faults.extend(_against_entries(found, db))
    return found


def _of_redis(config: RunConfig) -> Audit:
    require_redis()
    from buffers.redis.events import read_events as read_redis_events
    from buffers.redis.events import read_snapshot as read_redis_snapshot

    url, run = config.buffer.url, config.run.name

    async def read() -> Audit:
        found = audit([event async for event in read_redis_events(url, run)])
        found.faults.extend(compare(found, await read_redis_snapshot(url, run)))
        return found

    return asyncio.run(read())


def audit(events: Iterable[Event]) -> Audit:
    """Follow every event. The order matters within a prompt only."""
    found = Audit()
    for event in events:
        prompt_state = found.prompt_states.setdefault(event.prompt_index, PromptState())
        if fault := _fault(event, prompt_state):
            found.faults.append(f"prompt {event.prompt_index}: {fault}")
        found.granted += event.state == "leased"
        if event.lease_id and event.state in _ENDED:
            found.ended[
                event.reason if event.state == "dropped" and event.reason else event.state
            ] += 1
        prompt_state.state, prompt_state.lease_id = event.state, event.lease_id
        prompt_state.is_free = event.state == "dropped" and _returns(event.reason)
    last = max(found.prompt_states, default=-1)
    skipped = (s for s in range(last) if s not in found.prompt_states)
    found.faults.extend(f"prompt {s}: was never granted, {last} was" for s in skipped)
    told = found.waiting.total() + found.ended.total()
    if found.granted != told:
        found.faults.append(f"{found.granted} leases were granted, but {told} are accounted for")
    return found


def compare(found: Audit, snapshot: LedgerSnapshot) -> Iterator[str]:
    """Where the account disagrees with its own history."""
    granted = snapshot.granted - snapshot.unseen
    if granted != found.granted:
        yield f"the account has {granted} leases granted, the history {found.granted}"
    if snapshot.unseen:
        return
    ended = {
        "acknowledged": snapshot.acknowledged,
        **{str(k): n for k, n in snapshot.dropped.items()},
    }
    for name in sorted(ended.keys() | found.ended.keys()):
        if ended.get(name, 0) != found.ended[name]:
            yield f"the account has {ended.get(name, 0)} {name}, the history {found.ended[name]}"


def report(found: Audit) -> Iterator[str]:
    """The proof in lines, faults last."""
    yield f"{found.granted} leases granted"
    for name, count in sorted(found.ended.items()):
        yield f"  {count} {name if name == 'acknowledged' else f'dropped ({name})'}"
    for state in WAITING:
        yield f"  {found.waiting[state]} {state}"
    yield f"{len(found.prompt_states)} prompts, {found.num_free} of them to be granted again"
    yield from found.faults
    yield f"{len(found.faults)} faults" if found.faults else "in order"


def _fault(event: Event, prompt_state: PromptState) -> str | None:
    lease = f"lease {event.lease_id}" if event.lease_id else "a learner's books"
    holder = f"lease {prompt_state.lease_id} was {prompt_state.state}"
    if not event.lease_id:
        return f"ended by {lease} while {holder}" if prompt_state.state in WAITING else None
    if event.state == "leased":
        if prompt_state.state in WAITING:
            return f"{lease} was granted while {holder}"
        return None if prompt_state.is_free else f"{lease} was granted after {_end(prompt_state)}"
    if prompt_state.lease_id != event.lease_id:
        return f"{lease} is {event.state}, but was not granted"
    if event.state == "dropped" and event.reason not in list(DropReason):
        return f"{lease} was dropped with the reason {event.reason}"
    if event.reason == BY_BOOKS and prompt_state.state in WAITING:
        return None
    if event.state not in _FOLLOWS.get(prompt_state.state, ()):
        return f"{lease} went from {prompt_state.state} to {event.state}"
    return None


def _end(prompt_state: PromptState) -> str:
    """How a prompt ended that came up again."""
    if prompt_state.state == "acknowledged":
        return "it had been acknowledged: trained twice"
    return f"it had been {prompt_state.state} for good"


def _returns(reason: str | None) -> bool:
    return reason in list(DropReason) and DropReason(reason).returns_prompt


def _against_entries(found: Audit, db: sqlite3.Connection) -> Iterator[str]:
    """Where the state that a restart would recover is not that of the history."""
    told = {s: (x.lease_id, x.state) for s, x in found.prompt_states.items() if x.state in WAITING}
    told |= {s: ("", FREE) for s, x in found.prompt_states.items() if x.is_free}
    kept = {s: (lease_id, state) for s, lease_id, state in db.execute(_ENTRIES)}
    for prompt_index in sorted(told.keys() | kept.keys()):
        if told.get(prompt_index) != kept.get(prompt_index):
            yield (
                f"prompt {prompt_index}: is {kept.get(prompt_index)} in the journal, but the "
                f"history says {told.get(prompt_index)}"
            )
    for prompt_index, lease_id in db.execute(_WITHOUT_PAYLOAD):
        yield f"prompt {prompt_index}: the payload of lease {lease_id} is missing"


_ENTRIES = "SELECT prompt_index, lease_id, state FROM entry"
_WITHOUT_PAYLOAD = (
    "SELECT prompt_index, lease_id FROM entry WHERE header IS NOT NULL "
    "AND prompt_index NOT IN (SELECT prompt_index FROM payload)"
)
