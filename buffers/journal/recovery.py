"""What a journal's file holds, read at once when a buffer starts with it.

Invariant: reading changes nothing, so it can be repeated after an error.
"""

import json
import sqlite3
from typing import NamedTuple

import msgspec

from buffers.journal.schema import FREE, read_snapshot
from buffers.journal.segments import Place
from buffers.ledger.entries import LedgerSnapshot
from buffers.ledger.entry import Entry, State
from streamrl.types import GroupHeader, SchedulingState


class JournalContent(NamedTuple):
    """The rows of every table; `numbers` and `next_number` are those of the leases' events."""

    settings: dict[str, str | int] | None
    snapshot: LedgerSnapshot
    entries: list[Entry]
    numbers: dict[str, int]
    free: list[int]
    places: dict[int, Place]
    scheduling_states: dict[str, SchedulingState]
    next_number: int


def read_content(db: sqlite3.Connection, now_s: float) -> JournalContent:
    """Everything but the events. Leases expire at `now_s` unless the ledger extends them."""
    entries, numbers, free = [], {}, []
    for prompt_index, number, lease_id, min_policy_version, state, version, header in db.execute(
        "SELECT * FROM entry"
    ):
        if state == FREE:
            free.append(prompt_index)
            continue
        known = header and msgspec.msgpack.decode(header, type=GroupHeader)
        lease = (prompt_index, lease_id, min_policy_version, now_s)
        entries.append(Entry(*lease, State(state), known, version))
        numbers[lease_id] = number
    settings = db.execute("SELECT data FROM settings").fetchone()
    newest = db.execute("SELECT max(number) FROM events").fetchone()[0]
    return JournalContent(
        settings=settings and json.loads(settings[0]),
        snapshot=read_snapshot(db),
        entries=entries,
        numbers=numbers,
        free=free,
        places={key: Place(*place) for key, *place in db.execute("SELECT * FROM payload")},
        scheduling_states={
            generator_id: SchedulingState(scheduling_state)
            for generator_id, scheduling_state in db.execute("SELECT * FROM scheduling_state")
        },
        next_number=0 if newest is None else newest + 1,
    )
