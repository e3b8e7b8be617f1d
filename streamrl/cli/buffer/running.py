"""Commands that ask a running buffer, whatever its backend: `streamrl generators` with its verbs,
`buffer inspect` and `buffer drain`; and `buffer books`, which says whether Redis still has a run;
`streamrl launch` runs it before a new run of that name.

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
from typing import TypeAlias

import msgspec

from streamrl.checkpoints.find import require_new_run
from streamrl.cli.buffer.target import find_target, open_running, read_folder
from streamrl.cli.display.generators import generator_rows, print_generators
from streamrl.cli.display.numbers import books_rows
from streamrl.config import RunConfig
from streamrl.config.loading.explain import RESOLVED_FILE
from streamrl.config.loading.load import configuration
from streamrl.errors import ConfigError
from streamrl.extras import require
from streamrl.interfaces import TrajectoryBuffer
from streamrl.types import BufferStats, SchedulingState

_POLL_S, _BOOKS_S = 0.5, 5.0
Progress: TypeAlias = tuple[str, int | None]
"""The progress of a drain: how it ended and the exit code, or what it waits for and None."""


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
    """Drain a generator. Waits until it has left or no longer reports, another command changes its
    scheduling state, or the deadline is over."""
    generator_id = arguments.id
    async with open_running(arguments.target) as buffer:
        await buffer.set_scheduling_state(generator_id, SchedulingState.DRAINING)
        session = _session(await buffer.stats(), generator_id)

        async def read() -> Progress:
            return _generator_progress(await buffer.stats(), generator_id, session)

        return await _wait_until_drained(read, arguments.deadline)


def _generator_progress(stats: BufferStats, generator_id: str, session: str | None) -> Progress:
    """`session` belongs to the process that should leave; another session means that it was
    replaced."""
    current = _session(stats, generator_id)
    is_drained_still = generator_id in stats.scheduling_states
    if current is None or (current != session and not is_drained_still):
        return f"{generator_id} has left", 0
    if not is_drained_still:
        return f"the drain of {generator_id} was undone", 1
    row = next(row for row in generator_rows(stats) if row.id == generator_id)
    return f"{generator_id}: {row.state}, {row.num_leases} leases", None


def _session(stats: BufferStats, generator_id: str) -> str | None:
    sessions = (s.session for s in stats.generators if s.generator_id == generator_id)
    return next(sessions, None)


async def _wait_until_drained(read: Callable[[], Awaitable[Progress]], deadline_s: float) -> int:
    """Read until the drain has ended; return its exit code.

    Waits at most `deadline_s`; prints what the drain waits for whenever that changes.
    """
    deadline, printed = time.monotonic() + deadline_s, ""
    while True:
        sentence, code = await read()
        if code is not None:
            print(sentence)
            return code
        if time.monotonic() >= deadline:
            print(f"not drained within {deadline_s:g} s: {sentence}")
            return 1
        if sentence != printed:
            printed = sentence
            print(f"waiting for {printed}")
        await asyncio.sleep(_POLL_S)


async def drain(arguments: argparse.Namespace) -> int:
    found = find_target(arguments.target)
    async with open_running(arguments.target) as buffer:
        return await _wait_until_drained(lambda: _request(buffer, found), arguments.deadline)


async def _request(buffer: TrajectoryBuffer, found: RunConfig | str) -> Progress:
    """Request the drain and read its progress. Each reading requests it again, since a learner that
    attaches ends it."""
    await buffer.drain()
    stats = await buffer.stats()
    books = stats.books
    if stats.books.in_flight == 0 or (stats.finished and books.leased == 0):
        kept = "every group is trained or dropped, and none is kept"
        if books.trained:
            kept = f"{books.trained} trained groups are kept until the learner's next checkpoint"
        return f"drained at version {stats.policy_version}: {kept}", 0
    if isinstance(found, RunConfig) and books.leased == 0:
        reading = read_folder(found)
        if reading.is_over and not reading.is_relaunched:
            return (
                f"{stats.books.in_flight} groups wait and no learner takes them: start one with "
                f"`streamrl learner --config {found.run.path / RESOLVED_FILE} --resume`"
            ), 1
    holders = ", ".join(f"{s.generator_id} {len(s.lease_ids)}" for s in stats.generators)
    return (
        f"{books.leased} leased ({holders or 'no generator reports'}), {books.buffered} buffered "
        f"and {books.taken} taken (the learner, at version {stats.policy_version})"
    ), None


async def inspect(arguments: argparse.Namespace) -> int:
    async with open_running(arguments.target) as buffer:
        before = await buffer.stats()
        await asyncio.sleep(arguments.interval)
        after = await buffer.stats()
    for name, value in _rows(before, after, arguments.interval):
        print(f"{name:<10}{value}")
    print_generators(after)
    return 0 if after.books.balanced else 1


def _rows(before: BufferStats, after: BufferStats, interval_s: float) -> Iterator[tuple[str, str]]:
    """Name and value of each line; rates are those between two readings."""
    books, earlier = after.books, before.books
    yield "version", f"{after.policy_version} (incarnation {after.incarnation[:12]})"
    yield (
        "in flight",
        f"{after.books.in_flight} groups, at most {after.capacity}; {_admission(after)}",
    )
    yield from books_rows(books)
    if after.oldest_version is not None:
        behind = after.policy_version - after.oldest_version
        yield "oldest", f"version {after.oldest_version}, {behind} behind the learner"
    yield "bytes", f"{after.num_bytes:,}"
    trained, trained_before = (of.trained + of.acknowledged for of in (books, earlier))
    rates = (
        ("leased", books.granted - earlier.granted),
        ("trained", trained - trained_before),
        ("dropped", sum(books.dropped.values()) - sum(earlier.dropped.values())),
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


async def books(arguments: argparse.Namespace) -> int:
    config = configuration(arguments).config
    if config.buffer.binds_url:
        raise ConfigError(
            f"buffer.url: was {config.buffer.url!r}: the run is in its folder; to start anew, "
            "streamrl launch --new moves it aside"
        )
    require("buffer.url: redis://", "redis")
    from buffers.redis.journal_storage import forget, read_snapshot
    from buffers.redis.leadership import served_at

    url, run = config.buffer.secret_url, config.run.name
    # A person is waiting, so a server that is not running is reported, not waited for.
    deadline_s = min(config.buffer.deadline_s, _BOOKS_S)
    if arguments.require_none:
        snapshot = await read_snapshot(url, run, deadline_s=deadline_s)
        require_new_run(config, snapshot.learner_term, snapshot.version)
        return 0
    if (server := await served_at(url, run, deadline_s=deadline_s)) is not None:
        raise ConfigError(
            f"run.name: a buffer daemon serves a run {run} at {server}, or did until a moment ago: "
            "choose another run.name, or stop it and try again"
        )
    await forget(url, run, deadline_s=deadline_s)
    return 0
