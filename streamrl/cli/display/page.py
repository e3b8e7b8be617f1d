"""`report.html`: the page of a run, with its summary, its validations and what the policy wrote.

Invariant: every text on it is escaped; the page runs no script and loads nothing from elsewhere.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from itertools import islice
from typing import Any

from streamrl.cli.display.summary import summary_rows, validation_text
from streamrl.cli.samples.render import facts
from streamrl.config import RunConfig
from streamrl.durable_files import write_file
from streamrl.samples.files import newest_first, read_samples, validation_files
from streamrl.samples.record import POLICY, Sample
from streamrl.samples.text import printable
from streamrl.tracking.validation import read_validations

PAGE_FILE = "report.html"
NUM_SAMPLES = 24
_LONGEST = 8000
_HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src 'self' data:; style-src 'unsafe-inline'">
<style>
body {{ font-family: sans-serif; margin: 2em auto; max-width: 70em; }}
table {{ border-collapse: collapse; }}
td, th {{ border: 1px solid #ccc; padding: 0.2em 0.6em; text-align: left; }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere; margin: 0.3em; }}
section {{ border: 1px solid #ccc; margin: 1em 0; padding: 0.4em; }}
.prompt {{ color: #666; }} .environment {{ color: #067; }} img {{ max-width: 100%; }}
</style><title>{name}</title></head><body>
"""


def write_page(config: RunConfig, lines: Sequence[Mapping[str, Any]]) -> None:
    """From the files of the run's folder and the lines of its metrics."""
    write_file(config.run.path / PAGE_FILE, "\n".join(_page(config, lines)))


def _page(config: RunConfig, lines: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    run = config.run.path
    yield _HEAD.format(name=_text(config.run.name))
    yield f"<h1>{_text(config.run.name)}</h1>"
    yield from _table(("", ""), summary_rows(lines, run, validation_text(config)))
    if (run / "report.png").exists():
        yield '<p><img src="report.png" alt="metrics by step"></p>'
    if validated := read_validations(run):
        yield "<h2>Validations</h2>"
        yield from _validations(validated)
    for title, samples in _samples(config):
        yield f"<h2>{title}</h2>"
        for sample in samples:
            yield from _sample(sample)
    yield "</body></html>\n"


def _validations(validated: Mapping[int, Mapping[str, float]]) -> Iterator[str]:
    names = list(dict.fromkeys(name for found in validated.values() for name in found))
    shown = [name for name in names if "@" in name]
    titles = ("version", *(name.removeprefix("validation/") for name in shown))
    rows = ((v, *(_number(validated[v].get(n)) for n in shown)) for v in sorted(validated))
    yield from _table(titles, rows)


def _samples(config: RunConfig) -> Iterator[tuple[str, list[Sample]]]:
    run = config.run.path
    if newest := list(islice(newest_first(run), NUM_SAMPLES)):
        yield f"What the newest steps have trained on ({len(newest)} samples)", newest
    if files := validation_files(run):
        sampled = list(islice(read_samples(files[-1]), NUM_SAMPLES))
        yield f"Validation of version {int(files[-1].stem)} ({len(sampled)} samples)", sampled


def _sample(sample: Sample) -> Iterator[str]:
    title = (f"step {sample.step}", f"reward {sample.reward:.4g}", *facts(sample))
    yield f"<section><b>{_text(', '.join(title))}</b>"
    yield f'<pre class="prompt">{_text(sample.prompt)}</pre>'
    for message in sample.messages:
        kind = "policy" if message.role == POLICY else "environment"
        yield f'<pre class="{kind}">{_text(message.content)}</pre>'
    yield "</section>"


def _table(titles: Iterable[str], rows: Iterable[Iterable[Any]]) -> Iterator[str]:
    yield "<table>"
    yield f"<tr>{''.join(f'<th>{_text(title)}</th>' for title in titles)}</tr>"
    for row in rows:
        yield f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>"
    yield "</table>"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _text(value: Any) -> str:
    text = str(value)
    cut = f"{text[: _LONGEST // 2]} [...] {text[-_LONGEST // 2 :]}"
    return escape(printable(text if len(text) <= _LONGEST else cut))
