"""The newest readings of a daemon, and what prometheus-client makes of them.

Invariant: one thread of the daemon writes, any thread reads: a writer replaces whole mappings and
changes none, so a reader sees the old one or the new one and nobody waits.

The names of metrics.jsonl become those of Prometheus by families.csv, and all others by a rule:
names begin with `streamrl_`, units are seconds, bytes and ratios, and counters end with `_total`. A
name that no row matches keeps its words: `learner/grad_norm` is `streamrl_learner_grad_norm`.
"""

import csv
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from importlib import resources
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from streamrl.interfaces import Tracker
from streamrl.metrics import OWN, STALENESS_BUCKETS, STALENESS_EDGES, find

if TYPE_CHECKING:
    from prometheus_client import Metric

PREFIX = "streamrl_"
_BOUNDS = (*map(str, STALENESS_EDGES), "+Inf")
_NUM_GROUPS = [f"buffer/staleness_{bucket}/num_groups" for bucket in STALENESS_BUCKETS]


Kind: TypeAlias = Literal["gauge", "counter", "sum", "histogram"]
"""`counter`: a running total already; `sum`: of a step, added up; `histogram`: so by bucket."""


class MetricRow(NamedTuple):
    """`pattern` matches a metric's whole name; its named groups are labels, `{}` in `family` is its
    one group without a name."""

    pattern: str
    kind: Kind
    family: str
    text: str


class Family(NamedTuple):
    """What a metric is to Prometheus; `name` lacks the prefix and, of a counter, `_total`."""

    name: str
    kind: Kind
    text: str
    labels: tuple[tuple[str, str], ...] = ()


def _rows() -> Iterator[MetricRow]:
    file = resources.files("streamrl.tracking.prometheus") / "families.csv"
    for row in csv.DictReader(file.read_text(encoding="utf-8").splitlines()):
        yield MetricRow(**row)  # type: ignore[arg-type]


ROWS = tuple(_rows())
_PATTERNS = tuple((re.compile(row.pattern), row) for row in ROWS)
_UNITS = (
    ("_per_s", "_per_second"),
    ("_s", "_seconds"),
    ("_frac", "_ratio"),
    ("_fraction", "_ratio"),
)


@lru_cache(maxsize=2**14)
def family_of(metric: str) -> Family:
    """Of a metric of metrics.jsonl, or of `streamrl.tracking.prometheus.readings`."""
    for pattern, row in _PATTERNS:
        if found := pattern.fullmatch(metric):
            unnamed = set(range(1, pattern.groups + 1)) - set(pattern.groupindex.values())
            name = row.family.format(*(found.group(number) for number in sorted(unnamed)))
            labels = tuple(sorted(found.groupdict().items()))
            return Family(_name(name), row.kind, row.text, labels)
    known = find(metric)
    text = f"{metric} of metrics.jsonl, of the last step." if known is OWN else known.meaning
    return Family(_name(metric), "gauge", text)


def _name(words: str) -> str:
    name = re.sub(r"[^a-zA-Z0-9_]", "_", words)
    for suffix, unit in _UNITS:
        if name.endswith(suffix):
            return name.removesuffix(suffix) + unit
    return name


class Exported(Tracker):
    """What one daemon exports. `is_on` says whether anybody can read it.

    Families whose name begins with one of `left_out` are another daemon's.
    """

    def __init__(self, *, is_on: bool, left_out: Sequence[str] = ()) -> None:
        self.is_on = is_on
        self._left_out = tuple(left_out)
        self._newest: Mapping[str, Mapping[str, float]] = {}
        self._sums: Mapping[str, float] = {}

    def show(self, source: str, metrics: Callable[[], Mapping[str, Any]]) -> None:
        """A reading of this source replaces the one before; `metrics` is called if it is on."""
        if self.is_on:
            self._newest = {**self._newest, source: _numbers(metrics())}

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """The line of a step; those of its metrics that count something are added up."""
        if not self.is_on:
            return
        # The status of the learner is as new, and newer between two steps.
        line = {k: v for k, v in _numbers(metrics).items() if k != "learner/policy_version"}
        added = {name: line.pop(name) for name in [*line] if _is_added(family_of(name))}
        num_groups = sum(added.get(name, 0.0) for name in _NUM_GROUPS)
        added["buffer/staleness_sum"] = num_groups * line.get("buffer/staleness_mean", 0.0)
        sums = {name: self._sums.get(name, 0.0) + value for name, value in added.items()}
        steps = self._sums.get("learner/num_steps", 0.0) + 1
        self._sums = {**self._sums, **sums, "learner/num_steps": steps}
        # A validation is in the line of one step.
        scores = {k: v for k, v in self._newest.get("line", {}).items() if "validation/" in k}
        self._newest = {**self._newest, "line": {**scores, **line}}

    def log_validation(self, metrics: Mapping[str, Any], policy_version: int) -> None:
        self.show("validation", lambda: metrics)

    def collect(self) -> Iterator["Metric"]:
        """Families with their samples; what prometheus-client asks a collector for."""
        newest = {k: v for reading in self._newest.values() for k, v in reading.items()}
        families: dict[str, list[tuple[Family, float]]] = {}
        for metric, value in {**newest, **self._sums}.items():
            family = family_of(metric)
            if not family.name.startswith(self._left_out or ("-",)):
                families.setdefault(family.name, []).append((family, value))
        for name, found in families.items():
            yield _metric(name, found)


def _is_added(family: Family) -> bool:
    return family.kind in ("sum", "histogram")


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Those that are finite numbers."""
    return {
        name: float(value)
        for name, value in metrics.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }


def _metric(name: str, found: Iterable[tuple[Family, float]]) -> "Metric":
    from prometheus_client.metrics_core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
    )

    samples = list(found)
    (family, _), *_ = samples
    labels = [label for label, _ in family.labels]
    if family.kind == "histogram":
        counts = {dict(f.labels).get("bucket", ""): value for f, value in samples}
        totals = [*accumulate(counts.get(bucket, 0.0) for bucket in STALENESS_BUCKETS)]
        buckets = list(zip(_BOUNDS, totals, strict=True))
        return HistogramMetricFamily(PREFIX + name, family.text, buckets, counts.get("", 0.0))
    of_kind = GaugeMetricFamily if family.kind == "gauge" else CounterMetricFamily
    metric = of_kind(PREFIX + name, family.text, labels=labels)
    for each, value in samples:
        metric.add_metric([text for _, text in each.labels], value)
    return metric
