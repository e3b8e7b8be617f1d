"""What a person asks of a running buffer: `streamrl buffer inspect` and `streamrl buffer drain`.

Reads through the client's `stats`, so it works for every backend, and never attaches: a learner is
not fenced by being watched.
"""

import argparse
import asyncio
import time
from collections.abc import Iterator

import msgspec
from rich.console import Console
from rich.table import Table

from buffers.connect import connect
from buffers.zmq.client import ZmqBuffer
from streamrl.cli.view import books_rows
from streamrl.config import load_config
from streamrl.errors import ConfigError
from streamrl.interfaces import TrajectoryBuffer
from streamrl.types import BufferStats, GeneratorStatus

_ANSWER_S = 10.0
_POLL_S = 0.5


def inspect(arguments: argparse.Namespace) -> int:
    before, after = asyncio.run(_read_twice(arguments.target, arguments.interval))
    console = Console(soft_wrap=True)
    for name, value in inspect_rows(before, after, arguments.interval):
        console.print(f"{name:<9}{value}", highlight=False)
    console.print(lease_table(after))
    return 0 if after.books.balanced else 1


def drain(arguments: argparse.Namespace) -> int:
    return asyncio.run(_drain(arguments.target, arguments.deadline, Console(soft_wrap=True)))


def inspect_rows(
    before: BufferStats, after: BufferStats, interval_s: float
) -> Iterator[tuple[str, str]]:
    """Name and value of each line; rates are those between the two readings."""
    books = after.books
    yield "version", f"{after.policy_version} (incarnation {after.incarnation[:12]})"
    yield "line", f"{in_line(after)} groups, at most {_capacity(after)}; {_admission(after)}"
    account = msgspec.to_builtins(books, str_keys=True)
    yield from books_rows({**account, "balanced": books.balanced})
    if after.oldest_version is not None:
        behind = after.policy_version - after.oldest_version
        yield "oldest", f"version {after.oldest_version} waits, {behind} behind the learner"
    yield "bytes", f"{after.num_bytes:,}"
    rates = (
        ("leased", books.granted - before.books.granted),
        ("trained", _num_trained(after) - _num_trained(before)),
        ("dropped", sum(books.dropped.values()) - sum(before.books.dropped.values())),
    )
    per_s = max(interval_s, 1e-3)
    yield "rates", ", ".join(f"{count / per_s:.1f} {name}/s" for name, count in rates)
    if after.refused:
        told = ", ".join(f"{reason} {count}" for reason, count in after.refused.items())
        yield "refused", told


def lease_table(stats: BufferStats) -> Table:
    """A row a generator: what it holds and for how long, as of its last heartbeat."""
    table = Table(box=None, pad_edge=False)
    table.add_column("generator")
    for column in ("version", "leases", "oldest lease", "active", "tokens/s"):
        table.add_column(column, justify="right")
    for status in stats.generators:
        table.add_row(*_cells(status))
    reported = sum(len(status.lease_ids) for status in stats.generators)
    if stats.books.leased > reported:
        table.add_row("(not reported yet)", "", str(stats.books.leased - reported))
    return table


def in_line(stats: BufferStats) -> int:
    """Groups that are still to be trained or dropped."""
    return stats.books.leased + stats.books.buffered + stats.books.taken


def waiting_for(stats: BufferStats) -> str:
    """Who holds what is in line."""
    books = stats.books
    holders = ", ".join(f"{s.generator_id} {len(s.lease_ids)}" for s in stats.generators)
    return (
        f"{books.leased} leased ({holders or 'no generator reports'}), {books.buffered} buffered "
        f"and {books.taken} taken (the learner, at version {stats.policy_version})"
    )


async def _read_twice(target: str, interval_s: float) -> tuple[BufferStats, BufferStats]:
    buffer = connected(target)
    try:
        before = await buffer.stats()
        await asyncio.sleep(interval_s)
        return before, await buffer.stats()
    finally:
        await buffer.close()


async def _drain(target: str, deadline_s: float, console: Console) -> int:
    """Asks again and again, since a learner that attaches lifts a drain.

    Waits for the line to be trained or dropped; unblocked by that, the run's end or the deadline.
    """
    buffer = connected(target)
    deadline, told = time.monotonic() + deadline_s, ""
    try:
        while True:
            await buffer.drain()
            stats = await buffer.stats()
            if in_line(stats) == 0 or (stats.finished and stats.books.leased == 0):
                console.print(f"drained at version {stats.policy_version}: {_rest(stats)}")
                return 0
            if time.monotonic() >= deadline:
                console.print(f"not drained within {deadline_s:g} s: {waiting_for(stats)}")
                return 1
            if waiting_for(stats) != told:
                told = waiting_for(stats)
                console.print(f"waiting for {told}")
            await asyncio.sleep(_POLL_S)
    finally:
        await buffer.close()


def connected(target: str) -> TrajectoryBuffer:
    """By the run's configuration, or by the address of a server of one run."""
    if "://" not in target:
        return connect(load_config(target).config)
    if not target.startswith("zmq://"):
        raise ConfigError(
            f"{target} names no run: give the configuration, such as runs/NAME/config.yaml"
        )
    return ZmqBuffer(target, deadline_s=_ANSWER_S)


def _rest(stats: BufferStats) -> str:
    if stats.books.trained:
        return f"{stats.books.trained} trained groups are kept until the learner's next checkpoint"
    return "everything is trained or dropped, and nothing is kept"


def _admission(stats: BufferStats) -> str:
    if stats.finished:
        return "the run is over"
    if stats.draining:
        return "draining"
    return (
        "no learner yet"
        if not stats.books.learner_term
        else f"learner {stats.books.learner_term} attached"
    )


def _capacity(stats: BufferStats) -> int:
    return (stats.max_staleness + 1) * stats.groups_per_step


def _num_trained(stats: BufferStats) -> int:
    return stats.books.trained + stats.books.acknowledged


def _cells(status: GeneratorStatus) -> tuple[str, ...]:
    oldest = f"{max(status.lease_ages_s):.1f} s" if status.lease_ages_s else ""
    return (
        status.generator_id,
        str(status.policy_version),
        str(len(status.lease_ids)),
        oldest,
        str(status.num_active),
        f"{status.tokens_per_s:.0f}",
    )
