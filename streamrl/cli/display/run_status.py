"""What is known of a run at one moment, what is wrong with it first; as lines, and for programs.

Reads the buffer and the run's folder (`metrics.jsonl`, `learner.json`), whichever of the two there
is: a URL has no folder, and the folder may be on another machine. Waits a few seconds for the
buffer and for nothing else; of a run that has finished it reads the folder alone.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from rich.text import Text

from streamrl.cli.buffer.target import read_folder, read_stats, require_url
from streamrl.cli.display.numbers import (
    RECENT,
    Lines,
    balance,
    books_rows,
    numbers_of,
    remaining,
    remaining_texts,
    reward_text,
    training_reward,
    wait_shares,
)
from streamrl.cli.display.summary import held_out_curve, held_out_rows, validation_text
from streamrl.config import RunConfig
from streamrl.config.run import RunSettings
from streamrl.diagnosis import Reading, diagnose, pending
from streamrl.diagnosis.causes import failed_groups, lasting_wait
from streamrl.diagnosis.outcome import RunState, age, outcome, state_of
from streamrl.diagnosis.presence import may_move
from streamrl.diagnosis.reading import HEARTBEAT_TIMEOUT_S
from streamrl.diagnosis.scaling import ScalingHint, scaling_hint
from streamrl.run_folder import find_config, read_books, read_mirror, resume_command
from streamrl.samples.record import printable
from streamrl.tracking.jsonl import METRICS_FILE, read_newest
from streamrl.types import Books, BufferStats, LearnerStatus, replace


@dataclass(frozen=True)
class RunStatus:
    """What is known of the run; `lines` are the newest ones of its metrics, `books` what a buffer
    that has ended wrote, and `config` is None of a URL."""

    name: str
    reading: Reading
    lines: Lines
    books: Books | None = None
    config: RunConfig | None = None

    @property
    def last_line(self) -> Mapping[str, Any]:
        return self.lines[-1] if self.lines else {}

    @property
    def remaining(self) -> Mapping[str, float]:
        """See `remaining`; of a run that goes on."""
        if self.config is None or not self._is_current or state_of(self.reading).has_ended:
            return {}
        run, checkpoint = self.config.run, self.config.learner.checkpoint
        return remaining(self.lines, run.max_steps, checkpoint.every)

    @property
    def scaling(self) -> ScalingHint | None:
        """Of the last step, if it was measured, and the run goes on like that or has ended."""
        return scaling_hint(self.last_line) if self._is_current else None

    @property
    def _is_current(self) -> bool:
        """Whether the last step tells how the run goes: it stands still if none has followed for
        much longer than a step takes."""
        if state_of(self.reading).has_ended:
            return True
        longest_s = HEARTBEAT_TIMEOUT_S + 3 * (self.last_line.get("learner/step_s") or 0.0)
        return (self.reading.idle_s or 0.0) <= longest_s and may_move(self.reading)


def texts(status: RunStatus) -> Iterator[Text]:
    """The lines of a status: where the run is, what is wrong with it, what its parts do."""
    reading = status.reading
    yield Text(printable(headline(status)), style="bold")
    for finding in diagnose(reading):
        yield Text(printable(f"! {finding.sentence}"), style="red")
    for absence in pending(reading):
        yield Text(printable(f"{waiting_as(reading)}: {absence.sentence}"), style="yellow")
    if is_healthy(reading):
        yield Text(printable(verdict(status)), style="green")
    for name, value in rows(status):
        yield Text(printable(f"{name:<8} {value}"))


async def read_status(target: str) -> RunStatus:
    """Everything that can be read; a buffer that does not answer is part of the reading.

    Raises:
        ConfigError: the target names no run.
    """
    if "://" in target:
        require_url(target)
        return await status_at(target)
    return await status_of(find_config(target))


async def status_at(url: str) -> RunStatus:
    """Of the run of the buffer at this URL."""
    stats, unreachable = await read_stats(url)
    reading = Reading(stall_s=RunSettings().stall_s, stats=stats, unreachable=unreachable)
    return RunStatus(url, reading, ())


async def status_of(config: RunConfig) -> RunStatus:
    """Of the run of this configuration, from its folder and its buffer."""
    reading = read_folder(config)
    lines = [numbers_of(line) for line in read_newest(config.run.path / METRICS_FILE, RECENT)]
    if lines and "time_s" in lines[-1]:
        reading = replace(reading, idle_s=max(0.0, time.time() - lines[-1]["time_s"]))
    if state_of(reading) is not RunState.FINISHED:
        stats, unreachable = await read_stats(config)
        reading = replace(reading, stats=stats, unreachable=unreachable)
    return RunStatus(config.run.name, reading, lines, read_books(config.run.path), config)


def is_healthy(reading: Reading) -> bool:
    """Whether what the run needs is there and nothing is wrong, or it has ended in order."""
    return not (diagnose(reading) or pending(reading))


def waiting_as(reading: Reading) -> str:
    """What a run does while something that it needs is not there yet."""
    return "starting" if state_of(reading) is RunState.STARTING else "waiting"


def verdict(status: RunStatus) -> str:
    """That of a run in which nothing is wrong."""
    state = state_of(status.reading)
    if state is RunState.STOPPED and status.config is not None:
        remedy = resume_command(status.config.run.path)
        return f"{outcome(status.reading)}; {remedy} goes on with it"
    return outcome(status.reading) or ("starting" if state is RunState.STARTING else "healthy")


def headline(status: RunStatus) -> str:
    """Where the run is, in one line."""
    reading, last = status.reading, status.last_line
    of = "" if reading.max_steps is None else f" of {reading.max_steps}"
    parts = [f"step {last['step']}{of}"] if last else []
    if not last and reading.stats is not None:
        parts.append(f"version {reading.stats.policy_version}{of}")
    if reward := reward_text(status.lines):
        parts.append(reward)
    if reading.idle_s is not None:
        parts.append(f"last step {age(reading.idle_s)} ago")
    parts += remaining_texts(status.remaining)
    return f"{status.name}: {', '.join(parts) or 'no step yet'}"


def rows(status: RunStatus) -> Iterator[tuple[str, str]]:
    """What buffer and learner do, as far as it is known."""
    stats, learner = status.reading.stats, status.reading.learner
    yield "buffer", _ended_buffer_row(status) if stats is None else _buffer_row(stats)
    if learner is not None:
        yield "learner", _learner_row(learner, status)
        behind = f"; no answer yet from {', '.join(learner.behind)}" if learner.behind else ""
        sent = f"version {learner.policy_version} for {learner.num_receivers} receivers"
        yield "weights", sent + behind + (f"; {learner.stored}" if learner.stored else "")
        # Beside what the learner does itself: it saves a checkpoint meanwhile.
        if learner.validating and status.reading.is_learner_reporting:
            yield "held-out", learner.validating
    elif stats is not None and stats.books.learner_term:
        yield (
            "learner",
            f"number {stats.books.learner_term} attached, at version {stats.policy_version}",
        )
    if (failures := failures_of(status.reading)) and not _is_finding(status.reading, failures):
        yield "failed", failures
    if status.config is not None:
        config = status.config
        for name, held_out in held_out_rows(config.run.path, validation_text(config)):
            yield "held-out", f"{name.removeprefix('held-out ')} {held_out}"
        if config.run.folder_mirror:
            yield "mirror", _mirror_row(config)
    waiting = waits_for(status.reading)
    if waiting and not status.reading.is_stalled:
        yield "waiting", waiting
    if learner is not None:
        yield from (("learning", sign) for sign in learner.signs)
    if (hint := status.scaling) is not None:
        yield "scaling", hint.sentence


def as_json(status: RunStatus) -> dict[str, Any]:
    """The same for programs; `buffer` and `learner` are null if nothing is known of them."""
    reading, config = status.reading, status.config
    findings = diagnose(reading)
    return {
        "run": status.name,
        "state": state_of(reading),
        "healthy": is_healthy(reading),
        "findings": msgspec.to_builtins(findings),
        "pending": msgspec.to_builtins(pending(reading)),
        "step": status.last_line.get("step"),
        "max_steps": reading.max_steps,
        "failures": failures_of(reading),
        "learning": [] if reading.learner is None else list(reading.learner.signs),
        "training_reward": training_reward(status.lines),
        "held_out": {} if config is None else held_out_curve(config),
        "remaining_s": status.remaining,
        "last_step_s": reading.idle_s,
        "waited_s": reading.waited_s,
        "waits_for": waits_for(reading),
        "stall_s": reading.stall_s,
        "buffer": msgspec.to_builtins(reading.stats, str_keys=True),
        "learner": msgspec.to_builtins(reading.learner, str_keys=True),
        "mirror": msgspec.to_builtins(None if config is None else read_mirror(config.run.path)),
        "scaling": msgspec.to_builtins(status.scaling),
    }


def _buffer_row(stats: BufferStats) -> str:
    books = stats.books
    return (
        f"{books.leased} leased, {books.buffered} buffered, {books.taken} taken, at most "
        f"{stats.capacity}; {balance(books)}"
    )


def _ended_buffer_row(status: RunStatus) -> str:
    if not state_of(status.reading).has_ended or status.books is None:
        return "does not answer"
    return "; ".join(value for _, value in books_rows(status.books))


def _learner_row(learner: LearnerStatus, status: RunStatus) -> str:
    reading = status.reading
    if not reading.is_learner_reporting:
        return f"{learner.activity}, {age(reading.learner_age_s)} ago"
    shares = f"; last step: {wait_shares([status.last_line])}" if status.last_line else ""
    return f"{learner.activity}, for {reading.waited_s:.1f} s{shares}"


def _mirror_row(config: RunConfig) -> str:
    mirror = read_mirror(config.run.path)
    if mirror is None:
        return f"{config.run.folder_mirror} has nothing of the run yet"
    since_s = None if mirror.whole_s is None else time.time() - mirror.whole_s
    whole = "not whole yet" if since_s is None else f"whole {age(since_s)} ago"
    return f"{mirror.url} {whole}" + (f"; {mirror.failure}" if mirror.failure else "")


def failures_of(reading: Reading) -> str:
    """The sentence about groups that failed; that of the learner once the buffer is gone."""
    if reading.stats is not None:
        return failed_groups(reading.stats)
    return "" if reading.learner is None else reading.learner.failures


def _is_finding(reading: Reading, sentence: str) -> bool:
    return any(finding.sentence == sentence for finding in diagnose(reading))


def waits_for(reading: Reading) -> str:
    """The group that the run waits for; "" if it waits for none."""
    return "" if reading.stats is None or reading.is_over else lasting_wait(reading.stats)
