"""`streamrl report`: prints the summary of a run, and writes its page `report.html`: what the run
is, its result, charts, events from the daemons' logs, and samples.

Settings that name places of a machine (addresses, the folder of runs) are left out of the page,
since it may be sent to others.

Invariant: everything that a model or a user wrote is data in a JSON block, which contains no `<`,
and the script puts it into the page as text. The page is one file that runs only its own script and
loads nothing. Files are read line by line, and what is kept is bounded: at most NUM_EVENTS events,
faults first; if there are too many points of a metric, two neighbors become one.
"""

import argparse
import base64
import hashlib
import heapq
import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from html import escape
from importlib import resources
from itertools import groupby
from pathlib import Path
from string import Template
from typing import Any, Literal, NamedTuple, TypeAlias

from rich.console import Console

from streamrl.cli.display.numbers import (
    SUMMARY_METRICS,
    books_rows,
    summary,
    summary_rows,
)
from streamrl.cli.launchers import options_of
from streamrl.cli.samples import expectation, facts, readings, verdict
from streamrl.config import RunConfig
from streamrl.config.loading.rendering import on_one_line
from streamrl.config.section import leaves
from streamrl.durable_files import write_file
from streamrl.errors import ErrorRecord
from streamrl.run_folder import PAGE_FILE, Launch, find_run, note_launch, read_books
from streamrl.samples.files import newest_first, side_by_side
from streamrl.samples.record import Message, Sample, cut, printable, without_markup
from streamrl.tracking.groups import OVERVIEW, Chart, groups_of, label_of
from streamrl.tracking.jsonl import METRICS_FILE, VALIDATION_FILE, read_lines, read_metrics


def main(arguments: argparse.Namespace) -> int:
    config = find_run(arguments.folder)
    try:
        path = write_page(config)
    except OSError:
        # In somebody else's read-only run folder, the summary is printed without a page.
        if not arguments.html:
            Console().print(summary(config))
        raise
    if arguments.html:
        print(path)
    else:
        Console().print(summary(config))
    return 0


@contextmanager
def reported(config: RunConfig, arguments: argparse.Namespace, console: Console) -> Iterator[None]:
    """Wrap a launch: note in `launch.json` that it has begun and how it has ended, for `streamrl
    status`; then write the page and print the summary."""
    folder, options = config.run.path, options_of(arguments)
    note_launch(folder, Launch(options))
    try:
        yield
    except BaseException as error:
        # Ctrl-C is no failure.
        failure = ErrorRecord.of(error).sentence if isinstance(error, Exception) else ""
        note_launch(folder, Launch(options, time.time(), failure))
        # A full disk may fail this; report the error that ended the launch instead.
        with suppress(OSError):
            _summarize(config, console)
        raise
    note_launch(folder, Launch(options, time.time()))
    _summarize(config, console)


def _summarize(config: RunConfig, console: Console) -> None:
    write_page(config)
    # The reason of the failure is the last line that a launch prints.
    console.print(summary(config, but="launch failed"))


NUM_SAMPLES, NUM_PROMPTS, NUM_VERSIONS = 24, 8, 4
_LONGEST = 8000
_CHARTS = "uPlot-1.6.32"
"""The library that draws the charts, from npm: https://www.npmjs.com/package/uplot."""


def write_page(config: RunConfig) -> Path:
    """Write the page from the files of the run's folder; return its path."""
    path = config.run.path / PAGE_FILE
    lines = read_metrics(config.run.path / METRICS_FILE, SUMMARY_METRICS)
    write_file(path, page(config.run.name, page_data(config, lines)))
    return path


def page(name: str, data: Mapping[str, Any]) -> str:
    style = _asset(f"{_CHARTS}/uPlot.min.css") + _asset("page.css")
    license_text = f"/*! {_asset(f'{_CHARTS}/LICENSE')} */\n"
    script = license_text + _asset(f"{_CHARTS}/uPlot.iife.min.js") + _asset("page.js")
    # The script element has a line break before and after the field.
    digest = base64.b64encode(hashlib.sha256(f"\n{script}\n".encode()).digest()).decode()
    shown = escape(printable(name))
    fields = {"name": shown, "style": style, "data": as_data_block(data), "script": script}
    return Template(_asset("page.html")).substitute(fields, digest=digest)


def as_data_block(data: Mapping[str, Any]) -> str:
    """JSON that can stand in a `script` element: without `<`, so nothing in it ends the element."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def page_data(config: RunConfig, lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    run = config.run.path
    points = read_points(run / METRICS_FILE)
    steps, versions = as_series(points), as_series(read_points(run / VALIDATION_FILE))
    # Lines of steps have validations at the step that came after them.
    of_steps = {n: v for n, v in steps["metrics"].items() if not n.startswith("validation/")}
    overview, groups = _charts(config, [*of_steps, *versions["metrics"]])
    return {
        **about(config, summary_rows(config, lines)),
        # The page that explains a check is a name, not a link, since the report is read elsewhere,
        # too.
        "checks": [
            {"holds": holds, "text": text, "page": f"docs/{page}"}
            for holds, text, page in checks(config, points)
        ],
        "steps": {**steps, "metrics": of_steps},
        "versions": versions,
        "overview": overview,
        "groups": groups,
        "events": [event._asdict() for event in read_events(run)],
        "samples": list(_samples(run)),
    }


def _charts(
    config: RunConfig, names: Sequence[str]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The charts of the overview, and the others by group; a metric that no chart draws gets its
    own."""
    rewards = {"reward/mean": "training", config.validation.watched_metric: "held-out"}
    series = {name: label for name, label in rewards.items() if name in names}
    reward = {"title": "Reward", "kind": "lines", "note": "", "height": 280, "series": series}
    found = (reward, *(_chart(chart, names) for chart in OVERVIEW))
    overview = [chart for chart in found if chart["series"]]
    drawn = {name for chart in overview for name in chart["series"]}
    groups = []
    for group in groups_of(names):
        charts = [_chart(chart, names) for chart in group.charts]
        # Charts of the overview are not repeated.
        charts = [chart for chart in charts if not drawn.issuperset(chart["series"])]
        shown = drawn.union(*(chart["series"] for chart in charts))
        own = [n for n in names if n.startswith(f"{group.name}/") and n not in shown]
        charts += [_chart(Chart(name, (r"(?:.*/)?(.*)",)), [name]) for name in own]
        if charts:
            groups.append({"name": group.name, "title": group.title, "charts": charts})
    return overview, groups


def _chart(chart: Chart, names: Sequence[str]) -> dict[str, Any]:
    series = {name: label for name in names if (label := label_of(chart, name)) is not None}
    return {"title": chart.title, "kind": chart.kind, "note": chart.note, "series": series}


def _samples(run: Path) -> Iterator[dict[str, Any]]:
    """Yield sections, each with its samples; what all validated versions wrote for a prompt is one
    sample."""
    newest: dict[int, Sample] = {}
    for sample in newest_first(run):
        # One sample per prompt, since siblings are much alike.
        newest.setdefault(sample.prompt_index, sample)
        if len(newest) == NUM_SAMPLES:
            break
    if newest:
        counted = "1 prompt" if len(newest) == 1 else f"each of {len(newest)} prompts"
        title = f"What the newest steps have trained on (a response to {counted})"
        yield {"title": title, "samples": [_sample(sample) for sample in newest.values()]}
    if held_out := side_by_side(run, num_prompts=NUM_PROMPTS, num_versions=NUM_VERSIONS):
        prompts = groupby(held_out, key=lambda sample: sample.prompt_index)
        title = "The same held-out prompts, version by version"
        yield {"title": title, "samples": [_of_versions(list(found)) for _, found in prompts]}


def _sample(sample: Sample) -> dict[str, Any]:
    title = (f"step {sample.step}", f"prompt {sample.prompt_index}", f"reward {sample.reward:.4g}")
    return {
        "title": ", ".join(title),
        "verdict": ", ".join(verdict(sample)),
        "facts": ", ".join(facts(sample)),
        "prompt": _cut(without_markup(sample.prompt, sample.special_tokens)),
        "messages": [_message(message, sample) for message in sample.messages],
    }


def _of_versions(samples: Sequence[Sample]) -> dict[str, Any]:
    """The samples of one prompt as one sample, with the responses side by side."""
    versions = [
        {
            "title": f"version {sample.step}, reward {sample.reward:.4g}",
            "verdict": ", ".join(readings(sample)),
            "messages": [_message(message, sample) for message in sample.messages],
        }
        for sample in samples
    ]
    newest = samples[-1]
    return {
        "title": f"prompt {newest.prompt_index}",
        "verdict": ", ".join(expectation(newest)),
        "prompt": _cut(without_markup(newest.prompt, newest.special_tokens)),
        "messages": [],
        "versions": versions,
    }


def _message(message: Message, sample: Sample) -> dict[str, Any]:
    """A message as pieces (tokens with known weights, as far as the text is shown) and the rest of
    the text, both without the markup of the chat template."""
    pieces: list[tuple[str, float]] = []
    position = 0
    for length, weight in zip(message.token_lengths, message.weights, strict=False):
        if position + length > _LONGEST:
            break
        piece = message.content[position : position + length]
        if piece not in sample.special_tokens:
            pieces.append((printable(piece), weight))
        position += length
    rest = _cut(without_markup(message.content[position:], sample.special_tokens))
    return {"role": message.role, "pieces": pieces, "rest": rest}


def _cut(text: str) -> str:
    return printable(cut(text, _LONGEST))


def _asset(name: str) -> str:
    return (resources.files("streamrl.cli") / "report_assets" / name).read_text(encoding="utf-8")


NUM_POINTS = 200


@dataclass
class Point:
    """Several consecutive lines as one point: step and time of the last, and sums of each
    metric."""

    step: int
    time_s: float
    num_lines: int = 1
    sums: dict[str, tuple[float, int, float, float]] = field(default_factory=dict)
    """Sum, count, smallest, largest."""

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> "Point":
        sums = {
            name: (value, 1, value, value)
            for name, value in line.items()
            if "/" in name and isinstance(value, int | float)
        }
        return cls(line["step"], line.get("time_s") or 0.0, sums=sums)

    def add(self, later: "Point") -> None:
        for name, (total, count, low, high) in later.sums.items():
            mine = self.sums.get(name, (0.0, 0, low, high))
            both = (mine[0] + total, mine[1] + count, min(mine[2], low), max(mine[3], high))
            self.sums[name] = both
        self.step, self.time_s = later.step, later.time_s
        self.num_lines += later.num_lines


def read_points(path: Path) -> list[Point]:
    """Read at most 2 NUM_POINTS points, each of equally many lines except the last."""
    points: list[Point] = []
    every = 1
    for line in read_lines(path):
        if points and points[-1].num_lines < every:
            points[-1].add(Point.of(line))
            continue
        if len(points) == 2 * NUM_POINTS:
            for i in range(0, len(points), 2):
                points[i].add(points[i + 1])
            points, every = points[::2], 2 * every
        points.append(Point.of(line))
    return points


def as_series(points: list[Point]) -> dict[str, Any]:
    """Steps and times of the points, and for each metric the means, with smallest and largest
    values if points stand for several lines; null if it was not measured."""
    names = dict.fromkeys(name for point in points for name in point.sums)
    is_band = any(point.num_lines > 1 for point in points)
    return {
        "step": [point.step for point in points],
        "time": [round(point.time_s, 1) for point in points],
        "metrics": {name: _values(points, name, is_band) for name in names},
    }


def _values(points: list[Point], name: str, is_band: bool) -> dict[str, list[float | None]]:
    found = [point.sums.get(name) for point in points]
    means = [None if f is None else _short(f[0] / f[1]) for f in found]
    if not is_band:
        return {"mean": means}
    low = [None if f is None else _short(f[2]) for f in found]
    high = [None if f is None else _short(f[3]) for f in found]
    return {"mean": means} if low == high else {"mean": means, "low": low, "high": high}


def _short(value: float) -> float:
    """Round to four digits, which is more than a chart shows."""
    rounded = float(f"{value:.4g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 2**53 else rounded


_PLACES = ("run.name", "run.folder", "model.path", "buffer.url", "weights.address", "cluster.")
_SHOWN_ABOVE = ("data.source", "data.eval_source", "data.reward", "algorithm.preset")
_OF_LAUNCH = {"validation.every": "auto"}
"""Values that a launch writes if a person has set nothing."""
_SENTENCES = ("launch failed", "learning", "failures", "scaling", "restarts")
_OF_INTEGRITY = ("groups", "")
_OF_STATE = ("steps", "time of the steps")


def about(config: RunConfig, rows: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Return the run and its settings, and the summary's rows: numbers as tiles, sentences as
    notes."""
    known = dict(rows)
    took = f" in {known['time of the steps']}" if "time of the steps" in known else ""
    failed = "failed after " if "launch failed" in known else ""
    numbers = [r for r in rows if not r[0].startswith(_SENTENCES)]
    return {
        "state": f"{failed}{int(known['steps']):,} of {config.run.max_steps:,} steps{took}",
        "about": [(name, printable(value)) for name, value in _facts(config)],
        "settings": list(_changed(config)),
        "tiles": [_tile(*row) for row in numbers if row[0] not in (*_OF_INTEGRITY, *_OF_STATE)],
        "notes": [(n, printable(value)) for n, value in rows if n.startswith(_SENTENCES)],
    }


def _facts(config: RunConfig) -> Iterator[tuple[str, str]]:
    entries, algorithm = config.entries, config.algorithm
    sources = [source.path for entry in entries for source in entry.data.sources]
    held_out = [source.path for entry in entries for source in entry.data.eval_sources]
    rewards = [reward.label for entry in entries for reward in entry.data.all_rewards]
    choice = f"advantage {algorithm.advantage}, loss {algorithm.loss}"
    yield "model", _model(config)
    yield "data", ", ".join(dict.fromkeys(sources))
    if held_out:
        yield "held-out data", ", ".join(dict.fromkeys(held_out))
    yield "reward", ", ".join(dict.fromkeys(rewards))
    yield "algorithm", f"{algorithm.preset} ({choice})" if algorithm.preset else choice
    size = f"{config.learner.groups_per_step} groups of {config.max_group_size} a step"
    yield "batch", f"{size}, staleness at most {config.buffer.largest_staleness}"
    yield "generators", f"{config.generator.count} with {config.generator.engine}"


def _model(config: RunConfig) -> str:
    """Return the model's name on the hub, or the name of its folder."""
    path, recipe = Path(config.model.path), config.model.recipe
    if recipe is None:
        return path.name if path.is_absolute() else config.model.path
    return f"{path.name} ({recipe.num_layers} layers of width {recipe.hidden_size})"


def _changed(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Settings that a person has changed, by dotted name, except those already shown above."""
    for name, value in leaves(config.shown(exclude_defaults=True)):
        is_above = name.startswith(_PLACES) or name in _SHOWN_ABOVE
        if not is_above and value != {} and _OF_LAUNCH.get(name) != value:
            yield name, printable(on_one_line(value))


def _tile(name: str, text: str) -> dict[str, Any]:
    value, _, detail = text.replace("->", "\u2192").partition(" (")
    is_first = "reward" in name or name == "validation"
    detail = detail.replace(")", "", 1)
    return {"name": name, "value": value, "detail": detail, "is_first": is_first}


def checks(config: RunConfig, points: Sequence[Point]) -> Iterator[tuple[bool, str, str]]:
    """Yield for each promise of a run whether it held, its text, and the documentation page that
    explains it."""
    if (books := read_books(config.run.path)) is not None:
        equation = books_rows(books)[0][1]
        yield books.balanced, f"every group is accounted for: {equation}", "buffer.md#promises"
    oldest, bound = _largest(points, "buffer/staleness_max"), config.buffer.largest_staleness
    if oldest is not None and config.buffer.overdue != "train":
        text = f"staleness stayed within its bound: {oldest:g} at most, {bound} allowed"
        yield oldest <= bound, text, "asynchrony.md#versions-and-staleness"
    for name, promise, page in (
        ("learner/skipped_update", "every gradient was finite", "troubleshooting.md"),
        ("weights/num_failed_loads", "every weight update was loaded", "weights.md#membership"),
    ):
        if (number := _largest(points, name)) is not None:
            yield not number, promise, page


def _largest(points: Sequence[Point], name: str) -> float | None:
    return max((point.sums[name][3] for point in points if name in point.sums), default=None)


NUM_EVENTS = 400
_LONGEST_EVENT = 300
Kind: TypeAlias = Literal["fault", "warning", "start", "stop"]
_ORDER: tuple[Kind, ...] = ("fault", "start", "stop", "warning")
_LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:,\d{3})?) (\S+) (.*)")
_RECORD = re.compile(r"([DIWEC]) \S+: (.*)")
_LEVELS = {"D": "debug", "I": "info", "W": "warning", "E": "error", "C": "critical"}
_STARTS = re.compile(r"serving at |\S+ serves |attached at version |starting from ")
_STOPS = re.compile(r".*: draining|.*: done$|the run is over|drained")


class PageEvent(NamedTuple):
    """An event at a Unix time, from the log of the daemon `role`."""

    time: float
    role: str
    kind: Kind
    text: str


_Record: TypeAlias = tuple[float, str, str]
"""Unix time, level and text of a log line."""


def read_events(run: Path) -> list[PageEvent]:
    """The events of the logs, in order of time."""
    found = (event for log in sorted((run / "logs").glob("*.log")) for event in _events(log))
    kept = heapq.nsmallest(NUM_EVENTS, found, lambda e: (_ORDER.index(e.kind), -e.time))
    return sorted(kept, key=lambda event: event.time)


def _events(log: Path) -> Iterator[PageEvent]:
    with log.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            record = _of_json(line) if line.startswith("{") else _of_text(line)
            if record is None:
                continue
            time_s, level, text = record
            if kind := _kind(level, text):
                yield PageEvent(time_s, log.stem, kind, printable(text[:_LONGEST_EVENT]))


def _of_text(line: str) -> _Record | None:
    if (found := _LINE.match(line)) is None:
        return None
    when, who, rest = found.groups()
    try:
        # Logs use the machine's local time.
        time_s = datetime.fromisoformat(when).timestamp()
    except (ValueError, OverflowError):
        # The line was printed by some user's code.
        return None
    if who == "launcher:":
        return time_s, "error", rest
    record = _RECORD.match(rest)
    return record and (time_s, _LEVELS[record[1]], record[2])


def _of_json(line: str) -> _Record | None:
    """Read a line that `streamrl.log_lines` has written."""
    try:
        fields = json.loads(line)
        time_s = datetime.fromisoformat(fields["time"]).timestamp()
        return time_s, fields["level"], str(fields["message"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def _kind(level: str, text: str) -> Kind | None:
    match level:
        case "error" | "critical":
            return "fault"
        case "warning":
            return "warning"
    if _STARTS.match(text):
        return "start"
    return "stop" if _STOPS.match(text) else None
