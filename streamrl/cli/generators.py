"""`streamrl generators`: the list, and the scheduling state of one generator.

Every command goes through the buffer that the generators report to, whatever its backend; a
generator gets its scheduling state with the reply to its next heartbeat.
"""

import argparse
import asyncio
import json

import msgspec

from streamrl.cli.buffer.drain import DrainProgress, wait_until_drained
from streamrl.cli.buffer.target import open_running
from streamrl.cli.display.generators import generator_rows, print_generators
from streamrl.types import BufferStats, SchedulingState


def show(arguments: argparse.Namespace) -> int:
    stats = asyncio.run(_read(arguments.target))
    if arguments.json:
        print(json.dumps(msgspec.to_builtins(list(generator_rows(stats)))))
    else:
        print_generators(stats)
    return 0


def cordon(arguments: argparse.Namespace) -> int:
    asyncio.run(_set_state(arguments.target, arguments.id, SchedulingState.CORDONED))
    print(f"{arguments.id} is granted no leases until it is uncordoned")
    return 0


def uncordon(arguments: argparse.Namespace) -> int:
    asyncio.run(_set_state(arguments.target, arguments.id, SchedulingState.ACTIVE))
    print(f"{arguments.id} is granted leases")
    return 0


def drain(arguments: argparse.Namespace) -> int:
    return asyncio.run(_drain(arguments.target, arguments.id, arguments.deadline))


async def _read(target: str) -> BufferStats:
    async with open_running(target) as buffer:
        return await buffer.stats()


async def _set_state(target: str, generator_id: str, state: SchedulingState) -> None:
    async with open_running(target) as buffer:
        await buffer.set_scheduling_state(generator_id, state)


async def _drain(target: str, generator_id: str, deadline_s: float) -> int:
    """Waits until the generator has left or no longer reports, or until another command changes
    its scheduling state, or for the deadline."""
    async with open_running(target) as buffer:
        await buffer.set_scheduling_state(generator_id, SchedulingState.DRAINING)
        session = _session(await buffer.stats(), generator_id)

        async def read() -> DrainProgress:
            return _progress(await buffer.stats(), generator_id, session)

        return await wait_until_drained(read, deadline_s)


def _progress(stats: BufferStats, generator_id: str, session: str | None) -> DrainProgress:
    """`session` is that of the process to leave: another one of this id has taken its place."""
    current = _session(stats, generator_id)
    if current is None:
        return DrainProgress(result=f"{generator_id} has left")
    if generator_id not in stats.scheduling_states:
        if current != session:
            return DrainProgress(result=f"{generator_id} has left")
        return DrainProgress(result=f"the drain of {generator_id} was undone", exit_code=1)
    row = next(row for row in generator_rows(stats) if row.id == generator_id)
    return DrainProgress(waiting_for=f"{generator_id}: {row.state}, {row.num_leases} leases")


def _session(stats: BufferStats, generator_id: str) -> str | None:
    sessions = (s.session for s in stats.generators if s.generator_id == generator_id)
    return next(sessions, None)
