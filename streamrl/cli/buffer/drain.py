"""`streamrl buffer drain`, and the loop of every drain: request, read, wait.

0  drained      1  not within the deadline, the drain was undone, or no learner takes what waits
"""

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from streamrl.cli.buffer.target import open_running, read_folder
from streamrl.config import RunConfig
from streamrl.config.loading.explain import RESOLVED_FILE
from streamrl.interfaces import TrajectoryBuffer
from streamrl.run_folder import find_config
from streamrl.types import BufferStats

_POLL_S = 0.5


@dataclass(frozen=True)
class DrainProgress:
    """One reading of a drain: how it ended, or what it still waits for."""

    waiting_for: str = ""
    result: str = ""
    exit_code: int = 0


def main(arguments: argparse.Namespace) -> int:
    return asyncio.run(_drain(arguments.target, arguments.deadline))


async def wait_until_drained(
    read: Callable[[], Awaitable[DrainProgress]], deadline_s: float
) -> int:
    """Read until the drain has ended; its exit code.

    Waits `deadline_s` at most; prints what the drain waits for whenever that changes.
    """
    deadline, printed = time.monotonic() + deadline_s, ""
    while True:
        progress = await read()
        if progress.result:
            print(progress.result)
            return progress.exit_code
        if time.monotonic() >= deadline:
            print(f"not drained within {deadline_s:g} s: {progress.waiting_for}")
            return 1
        if progress.waiting_for != printed:
            printed = progress.waiting_for
            print(f"waiting for {printed}")
        await asyncio.sleep(_POLL_S)


async def _drain(target: str, deadline_s: float) -> int:
    config = None if "://" in target else find_config(target)
    async with open_running(target) as buffer:
        return await wait_until_drained(lambda: _request(buffer, config), deadline_s)


async def _request(buffer: TrajectoryBuffer, config: RunConfig | None) -> DrainProgress:
    """Each reading requests the drain again, since a learner that attaches ends it."""
    await buffer.drain()
    stats = await buffer.stats()
    if stats.in_flight == 0 or (stats.finished and stats.books.leased == 0):
        return DrainProgress(result=f"drained at version {stats.policy_version}: {_kept(stats)}")
    if config is not None and stats.books.leased == 0 and _learner_has_ended(config):
        return DrainProgress(
            result=f"{stats.in_flight} groups wait and no learner takes them: start one with "
            f"`streamrl learner --config {config.run.path / RESOLVED_FILE} --resume`",
            exit_code=1,
        )
    return DrainProgress(waiting_for=_holders(stats))


def _learner_has_ended(config: RunConfig) -> bool:
    reading = read_folder(config)
    return reading.is_over and not reading.is_relaunched


def _holders(stats: BufferStats) -> str:
    """Who holds the groups in flight."""
    books = stats.books
    holders = ", ".join(f"{s.generator_id} {len(s.lease_ids)}" for s in stats.generators)
    return (
        f"{books.leased} leased ({holders or 'no generator reports'}), {books.buffered} buffered "
        f"and {books.taken} taken (the learner, at version {stats.policy_version})"
    )


def _kept(stats: BufferStats) -> str:
    if stats.books.trained:
        return f"{stats.books.trained} trained groups are kept until the learner's next checkpoint"
    return "every group is trained or dropped, and none is kept"
