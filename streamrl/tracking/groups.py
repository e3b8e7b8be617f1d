"""Groups of metrics and their charts: the same on a run's page, in TensorBoard and in W&B.

A metric belongs to the group that its name begins with. The group is also a section in W&B and in
TensorBoard's scalars, and part of the metric's name in Prometheus. The page and TensorBoard's
custom scalars show the charts.
"""

import csv
import re
from collections.abc import Iterable, Iterator, Mapping
from importlib import resources
from typing import Any, Literal, NamedTuple, TypeAlias, cast

Kind: TypeAlias = Literal["lines", "shares", "sums"]
"""`shares` and `sums` are stacked; shares are parts of their sum."""


class Chart(NamedTuple):
    """`metrics` are regular expressions for whole names; a metric's label is what the parenthesized
    group matches, or the whole name."""

    title: str
    metrics: tuple[str, ...]
    kind: Kind = "lines"
    note: str = ""


class MetricGroup(NamedTuple):
    """All metrics whose names begin with `name/`; those in no chart come after the charts."""

    name: str
    title: str
    charts: tuple[Chart, ...] = ()


def _read() -> dict[str, MetricGroup]:
    """The groups of charts.csv by name; in the file a chart's `metrics` are separated by spaces."""
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
    """The metrics that belong to a group, which are all except the line's time."""
    return {name: value for name, value in metrics.items() if "/" in name}


def groups_of(names: Iterable[str]) -> Iterator[MetricGroup]:
    """The groups that have one of these metrics, in order; groups that the user's own metrics form
    come last."""
    known = {group.name: group for group in GROUPS}
    found = dict.fromkeys(name.partition("/")[0] for name in names if "/" in name)
    yield from (group for name, group in known.items() if name in found)
    yield from (MetricGroup(name, name) for name in found if name not in known)


def label_of(chart: Chart, name: str) -> str | None:
    """The label of a metric in the chart; None if the chart does not contain it."""
    for pattern in chart.metrics:
        if found := re.fullmatch(pattern, name):
            return next(iter(found.groups()), name)
    return None
