"""Groups of metrics and the charts of each: the same on the page of a run, in TensorBoard and W&B.

A metric belongs to the group that its name begins with, which is also a section of W&B and of
TensorBoard's scalars, and part of its name in Prometheus. The charts are those of the page and of
TensorBoard's custom scalars.
"""

import csv
import re
from collections.abc import Iterable, Iterator, Mapping
from importlib import resources
from typing import Any, Literal, NamedTuple, TypeAlias, cast

Kind: TypeAlias = Literal["lines", "shares", "sums"]
"""`shares` and `sums` are stacked; shares are parts of their sum."""


class Chart(NamedTuple):
    """`metrics` are regular expressions of whole names; the label of a metric is the part of its
    name that a group in parentheses matches, or the whole name."""

    title: str
    metrics: tuple[str, ...]
    kind: Kind = "lines"
    note: str = ""


class MetricGroup(NamedTuple):
    """Of all metrics whose names begin with `name/`; those in no chart come after the charts."""

    name: str
    title: str
    charts: tuple[Chart, ...] = ()


def _read() -> dict[str, MetricGroup]:
    """The groups of charts.csv, by their names; `metrics` of a chart are parted by blanks."""
    text = (resources.files("streamrl.tracking") / "charts.csv").read_text(encoding="utf-8")
    groups: dict[str, MetricGroup] = {}
    for row in csv.DictReader(text.splitlines()):
        name, metrics, kind = row["group"], tuple(row["metrics"].split()), cast(Kind, row["kind"])
        group = groups.get(name, MetricGroup(name, row["heading"]))
        charts = [Chart(row["title"], metrics, kind, row["note"])] if metrics else []
        groups[name] = group._replace(charts=(*group.charts, *charts))
    return groups


_READ = _read()
OVERVIEW = _READ.pop("overview").charts
"""What the page shows first, below the reward."""
GROUPS = tuple(_READ.values())


def grouped(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Those that belong to a group: all but the time of the line."""
    return {name: value for name, value in metrics.items() if "/" in name}


def groups_of(names: Iterable[str]) -> Iterator[MetricGroup]:
    """Those that have one of these metrics, in their order; those of the user's own come last."""
    known = {group.name: group for group in GROUPS}
    found = dict.fromkeys(name.partition("/")[0] for name in names if "/" in name)
    yield from (group for name, group in known.items() if name in found)
    yield from (MetricGroup(name, name) for name in found if name not in known)


def label_of(chart: Chart, name: str) -> str | None:
    """The label of a metric in the chart; None if it is not in it."""
    for pattern in chart.metrics:
        if found := re.fullmatch(pattern, name):
            return next(iter(found.groups()), name)
    return None
