"""From the names of metrics.jsonl to those of Prometheus: families.csv, and a rule for all others.

Names begin with `streamrl_`, units are seconds, bytes and ratios, and counters end with `_total`. A
name that no row matches keeps its words: `learner/grad_norm` is `streamrl_learner_grad_norm`.
"""

import csv
import re
from collections.abc import Iterator
from functools import lru_cache
from importlib import resources
from typing import Literal, NamedTuple, TypeAlias

from streamrl.metrics import OWN, find

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
