"""`streamrl status`: one screen of a run, what is wrong with it first.

    0  nothing is wrong        1  something is: it stands first, a sentence a cause
    2  the target names no run

Asks the buffer and reads the run's folder (`metrics.jsonl`, `learner.json`), whatever of the two
there is: with a URL there is no folder, on another machine the folder may be elsewhere. Waits a few
seconds for the buffer and for nothing else.
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

from buffers.connect import connect
from buffers.try_stats import try_stats
from streamrl.cli.buffer import connected
from streamrl.cli.view import books_rows
from streamrl.config import RunConfig, load_config
from streamrl.config.run import RunSettings
from streamrl.diagnosis import Reading, diagnose
from streamrl.run_folder import LEARNER_FILE, config_of, read_json
from streamrl.tracking.jsonl import read_last
from streamrl.types import BufferStats, GeneratorStatus, LearnerStatus


@dataclass(frozen=True)
class Sight:
    """What could be seen of the run; `last` is the newest line of its metrics, or {}."""

    name: str
    reading: Reading
    last: Mapping[str, Any]
    max_steps: int | None = None


def main(arguments: argparse.Namespace) -> int:
    sight = asyncio.run(look(arguments.target))
    findings = diagnose(sight.reading)
    if arguments.json:
        print(json.dumps(as_json(sight)))
    else:
        console = Console(soft_wrap=True, highlight=False)
        console.print(headline(sight), style="bold")
        for finding in findings:
            console.print(f"! {finding.sentence}", style="red")
        if not findings:
            console.print("healthy", style="green")
        for name, told in rows(sight):
            console.print(f"{name:<12} {told}")
    return 1 if findings else 0


async def look(target: str) -> Sight:
    """Everything at once; an absent part is left out, an absent buffer is in the reading."""
    config = _config_of(target)
    buffer = connected(target) if config is None else connect(config)
    try:
        stats, unreachable = await try_stats(buffer)
    finally:
        await buffer.close()
    run = RunSettings() if config is None else config.run
    last = {} if config is None else read_last(run.path / "metrics.jsonl")
    learner = None if config is None else _learner(run.path / LEARNER_FILE)
    now_s = time.time()
    reading = Reading(
        stall_s=run.stall_s,
        stats=stats,
        unreachable=unreachable,
        learner=learner,
        learner_age_s=0.0 if learner is None else max(0.0, now_s - learner.time_s),
        idle_s=max(0.0, now_s - last["time_s"]) if "time_s" in last else None,
    )
    if config is None:
        return Sight(target, reading, last)
    return Sight(run.name, reading, last, run.max_steps)


def headline(sight: Sight) -> str:
    """Where the run is, in one line."""
    reading, last = sight.reading, sight.last
    of = "" if sight.max_steps is None else f" of {sight.max_steps}"
    parts = [f"step {last['step']}{of}"] if last else []
    if not last and reading.stats is not None:
        parts.append(f"version {reading.stats.policy_version}{of}")
    if (reward := last.get("reward/mean")) is not None:
        parts.append(f"reward {reward:.3f}")
    if reading.idle_s is not None:
        parts.append(f"last step {reading.idle_s:.1f} s ago")
    return f"{sight.name}: {', '.join(parts) or 'no step yet'}"


def rows(sight: Sight) -> Iterator[tuple[str, str]]:
    """What each daemon does, as far as it is known."""
    stats, learner = sight.reading.stats, sight.reading.learner
    yield "buffer", "does not answer" if stats is None else _buffer_row(stats)
    if learner is not None:
        yield "learner", _learner_row(learner, sight.reading)
        told = f"version {learner.policy_version} for {learner.num_receivers} receivers"
        late = f"; no answer yet from {', '.join(learner.behind)}" if learner.behind else ""
        yield "weights", told + late
    elif stats is not None and stats.books.learner_term:
        yield (
            "learner",
            f"number {stats.books.learner_term} attached, at version {stats.policy_version}",
        )
    if stats is not None:
        for status, age_s in zip(stats.generators, stats.heartbeat_ages_s, strict=True):
            yield status.generator_id, _generator_row(status, age_s)


def as_json(sight: Sight) -> dict[str, Any]:
    """The same for programs; `buffer` and `learner` are null if nothing is known of them."""
    reading = sight.reading
    findings = diagnose(reading)
    return {
        "run": sight.name,
        "healthy": not findings,
        "findings": msgspec.to_builtins(findings),
        "step": sight.last.get("step"),
        "max_steps": sight.max_steps,
        "reward": sight.last.get("reward/mean"),
        "last_step_s": reading.idle_s,
        "waited_s": reading.waited_s,
        "stall_s": reading.stall_s,
        "buffer": msgspec.to_builtins(reading.stats, str_keys=True),
        "learner": msgspec.to_builtins(reading.learner, str_keys=True),
    }


def _config_of(target: str) -> RunConfig | None:
    """That of the run's folder, if it is there: a launch has put the ports into it."""
    if "://" in target:
        return None
    if Path(target).is_dir():
        return config_of(Path(target))
    config = load_config(target).config
    return config_of(config.run.path) if (config.run.path / "config.yaml").exists() else config


def _learner(path: Path) -> LearnerStatus | None:
    """Its last word; None also for one that another release wrote."""
    try:
        return msgspec.convert(read_json(path), LearnerStatus, str_keys=True)
    except msgspec.ValidationError:
        return None


def _buffer_row(stats: BufferStats) -> str:
    books = stats.books
    capacity = (stats.max_staleness + 1) * stats.groups_per_step
    account = {**msgspec.to_builtins(books, str_keys=True), "balanced": books.balanced}
    verdict = books_rows(account)[-1][1]
    return (
        f"{books.leased} leased, {books.buffered} buffered, {books.taken} taken, at most "
        f"{capacity}; {verdict}"
    )


def _learner_row(learner: LearnerStatus, reading: Reading) -> str:
    if not reading.hears_learner:
        return f"{learner.activity}, {reading.learner_age_s:.0f} s ago"
    return f"{learner.activity}, for {reading.waited_s:.1f} s"


def _generator_row(status: GeneratorStatus, age_s: float) -> str:
    oldest = f", oldest {max(status.lease_ages_s) + age_s:.1f} s" if status.lease_ages_s else ""
    return (
        f"version {status.policy_version}, leases {len(status.lease_ids)}{oldest}, samples "
        f"{status.num_active} prompts at {status.tokens_per_s:.0f} tokens/s, reported "
        f"{age_s:.1f} s ago"
    )
