"""`streamrl status`: one screen of a run, what is wrong with it first.

    0  nothing is wrong        1  something is: a sentence for each cause
    2  the target names no run

Reads the buffer and the run's folder (`metrics.jsonl`, `learner.json`), whichever of the two there
is: a URL has no folder, and the folder may be on another machine. Waits a few seconds for the
buffer and for nothing else.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from buffers.try_stats import try_stats
from streamrl.cli.buffer.target import open_buffer
from streamrl.cli.display.books import balance
from streamrl.cli.display.generators import print_generators
from streamrl.cli.display.numbers import wait_shares
from streamrl.config import RunConfig, load_config
from streamrl.config.run import RunSettings
from streamrl.diagnosis import Reading, diagnose
from streamrl.diagnosis.due import lasting_wait
from streamrl.run_folder import config_of, read_learner
from streamrl.tracking.jsonl import read_last
from streamrl.types import BufferStats, LearnerStatus


@dataclass(frozen=True)
class RunStatus:
    """What is known of the run; `last_line` is the newest line of its metrics, or {}."""

    name: str
    reading: Reading
    last_line: Mapping[str, Any]
    max_steps: int | None = None


def main(arguments: argparse.Namespace) -> int:
    status = asyncio.run(read_status(arguments.target))
    findings = diagnose(status.reading)
    if arguments.json:
        print(json.dumps(as_json(status)))
        return 1 if findings else 0
    console = Console(soft_wrap=True, highlight=False)
    console.print(headline(status), style="bold")
    for finding in findings:
        console.print(f"! {finding.sentence}", style="red")
    if not findings:
        console.print("healthy", style="green")
    for name, value in rows(status):
        console.print(f"{name:<8} {value}")
    if status.reading.stats is not None and status.reading.stats.generators:
        print_generators(status.reading.stats)
    return 1 if findings else 0


async def read_status(target: str) -> RunStatus:
    """Everything that can be read; a buffer that does not answer is part of the reading.

    Raises:
        ConfigError: the target names no run.
    """
    config = _config_of(target)
    async with open_buffer(target if config is None else config) as buffer:
        stats, unreachable = await try_stats(buffer)
    run = RunSettings() if config is None else config.run
    last_line = {} if config is None else read_last(run.path / "metrics.jsonl")
    learner = None if config is None else read_learner(run.path)
    now_s = time.time()
    reading = Reading(
        stall_s=run.stall_s,
        stats=stats,
        unreachable=unreachable,
        learner=learner,
        learner_age_s=0.0 if learner is None else max(0.0, now_s - learner.time_s),
        idle_s=max(0.0, now_s - last_line["time_s"]) if "time_s" in last_line else None,
    )
    if config is None:
        return RunStatus(target, reading, last_line)
    return RunStatus(run.name, reading, last_line, run.max_steps)


def headline(status: RunStatus) -> str:
    """Where the run is, in one line."""
    reading, last = status.reading, status.last_line
    of = "" if status.max_steps is None else f" of {status.max_steps}"
    parts = [f"step {last['step']}{of}"] if last else []
    if not last and reading.stats is not None:
        parts.append(f"version {reading.stats.policy_version}{of}")
    if (reward := last.get("reward/mean")) is not None:
        parts.append(f"reward {reward:.3f}")
    if reading.idle_s is not None:
        parts.append(f"last step {reading.idle_s:.1f} s ago")
    return f"{status.name}: {', '.join(parts) or 'no step yet'}"


def rows(status: RunStatus) -> Iterator[tuple[str, str]]:
    """What buffer and learner do, as far as it is known."""
    stats, learner = status.reading.stats, status.reading.learner
    yield "buffer", "does not answer" if stats is None else _buffer_row(stats)
    if learner is not None:
        yield "learner", _learner_row(learner, status)
        behind = f"; no answer yet from {', '.join(learner.behind)}" if learner.behind else ""
        sent = f"version {learner.policy_version} for {learner.num_receivers} receivers"
        yield "weights", sent + behind
    elif stats is not None and stats.books.learner_term:
        yield (
            "learner",
            f"number {stats.books.learner_term} attached, at version {stats.policy_version}",
        )
    waits_for = _waits_for(status.reading)
    if waits_for and not status.reading.is_stalled:
        yield "waiting", waits_for


def as_json(status: RunStatus) -> dict[str, Any]:
    """The same for programs; `buffer` and `learner` are null if nothing is known of them."""
    reading = status.reading
    findings = diagnose(reading)
    return {
        "run": status.name,
        "healthy": not findings,
        "findings": msgspec.to_builtins(findings),
        "step": status.last_line.get("step"),
        "max_steps": status.max_steps,
        "reward": status.last_line.get("reward/mean"),
        "last_step_s": reading.idle_s,
        "waited_s": reading.waited_s,
        "waits_for": _waits_for(reading),
        "stall_s": reading.stall_s,
        "buffer": msgspec.to_builtins(reading.stats, str_keys=True),
        "learner": msgspec.to_builtins(reading.learner, str_keys=True),
    }


def _config_of(target: str) -> RunConfig | None:
    """That of the run's folder if it is there, since a launch writes the ports into it."""
    if "://" in target:
        return None
    if Path(target).is_dir():
        return config_of(Path(target))
    config = load_config(target).config
    return config_of(config.run.path) if (config.run.path / "config.yaml").exists() else config


def _buffer_row(stats: BufferStats) -> str:
    books = stats.books
    return (
        f"{books.leased} leased, {books.buffered} buffered, {books.taken} taken, at most "
        f"{stats.capacity}; {balance(books)}"
    )


def _learner_row(learner: LearnerStatus, status: RunStatus) -> str:
    reading = status.reading
    if not reading.is_learner_reporting:
        return f"{learner.activity}, {reading.learner_age_s:.0f} s ago"
    shares = f"; last step: {wait_shares([status.last_line])}" if status.last_line else ""
    return f"{learner.activity}, for {reading.waited_s:.1f} s{shares}"


def _waits_for(reading: Reading) -> str:
    """The group that the run waits for; "" if it waits for none."""
    return "" if reading.stats is None or reading.is_over else lasting_wait(reading.stats)
