"""What a person asks of a run's generators: `streamrl generators`, and orders to one of them.

Reads and orders through the buffer that they report to, whatever backend that is; the generators
hear of an order with their next heartbeat.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from streamrl.cli.buffer import connected
from streamrl.types import BufferStats, GeneratorStatus, SchedulingState

# Generators report every second, or four times in the life of a lease if that is shorter.
SILENT_S = 3.0
_POLL_S = 0.5


class Member(Struct, frozen=True, kw_only=True):
    """A line of the list. `lag` is in versions behind the learner; what is not known is None."""

    id: str
    state: str
    policy_version: int | None = None
    lag: int | None = None
    num_leases: int | None = None
    oldest_lease_s: float | None = None
    tokens_per_s: float | None = None
    heartbeat_age_s: float | None = None


def show(arguments: argparse.Namespace) -> int:
    stats = asyncio.run(_ask(arguments.target))
    found = list(members(stats))
    if arguments.json:
        print(json.dumps(msgspec.to_builtins(found)))
    else:
        Console(soft_wrap=True).print(_table(found))
    return 0


def cordon(arguments: argparse.Namespace) -> int:
    asyncio.run(_ask(arguments.target, arguments.id, SchedulingState.CORDONED))
    print(f"{arguments.id} is granted no leases until it is uncordoned")
    return 0


def uncordon(arguments: argparse.Namespace) -> int:
    asyncio.run(_ask(arguments.target, arguments.id, SchedulingState.ACTIVE))
    print(f"{arguments.id} is granted leases")
    return 0


def drain(arguments: argparse.Namespace) -> int:
    return asyncio.run(_drain(arguments.target, arguments.id, arguments.deadline))


def members(stats: BufferStats) -> Iterator[Member]:
    """Everybody who reports, then those of whom only an order is known; by their ids."""
    reports = zip(stats.generators, stats.heartbeat_ages_s, strict=True)
    for status, age_s in sorted(reports, key=lambda report: report[0].generator_id):
        yield Member(
            id=status.generator_id,
            state=_state(status, age_s, stats.scheduling_states),
            policy_version=status.policy_version,
            lag=stats.policy_version - status.policy_version,
            num_leases=len(status.lease_ids),
            oldest_lease_s=max(status.lease_ages_s, default=None),
            tokens_per_s=status.tokens_per_s,
            heartbeat_age_s=age_s,
        )
    present = {status.generator_id for status in stats.generators}
    for generator_id, scheduling_state in sorted(stats.scheduling_states.items()):
        if generator_id not in present:
            yield Member(id=generator_id, state=f"{scheduling_state}, away")


def _state(
    status: GeneratorStatus, age_s: float, scheduling_states: dict[str, SchedulingState]
) -> str:
    scheduling_state = scheduling_states.get(status.generator_id, SchedulingState.ACTIVE)
    if age_s > SILENT_S:
        return (
            "silent"
            if scheduling_state is SchedulingState.ACTIVE
            else f"{scheduling_state}, silent"
        )
    if scheduling_state is SchedulingState.ACTIVE and status.is_catching_up:
        return "catching up"
    return str(scheduling_state)


_COLUMNS: dict[str, Callable[[Member], Any]] = {
    "version": lambda member: member.policy_version,
    "lag": lambda member: member.lag,
    "leases": lambda member: member.num_leases,
    "oldest lease": lambda member: _seconds(member.oldest_lease_s),
    "tokens/s": lambda member: _rounded(member.tokens_per_s),
    "last heard": lambda member: _seconds(member.heartbeat_age_s),
}


def _table(found: list[Member]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("generator", "state"):
        table.add_column(name)
    for name in _COLUMNS:
        table.add_column(name, justify="right")
    for member in found:
        cells = (cell(member) for cell in _COLUMNS.values())
        table.add_row(
            member.id, member.state, *("" if cell is None else str(cell) for cell in cells)
        )
    return table


def _rounded(value: float | None) -> str | None:
    return None if value is None else f"{value:.0f}"


def _seconds(value: float | None) -> str | None:
    return None if value is None else f"{value:.1f} s"


async def _ask(
    target: str,
    generator_id: str | None = None,
    scheduling_state: SchedulingState = SchedulingState.ACTIVE,
) -> BufferStats:
    """A reading, after the order if one is given."""
    buffer = connected(target)
    try:
        if generator_id is not None:
            await buffer.set_scheduling_state(generator_id, scheduling_state)
        return await buffer.stats()
    finally:
        await buffer.close()


async def _drain(target: str, generator_id: str, deadline_s: float) -> int:
    """Waits until the generator has left, or is heard of no more; unblocked by that, by an order
    to stay, or by the deadline."""
    buffer = connected(target)
    deadline, told = time.monotonic() + deadline_s, ""
    try:
        await buffer.set_scheduling_state(generator_id, SchedulingState.DRAINING)
        stats = await buffer.stats()
        session = _session(stats, generator_id)
        while (is_gone := _is_gone(stats, generator_id, session)) is None:
            held = _held(stats, generator_id)
            if time.monotonic() >= deadline:
                print(f"{generator_id} has not left within {deadline_s:g} s: {held}")
                return 1
            if held != told:
                print(f"waiting for {generator_id}: {held}")
            told = held
            await asyncio.sleep(_POLL_S)
            stats = await buffer.stats()
        print(f"{generator_id} {'has left' if is_gone else 'was told to stay'}")
        return 0 if is_gone else 1
    finally:
        await buffer.close()


def _is_gone(stats: BufferStats, generator_id: str, session: str | None) -> bool | None:
    """True: it has left, and may be back; False: its order was undone; None: not yet."""
    now = _session(stats, generator_id)
    if now is None:
        return True
    return None if generator_id in stats.scheduling_states else now != session


def _session(stats: BufferStats, generator_id: str) -> str | None:
    sessions = (s.session for s in stats.generators if s.generator_id == generator_id)
    return next(sessions, None)


def _held(stats: BufferStats, generator_id: str) -> str:
    member = next(member for member in members(stats) if member.id == generator_id)
    return f"{member.state}, {member.num_leases} groups under way"
