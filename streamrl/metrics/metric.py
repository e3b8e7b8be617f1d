"""What the catalogue says of a metric: its name, its unit, its meaning, and how it is merged.

A name may have placeholders in braces. Those of `CLOSED` stand for a few words each, those of
`OPEN` for names that users choose. Invariant: how a metric is merged follows from its row alone.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from typing import Literal, TypeAlias

from streamrl.config.algorithm.rollout_is import REJECTION_STATISTICS
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

Unit: TypeAlias = Literal[
    "",
    "1/s",
    "10^12/s",
    "advantage",
    "any",
    "bytes",
    "calls",
    "candidates",
    "contexts",
    "episodes",
    "fraction",
    "generators",
    "groups",
    "leases",
    "messages",
    "micro-batches",
    "nats",
    "nats^2",
    "parts",
    "prompts",
    "reward",
    "s",
    "sequences",
    "stalls",
    "steps",
    "tokens",
    "tokens/s",
    "turns",
    "updates",
    "versions",
    "weight",
]


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
    unit: Unit
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
