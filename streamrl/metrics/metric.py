"""What the catalogue says of a metric: its name, its unit, its meaning, and how it is merged.

A name may have placeholders in braces. Those of `CLOSED` stand for a few words each, those of
`OPEN` for names that users choose. Invariant: how a metric is merged follows from its row alone.

`catalogue.csv` has a metric a line, with the names of `Merge` and `Writer`. Names of rollout
importance sampling are those of verl; its values are before bound and veto, but those `applied`.

Invariant: a name has one row. Of rows with open placeholders the first that fits counts.
"""

import csv
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from importlib import resources
from itertools import product

from streamrl.config.algorithm.rollout_is import REJECTION_STATISTICS
from streamrl.errors import did_you_mean
from streamrl.types import DropReason, RefusalReason

STALENESS_EDGES = (0, 1, 2, 4, 8)
"""The largest staleness of each bucket but the last one, which has no largest."""
STALENESS_BUCKETS = ("0", "1", "2", "3_4", "5_8", "9_plus")

QUANTILES: Mapping[str, float] = {"p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95, "p99": 0.99}

_BY_TOKEN = tuple(name for name in REJECTION_STATISTICS if name.startswith("token_"))
CLOSED: Mapping[str, Sequence[str]] = {
    "staleness": STALENESS_BUCKETS,
    "reason": tuple(map(str, DropReason)),
    "refusal": tuple(map(str, RefusalReason)),
    "percentile": tuple(QUANTILES),
    "rule": REJECTION_STATISTICS,
    "token_rule": _BY_TOKEN,
    "sequence_rule": tuple(name for name in REJECTION_STATISTICS if name not in _BY_TOKEN),
    "outcome": ("sampled", "trained", "dropped"),
}
OPEN: Mapping[str, str] = {
    "generator": "[^/]+",
    "environment": "[^/]+",
    "tool": "[^/]+",
    "reward": ".+",
    "source": ".+",
    "name": ".+",
    "k": "[0-9]+",
}
_PLACEHOLDER = re.compile(r"\{(\w+)\}")

UNITS = (
    *("", "1/s", "10^12/s", "advantage", "any", "bytes", "calls", "candidates", "contexts"),
    *("episodes", "fraction", "generators", "groups", "leases", "messages", "micro-batches"),
    *("nats", "nats^2", "parts", "prompts", "reward", "s", "sequences", "stalls", "steps"),
    *("tokens", "tokens/s", "turns", "updates", "versions", "weight"),
)


class Merge(StrEnum):
    """How the parts of a metric become one: over micro-batches, ranks, generators or episodes.

    Over the updates of a step `SUM`, `MAX` and `MIN` are what they say, and of all others it is the
    mean of the updates that were made.
    """

    TOKENS = "mean over tokens"
    SEQUENCES = "mean over sequences"
    LEVEL = "mean over tokens; at level `sequence` over sequences"
    RESCORED = "mean over the tokens that were rescored"
    EPISODES = "mean over episodes"
    LOSS = "added up, with the denominator of the loss"
    SUM = "sum"
    MAX = "largest"
    MIN = "smallest"
    WHOLE = "of all together"
    LAST = "newest"


class Writer(StrEnum):
    """Who reports a metric."""

    BATCH = "learner, of the batch"
    POLICY = "learner, of each update"
    CRITIC = "learner, of each update of the critic"
    LEARNER = "learner"
    BUFFER = "buffer"
    GENERATOR = "generators"
    VALIDATOR = "validator"


@dataclass(frozen=True)
class Metric:
    """A row of the catalogue."""

    name: str
    unit: str
    """One of UNITS."""
    merge: Merge
    meaning: str
    """One plain sentence."""
    writer: Writer
    absent: float | None = None
    """Its value in an update that does not report it; None where such an update has none."""

    @property
    def group(self) -> str:
        """What the name begins with; "" for the time of a line."""
        return self.name.rpartition("/")[0].partition("/")[0]

    @property
    def is_open(self) -> bool:
        """Whether users choose a part of the name."""
        return not set(OPEN).isdisjoint(_PLACEHOLDER.findall(self.name))

    def names(self) -> Iterator[str]:
        """Every name that it stands for, with the placeholders of `OPEN` as they are."""
        closed = [name for name in _PLACEHOLDER.findall(self.name) if name in CLOSED]
        as_they_are = {name: f"{{{name}}}" for name in OPEN}
        for words in product(*(CLOSED[name] for name in closed)):
            yield self.name.format(**as_they_are, **dict(zip(closed, words, strict=True)))

    def pattern(self) -> re.Pattern[str]:
        """Of the whole names that it stands for."""
        parts = _PLACEHOLDER.split(self.name)
        known = {
            **OPEN,
            **{name: "|".join(map(re.escape, words)) for name, words in CLOSED.items()},
        }
        return re.compile(
            "".join(f"(?:{known[p]})" if i % 2 else re.escape(p) for i, p in enumerate(parts))
        )


OWN = Metric(
    "{name}",
    "any",
    Merge.TOKENS,
    "What a loss of your own reports: made by `token_mean`, which adds up.",
    Writer.POLICY,
)
"""The row of names that are in no other."""


def _rows() -> Iterator[Metric]:
    text = (resources.files("streamrl.metrics") / "catalogue.csv").read_text(encoding="utf-8")
    for row in csv.DictReader(text.splitlines()):
        merge, writer = Merge[row["merge"]], Writer[row["writer"]]
        absent = float(row["absent"]) if row["absent"] else None
        if row["unit"] not in UNITS:
            raise ValueError(f"metrics: {row['name']} has the unit {row['unit']!r}")
        yield Metric(row["name"], row["unit"], merge, row["meaning"], writer, absent)


CATALOGUE: tuple[Metric, ...] = tuple(_rows())


def _exact() -> Mapping[str, Metric]:
    """The rows by name, but for those with open placeholders.

    Raises:
        ValueError: a name has two rows.
    """
    named = [(name, row) for row in CATALOGUE if not row.is_open for name in row.names()]
    counts = Counter(name for name, _ in named)
    if twice := sorted(name for name, count in counts.items() if count > 1):
        raise ValueError(f"metrics: two rows have {', '.join(twice)}")
    return dict(named)


_EXACT = _exact()
_PATTERNS = tuple((row.pattern(), row) for row in CATALOGUE if row.is_open)


@lru_cache(maxsize=2**14)
def find(name: str) -> Metric:
    """The row of a metric; `OWN` for a name that only users' code can have given."""
    if row := _EXACT.get(name):
        return row
    return next((row for pattern, row in _PATTERNS if pattern.fullmatch(name)), OWN)


def metric(name: str) -> Metric:
    """The row of a metric of StreamRL's own.

    Raises:
        KeyError: there is none.
    """
    if (row := find(name)) is OWN:
        raise KeyError(f"metrics: {name!r} is not in the catalogue; {did_you_mean(name, _EXACT)}")
    return row
