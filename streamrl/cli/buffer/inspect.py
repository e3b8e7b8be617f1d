"""`streamrl buffer inspect`: what a running buffer holds, and for which generators.

Exit code 1 if its books do not close.
"""

import argparse
import asyncio
from collections.abc import Iterator

from rich.console import Console

from streamrl.cli.buffer.target import open_running
from streamrl.cli.display.generators import print_generators
from streamrl.cli.display.numbers import books_rows
from streamrl.types import BufferStats


def main(arguments: argparse.Namespace) -> int:
    before, after = asyncio.run(_read_twice(arguments.target, arguments.interval))
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


async def _read_twice(target: str, interval_s: float) -> tuple[BufferStats, BufferStats]:
    async with open_running(target) as buffer:
        before = await buffer.stats()
        await asyncio.sleep(interval_s)
        return before, await buffer.stats()


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
