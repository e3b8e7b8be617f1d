"""`streamrl status`: one screen about a run, problems first.

    0  nothing is wrong: the run works, has finished or was stopped, or something is not there yet,
       for no longer than a start takes
    1  something is wrong: a sentence for each cause
    2  the target names no run

`--follow` keeps showing it, like the live view of a launch, or prints lines; it waits for new
steps, and ends with 0 when the learner has ended, with 130 at Ctrl-C.

`--probe ROLE` is a probe of one daemon for Docker or Kubernetes: 0 if it is healthy. It imports no
torch, and waits for the buffer at most a few seconds. A generator is healthy if it has reported to
its buffer in time; a learner writes `learner.json` every second, whatever it computes.
"""

import argparse
import asyncio
import dataclasses
import json
import sys
import time
from collections import deque
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from streamrl.cli.buffer.target import find_target, read_folder, read_stats
from streamrl.cli.display.generators import generator_rows, generator_table, print_generators
from streamrl.cli.display.numbers import (
    RECENT,
    Lines,
    balance,
    books_rows,
    held_out_curve,
    held_out_rows,
    mean_of_last,
    numbers_of,
    remaining,
    remaining_texts,
    reward_text,
    training_reward,
    unsaved_rows,
    wait_shares,
)
from streamrl.cli.display.view import REFRESH_S, LinePrinter, means, screen
from streamrl.cli.processes.command import unless_signaled
from streamrl.config import RunConfig
from streamrl.config.loading.explain import RESOLVED_FILE
from streamrl.config.run import RunSettings
from streamrl.diagnosis import Reading, diagnose, pending
from streamrl.diagnosis.causes import failed_groups, lasting_wait, may_move
from streamrl.diagnosis.reading import HEARTBEAT_TIMEOUT_S, RunState, age, outcome, state_of
from streamrl.diagnosis.scaling import ScalingHint, scaling_hint
from streamrl.errors import ConfigError, StreamRLError
from streamrl.run_folder import (
    DATA_FILE,
    find_config,
    find_run,
    is_launched_since,
    read_books,
    read_evaluation,
    read_mirror,
    resume_command,
)
from streamrl.samples.record import printable
from streamrl.tracking.jsonl import METRICS_FILE, FollowedMetrics, read_newest
from streamrl.types import Books, BufferStats, LearnerActivity, LearnerStatus
from streamrl.types.ranges import named_after_host


@dataclass(frozen=True)
class RunStatus:
    """What is known of the run; `lines` are the newest lines of its metrics, `books` what a buffer
    wrote when it ended, and `config` is None if the target is a URL."""

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
        """Estimates of the remaining time; {} unless the run goes on."""
        if self.config is None or not self._is_current or state_of(self.reading).has_ended:
            return {}
        run, checkpoint = self.config.run, self.config.learner.checkpoint
        return remaining(self.lines, run.max_steps, checkpoint.every)

    @property
    def scaling(self) -> ScalingHint | None:
        """The hint from the last step, if it was measured and the run still goes on like that or
        has ended."""
        return scaling_hint(self.last_line) if self._is_current else None

    @property
    def _is_current(self) -> bool:
        """Whether the last step still shows how the run goes: not if no step has followed for much
        longer than a step takes."""
        if state_of(self.reading).has_ended:
            return True
        longest_s = HEARTBEAT_TIMEOUT_S + 3 * (self.last_line.get("learner/step_s") or 0.0)
        return (self.reading.idle_s or 0.0) <= longest_s and may_move(self.reading)


def texts(status: RunStatus, without: Container[str] = ()) -> Iterator[Text]:
    """The lines of a status: progress, problems, what its parts do; without the rows named in
    `without`."""
    reading = status.reading
    yield Text(printable(headline(status)), style="bold")
    for finding in diagnose(reading):
        yield Text(printable(f"! {finding.sentence}"), style="red")
    # What the run does while something that it needs is missing.
    waits = "starting" if state_of(reading) is RunState.STARTING else "waiting"
    for absence in pending(reading):
        yield Text(printable(f"{waits}: {absence.sentence}"), style="yellow")
    if is_healthy(reading):
        yield Text(printable(verdict(status)), style="green")
    for name, value in rows(status):
        if name not in without:
            yield Text(printable(f"{name:<8} {value}"))


async def read_status(found: RunConfig | str) -> RunStatus:
    """Read folder and buffer; that a buffer does not answer is part of the reading."""
    if isinstance(found, str):
        stats, unreachable = await read_stats(found)
        reading = Reading(stall_s=RunSettings().stall_s, stats=stats, unreachable=unreachable)
        return RunStatus(found, reading, ())
    reading, run = read_folder(found), found.run
    lines = [numbers_of(line) for line in read_newest(run.path / METRICS_FILE, RECENT)]
    if lines and "time_s" in lines[-1]:
        idle_s = max(0.0, time.time() - lines[-1]["time_s"])
        reading = msgspec.structs.replace(reading, idle_s=idle_s)
    if state_of(reading) is not RunState.FINISHED:
        stats, unreachable = await read_stats(found)
        reading = msgspec.structs.replace(reading, stats=stats, unreachable=unreachable)
    return RunStatus(run.name, reading, lines, read_books(run.path), found)


def is_healthy(reading: Reading) -> bool:
    """Whether nothing is missing or wrong, or the run has ended in order."""
    return not (diagnose(reading) or pending(reading))


def verdict(status: RunStatus) -> str:
    """The verdict on a run in which nothing is wrong."""
    state = state_of(status.reading)
    learner = status.reading.learner
    is_done = state is RunState.FINISHED and learner is not None and not learner.ended_early
    if status.config is not None and (is_done or state is RunState.STOPPED):
        folder = status.config.run.path
        # Of daemons started one by one; the buffer of a launch is about to end.
        is_buffer_left = status.reading.stats is not None and not (folder / DATA_FILE).exists()
        by_hand = f"streamrl learner --config {folder / RESOLVED_FILE} --resume"
        remedy = by_hand if is_buffer_left else resume_command(folder)
        more = " --set run.max_steps=N" if is_done else ""
        return f"{outcome(status.reading)}; {remedy}{more} goes on with it"
    return outcome(status.reading) or ("starting" if state is RunState.STARTING else "healthy")


def headline(status: RunStatus) -> str:
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
    """Rows about what buffer and learner do, as far as known."""
    reading, config = status.reading, status.config
    stats, learner = reading.stats, reading.learner
    has_ended = state_of(reading).has_ended
    yield "buffer", _buffer_row(status)
    if learner is not None:
        yield "learner", _learner_row(learner, status)
        if not has_ended:
            yield "weights", _weights_row(learner)
        # A row of its own, since the learner may save a checkpoint meanwhile.
        if learner.validating and reading.is_learner_reporting:
            yield "held-out", learner.validating
    elif stats is not None and (term := stats.books.learner_term):
        yield "learner", f"number {term} attached, at version {stats.policy_version}"
    if recent := ", ".join(means(status.lines)):
        yield "steps", f"{mean_of_last(len(status.lines))}: {recent}"
    failures = failures_of(reading)
    if failures and failures not in (found.sentence for found in diagnose(reading)):
        yield "failed", failures
    if config is not None:
        for name, held_out in held_out_rows(config):
            yield "held-out", f"{name.removeprefix('held-out ')} {held_out}"
        if config.run.folder_mirror:
            yield "mirror", _mirror_row(config)
        if has_ended and status.lines:
            yield from unsaved_rows(config.run.path, status.last_line["step"])
    if (waiting := awaited_group(reading)) and not reading.is_stalled:
        yield "waiting", waiting
    if learner is not None:
        yield from (("learning", sign) for sign in learner.signs)
    if (hint := status.scaling) is not None:
        yield "scaling", hint.sentence


def as_json(status: RunStatus) -> dict[str, Any]:
    """The status for programs; `buffer` and `learner` are null if nothing is known of them."""
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
        "evaluation": {} if config is None else read_evaluation(config.run.path),
        "remaining_s": status.remaining,
        "last_step_s": reading.idle_s,
        "waited_s": reading.waited_s,
        "waits_for": awaited_group(reading),
        "stall_s": reading.stall_s,
        "buffer": msgspec.to_builtins(reading.stats, str_keys=True),
        "learner": msgspec.to_builtins(reading.learner, str_keys=True),
        "mirror": msgspec.to_builtins(None if config is None else read_mirror(config.run.path)),
        "scaling": msgspec.to_builtins(status.scaling),
    }


def _buffer_row(status: RunStatus) -> str:
    stats = status.reading.stats
    if stats is not None:
        books, most = stats.books, stats.capacity
        held = f"{books.leased} leased, {books.buffered} buffered, {books.taken} taken"
        return f"{held}, at most {most}; {balance(books)}"
    if state_of(status.reading).has_ended and status.books is not None:
        return "; ".join(value for _, value in books_rows(status.books))
    return "does not answer"


def _learner_row(learner: LearnerStatus, status: RunStatus) -> str:
    reading = status.reading
    if state_of(reading) is RunState.STARTING:
        return "has not reported since the launch began"
    if learner.activity is LearnerActivity.ENDED or not reading.is_learner_reporting:
        return f"{learner.activity}, {age(reading.learner_age_s)} ago"
    shares = f"; last step: {wait_shares([status.last_line])}" if status.last_line else ""
    return f"{learner.activity}, for {reading.waited_s:.1f} s{shares}"


_NAMED = 8


def _weights_row(learner: LearnerStatus) -> str:
    number = learner.num_receivers
    sent = f"version {learner.policy_version} for {number} receiver{'s' if number != 1 else ''}"
    names = ", ".join(learner.behind[:_NAMED])
    more = f" and {len(learner.behind) - _NAMED} more" if learner.behind[_NAMED:] else ""
    behind = f"; no answer yet from {names}{more}" if names else ""
    return sent + behind + (f"; {learner.stored}" if learner.stored else "")


def _mirror_row(config: RunConfig) -> str:
    mirror = read_mirror(config.run.path)
    if mirror is None:
        return f"{config.run.folder_mirror} has nothing of the run yet"
    since_s = None if mirror.whole_s is None else time.time() - mirror.whole_s
    whole = "not whole yet" if since_s is None else f"whole {age(since_s)} ago"
    return f"{mirror.url} {whole}" + (f"; {mirror.failure}" if mirror.failure else "")


def failures_of(reading: Reading) -> str:
    """The sentence about failed groups; the learner's own once the buffer is gone."""
    if reading.stats is not None:
        return failed_groups(reading.stats)
    return "" if reading.learner is None else reading.learner.failures


def awaited_group(reading: Reading) -> str:
    """Return a sentence about the group that the run waits for; "" if it waits for none."""
    return "" if reading.stats is None or reading.is_over else lasting_wait(reading.stats)


_WIDE = 120
_SHARES_S = 10.0


def main(arguments: argparse.Namespace) -> int:
    if arguments.lines and not arguments.follow:
        raise ConfigError("--lines: is for --follow")
    if arguments.probe is not None:
        _require_folder(arguments.target, "--probe")
        config = find_config(arguments.target)
        fault = asyncio.run(_fault(config, arguments.probe, arguments.id))
        print(fault or "healthy")
        return 1 if fault else 0
    if not arguments.follow:
        status = asyncio.run(read_status(find_target(arguments.target)))
        return _print(status, as_record=arguments.json)
    if arguments.lines or not sys.stdout.isatty():
        _require_folder(arguments.target, "--follow in lines")
        return _print_lines(arguments.target)
    following = _follow(_Followed(arguments.target), arguments.interval)
    asyncio.run(unless_signaled(following))
    return 0


def _require_folder(target: str, option: str) -> None:
    if "://" in target:
        raise ConfigError(f"{target}: {option} reads a run's folder: give that, or its config.yaml")


def _print(status: RunStatus, *, as_record: bool) -> int:
    if as_record:
        print(json.dumps(as_json(status)))
    else:
        console = Console(soft_wrap=True, highlight=False, markup=False, emoji=False)
        for text in texts(status):
            console.print(text)
        if status.reading.stats is not None and status.reading.stats.generators:
            print_generators(status.reading.stats)
    return 1 if diagnose(status.reading) else 0


def _print_lines(target: str) -> int:
    """Print lines until the run has ended. Waits for new lines in metrics.jsonl, which another
    machine may write."""
    console, read_s = Console(highlight=False), time.time()
    config = find_run(target)
    printer = LinePrinter(config, console)
    while not _has_ended(read_folder(config)):
        printer.print_if_due()
        time.sleep(REFRESH_S)
        if is_launched_since(config.run.path, read_s):
            config, read_s = find_run(target), time.time()
            printer = LinePrinter(config, console)
    printer.print_now()
    console.print(outcome(read_folder(config)))
    return 0


async def _follow(followed: "_Followed", interval_s: float) -> None:
    """Show the live screen. Waits for the end of the run; the last screen stays."""
    with Live(console=Console(highlight=False), auto_refresh=False) as live:
        while True:
            live.update(await followed.draw(live.console.width), refresh=True)
            if followed.has_ended:
                return
            await asyncio.sleep(interval_s)


class _Followed:
    """A run that is read repeatedly. Invariant: a reading costs only what the run has written since
    the last one, and waits at most a few seconds for the buffer. The configuration is that of the
    newest launch.

    Raises:
        ConfigError: the target names no run.
    """

    def __init__(self, target: str) -> None:
        self.has_ended = False
        self._target, self._read_s = target, time.time()
        self._found = found = find_target(target)
        folder = None if isinstance(found, str) else found.run.path
        self._metrics = folder and FollowedMetrics(folder / METRICS_FILE)
        self._earlier: deque[tuple[float, BufferStats]] = deque()

    async def draw(self, width: int) -> RenderableType:
        """Draw the screen; if the run can no longer be read, show the error."""
        lines = [numbers_of(line) for line in self._metrics.read()] if self._metrics else []
        lines = [line for line in lines if isinstance(line.get("step"), int)]
        try:
            found = self._newest_launch()
            status = await read_status(found)
        except (StreamRLError, OSError) as error:
            return Text(str(error), style="red")
        if lines:
            status = dataclasses.replace(status, lines=lines[-RECENT:])
        self.has_ended = _has_ended(status.reading)
        table = self._generators(status.reading.stats, width)
        if isinstance(found, str):
            return Group(*texts(status), table)
        # The lower part of the screen shows them with the training reward.
        said = texts(status, without=("held-out", "steps"))
        return screen(said, found, lines, table)

    def _newest_launch(self) -> RunConfig | str:
        found = self._found
        if not isinstance(found, str) and is_launched_since(found.run.path, self._read_s):
            self._found, self._read_s = find_target(self._target), time.time()
        return self._found

    def _generators(self, stats: BufferStats | None, width: int) -> RenderableType:
        """The table of generators; `busy` covers about the last _SHARES_S."""
        if stats is None or not stats.generators:
            return Group()
        now_s = time.monotonic()
        self._earlier.append((now_s, stats))
        while len(self._earlier) > 1 and now_s - self._earlier[1][0] >= _SHARES_S:
            self._earlier.popleft()
        rows = generator_rows(stats, self._earlier[0][1])
        return generator_table(rows, is_narrow=width < _WIDE)


def _has_ended(reading: Reading) -> bool:
    """Whether the learner of the newest launch reports the end; one that only fell silent may be
    restarted."""
    is_finished = state_of(reading) is RunState.FINISHED
    return reading.is_over and (is_finished or not reading.is_relaunched)


async def _fault(config: RunConfig, role: str, given: str | None) -> str:
    """What is wrong with a daemon, as a sentence; "" if nothing is.

    Raises:
        ConfigError: no id is given for a generator.
    """
    if role == "learner":
        reading = read_folder(config)
        if reading.learner is None:
            return f"no learner has reported in {config.run.path}"
        silent = f"the learner last reported {reading.learner_age_s:.0f} s ago"
        return "" if reading.is_learner_reporting else silent
    if role == "generator" and given is None:
        raise ConfigError("--id: is required for a generator and was not given")
    stats, fault = await read_stats(config)
    if stats is None or role == "buffer":
        return fault
    return _of_generator(stats, named_after_host(str(given)))


def _of_generator(stats: BufferStats, generator_id: str) -> str:
    states = {row.id: row.state for row in generator_rows(stats)}
    if generator_id not in states:
        return f"{generator_id} does not report to the buffer"
    return f"{generator_id} is silent" if "silent" in states[generator_id] else ""
