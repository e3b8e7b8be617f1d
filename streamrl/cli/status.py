"""`streamrl status`: one screen of a run, what is wrong with it first.

    0  healthy: what the run needs is there, and nothing is wrong; or the run has finished or was
       stopped; or something is not there yet, for no longer than a start takes: a sentence for each
    1  something is wrong: a sentence for each cause
    2  the target names no run

`--follow` shows it again and again, as the live view of a launch, or prints lines; it waits for new
steps, and ends with 0 when the learner has ended, with 130 at Ctrl-C.

`--probe ROLE` is the probe of Docker, Kubernetes or a person for one daemon: 0 for a healthy one.
It says nothing of the others, imports no torch, and waits for the buffer a few seconds at most. A
buffer answers by itself; a generator is healthy if its buffer has heard from it in time; a learner
writes `learner.json` every second, whatever it computes.
"""

import argparse
import asyncio
import json
import signal
import sys
import time
from collections import deque
from dataclasses import replace

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from streamrl.cli.buffer.target import read_folder, read_stats, require_url
from streamrl.cli.display.generators import generator_rows, generator_table, print_generators
from streamrl.cli.display.numbers import RECENT, Lines, numbers_of
from streamrl.cli.display.run_status import (
    RunStatus,
    as_json,
    read_status,
    status_at,
    status_of,
    texts,
)
from streamrl.cli.display.view import REFRESH_S, LinePrinter, screen
from streamrl.config import RunConfig
from streamrl.diagnosis import Reading, diagnose
from streamrl.diagnosis.outcome import RunState, outcome, state_of
from streamrl.errors import ConfigError, Interrupted, StreamRLError
from streamrl.run_folder import find_config, find_run, is_launched_since
from streamrl.tracking.jsonl import FollowedMetrics
from streamrl.types import BufferStats
from streamrl.types.ranges import named_after_host

_ENDING = (signal.SIGTERM, signal.SIGHUP)
_WIDE = 120
_SHARES_S = 10.0


def main(arguments: argparse.Namespace) -> int:
    if arguments.lines and not arguments.follow:
        raise ConfigError("--lines: is for --follow")
    if arguments.probe is not None:
        _require_folder(arguments.target, "--probe")
        return _probe(arguments)
    if not arguments.follow:
        return _print(asyncio.run(read_status(arguments.target)), as_record=arguments.json)
    if arguments.lines or not sys.stdout.isatty():
        _require_folder(arguments.target, "--follow in lines")
        return _print_lines(arguments.target)
    asyncio.run(_follow(_Followed(arguments.target), arguments.interval))
    return 0


def _require_folder(target: str, option: str) -> None:
    """
    Raises:
        ConfigError: a URL is given.
    """
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
    """Waits for new lines in metrics.jsonl, also of a run that other machines write."""
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
    """Waits for the end of the run; the last screen stays.

    Raises:
        Interrupted: a signal ended it.
    """
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None, "a coroutine runs in a task"
    got: list[signal.Signals] = []

    def end(number: signal.Signals) -> None:
        got.append(number)
        task.cancel()

    for number in _ENDING:
        loop.add_signal_handler(number, end, number)
    try:
        with Live(console=Console(highlight=False), auto_refresh=False) as live:
            while True:
                live.update(await followed.draw(live.console.width), refresh=True)
                if followed.has_ended:
                    return
                await asyncio.sleep(interval_s)
    except asyncio.CancelledError:
        if got:
            raise Interrupted(got[0]) from None
        raise


class _Followed:
    """A run that is read again and again. Invariant: a reading costs what the run has written since
    the one before, and waits a few seconds for the buffer at most. Its configuration is that of its
    newest launch.

    Raises:
        ConfigError: the target names no run.
    """

    def __init__(self, target: str) -> None:
        self.has_ended = False
        self._url = target if "://" in target else ""
        if self._url:
            require_url(target)
        self._target, self._read_s = target, time.time()
        self._config = None if self._url else find_config(target)
        self._metrics = self._config and FollowedMetrics(self._config.run.path / "metrics.jsonl")
        self._earlier: deque[tuple[float, BufferStats]] = deque()

    async def draw(self, width: int) -> RenderableType:
        """The screen; a run that cannot be read any more is shown as that."""
        lines = self._lines()
        try:
            self._read_config()
            status = await self._read(lines)
        except (StreamRLError, OSError) as error:
            return Text(str(error), style="red")
        self.has_ended = _has_ended(status.reading)
        table = self._generators(status.reading.stats, width)
        if self._config is None:
            return Group(*texts(status), table)
        # Below it stands with the training reward.
        said = (text for text in texts(status) if not text.plain.startswith("held-out"))
        return screen(said, self._config, lines, table)

    def _read_config(self) -> None:
        if self._config is not None and is_launched_since(self._config.run.path, self._read_s):
            self._config, self._read_s = find_config(self._target), time.time()

    async def _read(self, lines: Lines) -> RunStatus:
        status = await (status_at(self._url) if self._config is None else status_of(self._config))
        return replace(status, lines=lines[-RECENT:]) if lines else status

    def _lines(self) -> Lines:
        lines = [numbers_of(line) for line in self._metrics.read()] if self._metrics else []
        return [line for line in lines if isinstance(line.get("step"), int)]

    def _generators(self, stats: BufferStats | None, width: int) -> RenderableType:
        """Shares of their time are those since about _SHARES_S ago."""
        if stats is None or not stats.generators:
            return Group()
        now_s = time.monotonic()
        self._earlier.append((now_s, stats))
        while len(self._earlier) > 1 and now_s - self._earlier[1][0] >= _SHARES_S:
            self._earlier.popleft()
        rows = generator_rows(stats, self._earlier[0][1])
        return generator_table(rows, is_narrow=width < _WIDE)


def _has_ended(reading: Reading) -> bool:
    """Whether the learner of the newest launch says so: one that only fell silent may be started
    again."""
    is_finished = state_of(reading) is RunState.FINISHED
    return reading.is_over and (is_finished or not reading.is_relaunched)


def _probe(arguments: argparse.Namespace) -> int:
    """The exit code."""
    config = find_config(arguments.target)
    fault = asyncio.run(_fault(config, arguments.probe, arguments.id))
    print(fault or "healthy")
    return 1 if fault else 0


async def _fault(config: RunConfig, role: str, given: str | None) -> str:
    """What is wrong, as a sentence, or "".

    Raises:
        ConfigError: a generator without an id.
    """
    match role:
        case "learner":
            return _of_learner(config)
        case "generator" if given is None:
            raise ConfigError("--id: is required for a generator and was not given")
        case "generator":
            stats, fault = await read_stats(config)
            return fault if stats is None else _of_generator(stats, named_after_host(str(given)))
        case _:
            return (await read_stats(config))[1]


def _of_generator(stats: BufferStats, generator_id: str) -> str:
    states = {row.id: row.state for row in generator_rows(stats)}
    if generator_id not in states:
        return f"{generator_id} does not report to the buffer"
    return f"{generator_id} is silent" if "silent" in states[generator_id] else ""


def _of_learner(config: RunConfig) -> str:
    reading = read_folder(config)
    if reading.learner is None:
        return f"no learner has reported in {config.run.path}"
    if reading.is_learner_reporting:
        return ""
    return f"the learner last reported {reading.learner_age_s:.0f} s ago"
