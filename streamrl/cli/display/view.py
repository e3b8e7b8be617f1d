"""The live view of a run, for `launch` and `status --follow`: messages about it, its progress, its
rewards so far, where the time of its steps goes, a table, and one of the newest samples.

A launch's view reads only the run folder and the children's states, so it delays no process.
"""

import asyncio
import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.segment import Segments
from rich.table import Table
from rich.text import Text

from streamrl.cli.display.numbers import (
    RECENT,
    Lines,
    held_out_rows,
    mean_of_last,
    metric_mean,
    rate,
    remaining,
    remaining_texts,
    reward_change,
    reward_text,
    sparkline,
    validation_text,
    wait_shares,
)
from streamrl.cli.processes.restarts import Child
from streamrl.cli.samples import rendered
from streamrl.config import RunConfig
from streamrl.diagnosis.reading import HEARTBEAT_TIMEOUT_S, age
from streamrl.run_folder import is_launched_since, read_learner
from streamrl.samples.files import newest_first
from streamrl.samples.record import printable
from streamrl.tracking.jsonl import FollowedMetrics
from streamrl.types import LearnerActivity

REFRESH_S = 0.5
_LINE_S = 5.0
_REPEAT_S = 60.0
_PARTS = ("wait", "plan", "score", "forward", "backward", "update", "snapshot", "save")
_NUMBER = re.compile(r"\d[\d,.]*")
_SAMPLE_S = 4.0
_NUM_SIBLINGS = 8
_SAMPLE_CHARACTERS = 600


class ProgressView:
    """The view of a launch: a live screen on a terminal, a line every few seconds elsewhere."""

    def __init__(self, config: RunConfig, console: Console, *, live: bool) -> None:
        self._config = config
        self._console = console
        self._live = live and console.is_terminal
        self._metrics = FollowedMetrics(config.run.path / "metrics.jsonl")

    async def run(self, children: Sequence[Child]) -> None:
        """Show the run until cancelled. Waits REFRESH_S between readings of the run folder."""
        if not self._live:
            printer = LinePrinter(self._config, self._console)
            while True:
                printer.print_if_due()
                await asyncio.sleep(REFRESH_S)
        with Live(self._render(children), console=self._console, refresh_per_second=4) as screen:
            try:
                while True:
                    await asyncio.sleep(REFRESH_S)
                    screen.update(self._render(children))
            finally:
                screen.update(self._render(children))

    def print(self, sentence: str) -> None:
        """Print a line above the live view."""
        self._console.print(Text(printable(sentence)), soft_wrap=True)

    def _render(self, children: Sequence[Child]) -> RenderableType:
        states = {child.role: child.state for child in children}
        return render(self._config, self._metrics.read(), states)


class LinePrinter:
    """Prints the progress of the run in lines, for a log or a pipe: every _LINE_S, and only what is
    new. A sentence in which only numbers have changed is repeated after _REPEAT_S."""

    def __init__(self, config: RunConfig, console: Console) -> None:
        self._config = config
        self._console = console
        self._metrics = FollowedMetrics(config.run.path / "metrics.jsonl")
        self._said: dict[str, tuple[str, float]] = {}
        self._printed_s = -_LINE_S

    def print_if_due(self) -> None:
        if time.monotonic() - self._printed_s >= _LINE_S:
            self.print_now()

    def print_now(self) -> None:
        now_s, lines = time.monotonic(), self._metrics.read()
        headlines = [headline(self._config, lines)] if lines else []
        texts = {text: text for text in headlines}
        sentences = notes(self._config.run.path)
        if validated := validation_text(self._config):
            sentences.append(f"held-out reward {validated}")
        texts |= {_NUMBER.sub("", text): text for text in sentences}
        # A sentence that stops being true is new when it becomes true again.
        self._said = {words: self._said[words] for words in texts if words in self._said}
        for words, text in texts.items():
            said, said_s = self._said.get(words, ("", -math.inf))
            if text != said and now_s - said_s >= _REPEAT_S:
                self._console.print(Text(printable(text)), soft_wrap=True)
                self._said[words], self._printed_s = (text, now_s), now_s


def headline(config: RunConfig, lines: Lines) -> str:
    """The progress of the run in one line, with means of the last steps and what remains."""
    step, *left = _place(config, lines)
    recent = ", ".join(means(lines))
    labeled = f"{mean_of_last(len(lines[-RECENT:]))}: {recent}" if recent else ""
    return "  ".join(filter(None, (step, reward_text(lines), labeled, *left)))


def _place(config: RunConfig, lines: Lines) -> Iterator[str]:
    """Yield texts such as: step 333/550; checkpoint 400 in 0:13; ETA 0:42."""
    max_steps = config.run.max_steps
    yield f"step {lines[-1]['step']}/{max_steps}"
    yield from remaining_texts(remaining(lines, max_steps, config.learner.checkpoint.every))


def means(lines: Lines) -> Iterator[str]:
    """Means of the last RECENT steps: staleness, effective sample size, wait, speed."""
    for shown, name in (
        ("staleness {:.2f}", "buffer/staleness_mean"),
        ("ESS {:.3f}", "mismatch/rollout_is_eff_sample_size"),
        ("wait {:.2f} s", "learner/wait_s"),
    ):
        if (value := _recent(lines, name)) is not None:
            yield shown.format(value)
    generated = rate(lines[-RECENT:], "generator/tokens_per_s")
    if generated is not None:
        yield f"{generated:,.0f} generated tokens/s"


def notes(folder: Path) -> list[str]:
    """Sentences about what the learner waits for or that it is silent, what is being validated,
    failed groups, and signs that it does not learn; [] if the learner belongs to an earlier
    launch."""
    learner = read_learner(folder)
    if learner is None or is_launched_since(folder, learner.time_s):
        return []
    silent_s = time.time() - learner.time_s
    if silent_s <= HEARTBEAT_TIMEOUT_S:
        first = learner.waits_for
    elif learner.activity is LearnerActivity.ENDED:
        first = ""
    else:
        ago = age(silent_s)
        first = f"the learner has not reported for {ago}; its last report: {learner.activity}"
    said = (first, learner.validating, learner.failures, *learner.signs)
    return [sentence for sentence in said if sentence]


def render(config: RunConfig, lines: Lines, states: Mapping[str, str]) -> RenderableType:
    """The live view of a launch: progress, what the run waits for, what failed, and a row for each
    process."""
    table = Table(box=None, pad_edge=False)
    for column in ("process", "state", "tokens/s", "version", ""):
        table.add_column(column, justify="right" if column in ("tokens/s", "version") else "left")
    last: Mapping[str, Any] = lines[-1] if lines else {}
    for role, state in states.items():
        table.add_row(role, state, *_role_cells(role, last, lines))
    place = _place(config, lines) if lines else ("starting: waiting for the first step",)
    title = Text(printable("  ".join((config.run.name, *place))), style="bold")
    said = (Text(printable(note), style="yellow") for note in notes(config.run.path))
    return screen((title, *said), config, lines, table)


def screen(
    said: Iterable[Text], config: RunConfig, lines: Lines, table: RenderableType
) -> RenderableType:
    """Lay out a live view, the most important first."""
    step, max_steps = lines[-1]["step"] if lines else 0, config.run.max_steps
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", max_width=16)
    facts.add_column(overflow="fold")
    facts.add_row(f"{100 * step / max_steps:.0f} % done", ProgressBar(max_steps, step))
    for name, value in _facts(config, lines):
        facts.add_row(name, Text(printable(value)))
    sample = newest_sample(config.run.path)
    return _Fitted(Group(*said, facts, table, *([] if sample is None else [sample])))


class _Fitted(NamedTuple):
    """Cuts rows that do not fit on the terminal, and counts them. Rich's own cut ends with the
    view, so the first rows of the last screen would scroll out of the terminal."""

    content: Group

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        # Unpadded, since full rows would wrap when the terminal is made narrower.
        rows = console.render_lines(self.content, options, pad=False, new_lines=True)
        shown = rows
        if console.is_terminal and len(rows) >= console.height:
            shown = rows[: max(0, console.height - 2)]
        yield Segments([segment for row in shown for segment in row])
        if hidden := len(rows) - len(shown):
            yield Text(f"{hidden} more rows", style="dim")


def _facts(config: RunConfig, lines: Lines) -> Iterator[tuple[str, str]]:
    if rewards := [line["reward/mean"] for line in lines if line.get("reward/mean") is not None]:
        yield "training reward", f"{reward_change(lines)}\n{sparkline(rewards)}"
    yield from held_out_rows(config)
    recent = lines[-RECENT:]
    if texts := [text for text in (", ".join(means(lines)), step_parts(recent)) if text]:
        yield mean_of_last(len(recent)), "\n".join(texts)


def step_parts(lines: Lines) -> str:
    """Return a text such as: 2.00 s a step: backward 40 %, forward 30 %, wait 25 %, other 5 %; ""
    if no step was measured."""
    step_s = metric_mean(lines, "learner/step_s")
    if not step_s:
        return ""
    parts = {part: metric_mean(lines, f"learner/{part}_s") or 0.0 for part in _PARTS}
    parts["other"] = max(0.0, step_s - sum(parts.values()))
    ordered = sorted(parts.items(), key=lambda part: -part[1])
    shares = (f"{part} {100 * s / step_s:.0f} %" for part, s in ordered if s / step_s >= 0.005)
    return f"{step_s:.2f} s a step: {', '.join(shares)}"


def newest_sample(folder: Path) -> Panel | None:
    """One of the siblings that the newest step with samples trained, changing every _SAMPLE_S; None
    before there are samples."""
    newest = list(islice(newest_first(folder), _NUM_SIBLINGS))
    siblings = [sample for sample in newest if sample.step == newest[0].step]
    if not siblings:
        return None
    turn = int(time.monotonic() / _SAMPLE_S) % len(siblings)
    return rendered(siblings[turn], _SAMPLE_CHARACTERS)


def _role_cells(role: str, last: Mapping[str, Any], lines: Lines) -> tuple[str, str, str]:
    if role == "learner" and last:
        rate = _recent(lines, "learner/tokens_per_s") or 0
        return f"{rate:.0f}", str(last["step"]), wait_shares(lines[-RECENT:])
    if role == "buffer" and last:
        held = f"{last.get('buffer/leased', 0)} leased, {last.get('buffer/buffered', 0)} buffered"
        return "", "", held
    generated = _recent(lines, f"generator/{role}/tokens_per_s")
    version = last.get(f"generator/{role}/policy_version", "")
    return ("" if generated is None else f"{generated:.0f}", str(version), "")


def _recent(lines: Lines, name: str) -> float | None:
    return metric_mean(lines[-RECENT:], name)
