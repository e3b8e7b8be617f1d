"""Writes `report.html`: what a run is, its result and its charts, what happened, and samples.

Invariant: all that a model or a user wrote is data in a JSON block, in which no `<` occurs, and the
script puts it into the page as text. The page runs its own script alone and loads nothing.
"""

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib import resources
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from streamrl.cli.display.summary import summary_rows, validation_text
from streamrl.cli.page.about import about, checks
from streamrl.cli.page.events import read_events
from streamrl.cli.page.series import as_series, read_points
from streamrl.cli.samples import expectation, facts, readings, verdict
from streamrl.config import RunConfig
from streamrl.durable_files import write_file
from streamrl.run_folder import PAGE_FILE
from streamrl.samples.files import newest_first, side_by_side
from streamrl.samples.record import Message, Sample, cut, printable, without_markup
from streamrl.tracking.groups import OVERVIEW, Chart, groups_of, label_of
from streamrl.tracking.jsonl import METRICS_FILE, VALIDATION_FILE

NUM_SAMPLES, NUM_PROMPTS, NUM_VERSIONS = 24, 8, 4
_LONGEST = 8000
_CHARTS = "uPlot-1.6.32"
"""The library that draws the charts, as npm has it: https://www.npmjs.com/package/uplot."""


def write_page(config: RunConfig, lines: Sequence[Mapping[str, Any]]) -> Path:
    """From the files of the run's folder and the lines of its metrics; returns where it is."""
    path = config.run.path / PAGE_FILE
    write_file(path, page(config.run.name, page_data(config, lines)))
    return path


def page(name: str, data: Mapping[str, Any]) -> str:
    """The whole file."""
    style = _asset(f"{_CHARTS}/uPlot.min.css") + _asset("page.css")
    license_text = f"/*! {_asset(f'{_CHARTS}/LICENSE')} */\n"
    script = license_text + _asset(f"{_CHARTS}/uPlot.iife.min.js") + _asset("page.js")
    # The element has a line break before and after the field.
    digest = base64.b64encode(hashlib.sha256(f"\n{script}\n".encode()).digest()).decode()
    fields = {
        "@NAME@": escape(printable(name)),
        "@DIGEST@": digest,
        "@STYLE@": style,
        "@SCRIPT@": script,
        "@DATA@": as_data_block(data),
    }
    return "\n".join(_filled(line, fields) for line in _asset("page.html").split("\n"))


def as_data_block(data: Mapping[str, Any]) -> str:
    """JSON that a `script` element holds as it stands: without `<`, so nothing in it ends it."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def page_data(config: RunConfig, lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the script of the page shows."""
    run = config.run.path
    points = read_points(run / METRICS_FILE)
    steps, versions = as_series(points), as_series(read_points(run / VALIDATION_FILE))
    # In the lines of steps they stand at the step that came after them.
    of_steps = {n: v for n, v in steps["metrics"].items() if not n.startswith("validation/")}
    overview, groups = _charts(config, [*of_steps, *versions["metrics"]])
    rows = summary_rows(lines, run, validation_text(config))
    return {
        **about(config, rows),
        "checks": checks(config, points),
        "steps": {**steps, "metrics": of_steps},
        "versions": versions,
        "overview": overview,
        "groups": groups,
        "events": [
            {"time": e.time_s, "role": e.role, "kind": e.kind, "text": printable(e.text)}
            for e in read_events(run)
        ],
        "samples": list(_samples(run)),
    }


def _charts(
    config: RunConfig, names: Sequence[str]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Those of the overview, and the others by group; a metric that none draws has its own."""
    rewards = {"reward/mean": "training", config.validation.watched_metric: "held-out"}
    reward = {"title": "Reward", "kind": "lines", "note": "", "height": 280}
    series = {name: label for name, label in rewards.items() if name in names}
    overview = [{**reward, "series": series}, *(_chart(chart, names) for chart in OVERVIEW)]
    overview = [chart for chart in overview if chart["series"]]
    drawn = {name for chart in overview for name in chart["series"]}
    groups = []
    for group in groups_of(names):
        charts = [_chart(chart, names) for chart in group.charts]
        # Not twice what the overview has.
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
    """Sections, each with its samples; of a validation what each version wrote for a prompt is one
    sample."""
    if newest := list(islice(newest_first(run), NUM_SAMPLES)):
        title = f"What the newest steps have trained on ({len(newest)} samples)"
        yield {"title": title, "samples": [_sample(sample) for sample in newest]}
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
    """The samples of one prompt as one, in which the responses stand side by side."""
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
    """The pieces of the tokens whose weights are known, as far as the text is shown, and the rest
    of it, both without the markup of the chat template."""
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


def _filled(line: str, fields: Mapping[str, str]) -> str:
    """A line of the template has one field at most, so that no value is searched for another."""
    for name, value in fields.items():
        if name in line:
            return line.replace(name, value)
    return line


def _asset(name: str) -> str:
    return (resources.files("streamrl.cli.page") / "assets" / name).read_text(encoding="utf-8")
