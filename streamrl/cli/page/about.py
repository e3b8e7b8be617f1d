"""What a run is, its result, and whether what a run promises holds of it: the page without charts.

Settings that are places of a machine (addresses, the folder of runs) are left out: the page is sent
to others.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import streamrl
from streamrl.cli.display.numbers import books_rows
from streamrl.cli.page.series import Point
from streamrl.config import RunConfig
from streamrl.run_folder import read_books
from streamrl.samples.record import printable

_PLACES = ("run.name", "run.folder", "model.path", "buffer.url", "weights.address", "cluster.")
_SHOWN_ABOVE = ("data.source", "data.eval_source", "data.reward", "algorithm.preset")
_SENTENCES = ("launch failed", "learning", "failures", "scaling", "restarts")
_OF_INTEGRITY = ("groups", "")
_OF_STATE = ("steps", "time of the steps")


def about(config: RunConfig, rows: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """The run and its settings, and the rows of its summary: numbers as tiles, sentences below."""
    known = dict(rows)
    took = f" in {known['time of the steps']}" if "time of the steps" in known else ""
    numbers = [r for r in rows if not r[0].startswith(_SENTENCES)]
    return {
        "state": f"{int(known['steps']):,} of {config.run.max_steps:,} steps{took}",
        "about": [(name, printable(value)) for name, value in _facts(config)],
        "settings": list(_changed(config.model_dump(mode="json", exclude_defaults=True))),
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
    """Its hub name, or its folder's own name."""
    path, recipe = Path(config.model.path), config.model.recipe
    if recipe is None:
        return path.name if path.is_absolute() else config.model.path
    return f"{path.name} ({recipe.num_layers} layers of width {recipe.hidden_size})"


def _changed(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Settings by dotted name, but for those that stand above."""
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _changed(value, f"{name}.")
        elif not name.startswith(_PLACES) and name not in _SHOWN_ABOVE:
            yield name, printable(str(value))


def _tile(name: str, text: str) -> dict[str, Any]:
    value, _, detail = text.replace("->", "\u2192").partition(" (")
    is_first = "reward" in name or name == "validation"
    return {
        "name": name,
        "value": value,
        "detail": detail.replace(")", "", 1),
        "is_first": is_first,
    }


def checks(config: RunConfig, points: Sequence[Point]) -> list[dict[str, Any]]:
    """What a run promises, whether it held, and the page of the documentation that explains it."""
    return [
        {"holds": holds, "text": text, "page": f"docs/{page}", "href": _link(page, config.run.path)}
        for holds, text, page in _checks(config, points)
    ]


def _checks(config: RunConfig, points: Sequence[Point]) -> Iterator[tuple[bool, str, str]]:
    if (books := read_books(config.run.path)) is not None:
        equation = books_rows(books)[0][1]
        yield books.balanced, f"every group is accounted for: {equation}", "buffer.md#promises"
    oldest, bound = _largest(points, "buffer/staleness_max"), config.buffer.largest_staleness
    if oldest is not None and config.buffer.overdue != "train":
        text = f"staleness stayed within its bound: {oldest:g} at most, {bound} allowed"
        yield oldest <= bound, text, "asynchrony.md#versions-and-staleness"
    for name, promise, page in (
        ("learner/skipped_update", "every gradient was finite", "troubleshooting.md"),
        ("weights/num_failed_loads", "every weight update was loaded", "weights.md#metrics"),
    ):
        if (number := _largest(points, name)) is not None:
            yield not number, promise, page


def _largest(points: Sequence[Point], name: str) -> float | None:
    return max((point.sums[name][3] for point in points if name in point.sums), default=None)


def _link(page: str, run: Path) -> str:
    """From the run's folder to the page, of the package or of a checkout."""
    package = Path(streamrl.__file__).parent
    own = package / "docs"
    docs = own if own.exists() else package.parent / "docs"
    return os.path.relpath(docs / page, run)
