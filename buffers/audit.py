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

from buffers.account import Image
from buffers.connect import require_redis
from buffers.history import BY_BOOKS, Event
from buffers.journal_file import (
    FREE,
    journal_path,
    open_to_read,
    read_history,
    read_image,
)
from streamrl.cli.watch import config_of
from streamrl.config import RunConfig
from streamrl.types import DropReason

WAITING = ("leased", "buffered", "taken", "trained")
_ENDED = ("acknowledged", "dropped")
_FOLLOWS = {
    "leased": ("buffered", "dropped"),
    "buffered": ("taken", "dropped"),
    "taken": ("trained", "buffered", "dropped"),
    "trained": ("acknowledged", "buffered", "dropped"),
}


class Standing(Struct):
    """The last that is known of a sequence; `is_free` means that it may be granted."""

    state: str = ""
    lease_id: str = ""
    is_free: bool = True


class Audit(Struct):
    """What the history adds up to; `faults` has a sentence for each thing out of order."""

    granted: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    standings: dict[int, Standing] = {}
    faults: list[str] = []

    @property
    def waiting(self) -> Counter[str]:
        return Counter(s.state for s in self.standings.values() if s.state in WAITING)

    @property
    def num_free(self) -> int:
        return sum(s.is_free for s in self.standings.values())


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
        found = audit(read_history(db))
        found.faults.extend(compare(found, read_image(db)))
        found.faults.extend(_against_entries(found, db))
    return found


def _of_redis(config: RunConfig) -> Audit:
    require_redis()
    from buffers.redis_history import account, history

    url, run = config.buffer.url, config.run.name

    async def read() -> Audit:
        found = audit([event async for event in history(url, run)])
        found.faults.extend(compare(found, await account(url, run)))
        return found

    return asyncio.run(read())


def audit(events: Iterable[Event]) -> Audit:
    """Follow every event. The order matters within a sequence only."""
    found = Audit()
    for event in events:
        standing = found.standings.setdefault(event.sequence, Standing())
        if fault := _fault(event, standing):
            found.faults.append(f"sequence {event.sequence}: {fault}")
        found.granted += event.state == "leased"
        if event.lease_id and event.state in _ENDED:
            found.ended[
                event.reason if event.state == "dropped" and event.reason else event.state
            ] += 1
        standing.state, standing.lease_id = event.state, event.lease_id
        standing.is_free = event.state == "dropped" and _returns(event.reason)
    last = max(found.standings, default=-1)
    skipped = (s for s in range(last) if s not in found.standings)
    found.faults.extend(f"sequence {s}: was never granted, {last} was" for s in skipped)
    told = found.waiting.total() + found.ended.total()
    if found.granted != told:
        found.faults.append(f"{found.granted} leases were granted, but {told} are accounted for")
    return found


def compare(found: Audit, image: Image) -> Iterator[str]:
    """Where the account disagrees with its own history."""
    granted = image.granted - image.unseen
    if granted != found.granted:
        yield f"the account has {granted} leases granted, the history {found.granted}"
    if image.unseen:
        return
    ended = {"acknowledged": image.acknowledged, **{str(k): n for k, n in image.dropped.items()}}
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
    yield f"{len(found.standings)} sequences, {found.num_free} of them to be granted again"
    yield from found.faults
    yield f"{len(found.faults)} faults" if found.faults else "in order"


def _fault(event: Event, standing: Standing) -> str | None:
    lease = f"lease {event.lease_id}" if event.lease_id else "a learner's books"
    holder = f"lease {standing.lease_id} was {standing.state}"
    if not event.lease_id:
        return f"ended by {lease} while {holder}" if standing.state in WAITING else None
    if event.state == "leased":
        if standing.state in WAITING:
            return f"{lease} was granted while {holder}"
        return None if standing.is_free else f"{lease} was granted after {_end(standing)}"
    if standing.lease_id != event.lease_id:
        return f"{lease} is {event.state}, but was not granted"
    if event.state == "dropped" and event.reason not in list(DropReason):
        return f"{lease} was dropped with the reason {event.reason}"
    if event.reason == BY_BOOKS and standing.state in WAITING:
        return None
    if event.state not in _FOLLOWS.get(standing.state, ()):
        return f"{lease} went from {standing.state} to {event.state}"
    return None


def _end(standing: Standing) -> str:
    """How a sequence ended that came up again."""
    if standing.state == "acknowledged":
        return "it had been acknowledged: trained twice"
    return f"it had been {standing.state} for good"


def _returns(reason: str | None) -> bool:
    return reason in list(DropReason) and DropReason(reason).returns_sequence


def _against_entries(found: Audit, db: sqlite3.Connection) -> Iterator[str]:
    """Where the state that a restart would recover is not that of the history."""
    told = {s: (x.lease_id, x.state) for s, x in found.standings.items() if x.state in WAITING}
    told |= {s: ("", FREE) for s, x in found.standings.items() if x.is_free}
    kept = {s: (lease_id, state) for s, lease_id, state in db.execute(_ENTRIES)}
    for sequence in sorted(told.keys() | kept.keys()):
        if told.get(sequence) != kept.get(sequence):
            yield (
                f"sequence {sequence}: is {kept.get(sequence)} in the journal, but the history "
                f"says {told.get(sequence)}"
            )
    for sequence, lease_id in db.execute(_WITHOUT_PAYLOAD):
        yield f"sequence {sequence}: the payload of lease {lease_id} is missing"


_ENTRIES = "SELECT sequence, lease_id, state FROM entry"
_WITHOUT_PAYLOAD = (
    "SELECT sequence, lease_id FROM entry WHERE header IS NOT NULL "
    "AND sequence NOT IN (SELECT sequence FROM payload)"
)
