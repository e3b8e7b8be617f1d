"""The commands that ask a running buffer, whatever its backend: `streamrl generators` with its
verbs, `buffer inspect` and `buffer drain`; and `buffer books`, whether Redis holds a run, which
outlives its daemons. `streamrl launch` runs that before a new run, so that a run does not find what
an older one of its name has left on the server.

A generator gets its scheduling state with the reply to its next heartbeat.

    0  done, or drained
    1  not drained within the deadline, the drain was undone, or no learner takes what waits; of
       `inspect`: the books do not close
"""

import argparse
import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

import msgspec
from rich.console import Console

from streamrl.checkpoints.find import require_new_run
from streamrl.cli.buffer.target import open_running, read_folder
from streamrl.cli.display.generators import generator_rows, print_generators
from streamrl.cli.display.numbers import books_rows
from streamrl.config import RunConfig
from streamrl.config.loading.explain import RESOLVED_FILE
from streamrl.config.loading.load import configuration
from streamrl.errors import ConfigError
from streamrl.extras import require
from streamrl.interfaces import TrajectoryBuffer
from streamrl.run_folder import find_config
from streamrl.types import BufferStats, SchedulingState

_POLL_S = 0.5


@dataclass(frozen=True)
class DrainProgress:
    """One reading of a drain: how it ended, or what it still waits for."""

    waiting_for: str = ""
    result: str = ""
    exit_code: int = 0


async def show(arguments: argparse.Namespace) -> int:
    async with open_running(arguments.target) as buffer:
        stats = await buffer.stats()
    if arguments.json:
        print(json.dumps(msgspec.to_builtins(list(generator_rows(stats)))))
    else:
        print_generators(stats)
    return 0


async def cordon(arguments: argparse.Namespace) -> int:
    async with open_running(arguments.target) as buffer:
        await buffer.set_scheduling_state(arguments.id, SchedulingState.CORDONED)
    print(f"{arguments.id} is granted no leases until it is uncordoned")
    return 0


async def uncordon(arguments: argparse.Namespace) -> int:
    async with open_running(arguments.target) as buffer:
        await buffer.set_scheduling_state(arguments.id, SchedulingState.ACTIVE)
    print(f"{arguments.id} is granted leases")
    return 0


async def drain_generator(arguments: argparse.Namespace) -> int:
    """Waits until the generator has left or no longer reports, or until another command changes
    its scheduling state, or for the deadline."""
    generator_id = arguments.id
    async with open_running(arguments.target) as buffer:
        await buffer.set_scheduling_state(generator_id, SchedulingState.DRAINING)
        session = _session(await buffer.stats(), generator_id)

        async def read() -> DrainProgress:
            return _progress(await buffer.stats(), generator_id, session)

        return await wait_until_drained(read, arguments.deadline)


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


async def drain(arguments: argparse.Namespace) -> int:
    config = None if "://" in arguments.target else find_config(arguments.target)
    async with open_running(arguments.target) as buffer:
        return await wait_until_drained(lambda: _request(buffer, config), arguments.deadline)


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


async def inspect(arguments: argparse.Namespace) -> int:
    async with open_running(arguments.target) as buffer:
        before = await buffer.stats()
        await asyncio.sleep(arguments.interval)
        after = await buffer.stats()
    console = Console(soft_wrap=True)
    for name, value in inspect_rows(before, after, arguments.interval):
        console.print(f"{name:<10}{value}", highlight=False)
    print_generators(after)
    return 0 if after.books.balanced else 1


def inspect_rows(
    before: BufferStats, after: BufferStats, interval_s: float
) -> Iterator[tuple[str, str]]:
    """Name and value of each line; rates are those between the two readings."""
    books = after.books
    yield "version", f"{after.policy_version} (incarnation {after.incarnation[:12]})"
    yield "in flight", f"{after.in_flight} groups, at most {after.capacity}; {_admission(after)}"
    yield from books_rows(books)
    if after.oldest_version is not None:
        behind = after.policy_version - after.oldest_version
        yield "oldest", f"version {after.oldest_version}, {behind} behind the learner"
    yield "bytes", f"{after.num_bytes:,}"
    rates = (
        ("leased", books.granted - before.books.granted),
        ("trained", _num_trained(after) - _num_trained(before)),
        ("dropped", sum(books.dropped.values()) - sum(before.books.dropped.values())),
    )
    per_s = max(interval_s, 1e-3)
    yield "rates", ", ".join(f"{count / per_s:.1f} {name}/s" for name, count in rates)
    if after.refused:
        yield "refused", ", ".join(f"{reason} {count}" for reason, count in after.refused.items())


def _admission(stats: BufferStats) -> str:
    if stats.finished:
        return "the run has ended"
    if stats.draining:
        return "draining"
    if not stats.books.learner_term:
        return "no learner attached"
    return f"learner {stats.books.learner_term} attached"


def _num_trained(stats: BufferStats) -> int:
    return stats.books.trained + stats.books.acknowledged


_BOOKS_S = 5.0


def books(arguments: argparse.Namespace) -> int:
    config = configuration(arguments).config
    if config.buffer.binds_url:
        raise ConfigError(
            f"buffer.url: was {config.buffer.url!r}: the run is in its folder; to start anew, "
            "streamrl launch --new moves it aside"
        )
    require("buffer.url: redis://", "redis")
    asyncio.run(_forget(config) if arguments.forget else _require_none(config))
    return 0


async def _require_none(config: RunConfig) -> None:
    from buffers.redis.journal_storage import read_snapshot

    deadline_s = _deadline_s(config)
    url, run = config.buffer.secret_url, config.run.name
    snapshot = await read_snapshot(url, run, deadline_s=deadline_s)
    require_new_run(config, snapshot.learner_term, snapshot.version)


async def _forget(config: RunConfig) -> None:
    from buffers.redis.journal_storage import forget
    from buffers.redis.leadership import served_at

    url, run, deadline_s = config.buffer.secret_url, config.run.name, _deadline_s(config)
    if (server := await served_at(url, run, deadline_s=deadline_s)) is not None:
        raise ConfigError(
            f"run.name: a buffer daemon serves a run {run} at {server}, or did until a moment ago: "
            "choose another run.name, or stop it and try again"
        )
    await forget(url, run, deadline_s=deadline_s)


def _deadline_s(config: RunConfig) -> float:
    """A person waits: a server that does not run is reported, not waited for."""
    return min(config.buffer.deadline_s, _BOOKS_S)
