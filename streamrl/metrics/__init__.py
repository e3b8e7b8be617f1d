"""The metrics of a run: which exist, how they are merged, and those that come from the buffer's
stats.

`catalogue.csv` has one metric per line: name, unit, meaning, how it is merged and who reports it
(by the names of `Merge` and `Writer`). A name may have placeholders in braces: those in `CLOSED`
stand for a few fixed words each, those in `OPEN` for names that users choose. Metrics of rollout
importance sampling have verl's names; their values are taken before bound and veto, except those
named `applied`.

Invariant: every metric that StreamRL reports has exactly one row; a name without a row comes from
the user's code. If several rows with open placeholders match, the first counts. A metric is merged
as its row says. The buffer's metrics have the same names at every step, so a table of them has no
gaps; its counts are running totals, its lengths those of a window of steps.
"""

import csv
import math
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from importlib import resources
from itertools import product

from streamrl.config.algorithm.rollout_is import REJECTION_STATISTICS
from streamrl.errors import did_you_mean
from streamrl.types import (
    Books,
    BufferStats,
    DropReason,
    GroupHeader,
    RefusalReason,
    ResponseLengths,
    length_distance,
)

STALENESS_EDGES = (0, 1, 2, 4, 8)
"""The largest staleness of each bucket except the last, which is unbounded."""
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
    "role": "[^/]+",
    "tool": "[^/]+",
    "reward": ".+",
    "source": ".+",
    "name": ".+",
    "k": "[0-9]+",
}
_PLACEHOLDER = re.compile(r"\{(\w+)\}")


class Merge(StrEnum):
    """How the parts of a metric are merged: over micro-batches, ranks, generators or episodes.

    Over the updates of a step, `SUM`, `MAX` and `MIN` apply as well; all others become the mean of
    the updates that were made.
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
    merge: Merge
    meaning: str
    """One plain sentence."""
    writer: Writer
    absent: float | None = None
    """Its value in an update that does not report it; None if such an update counts as having
    none."""

    @property
    def group(self) -> str:
        """The group with which the name begins; "" for the time of a line."""
        return self.name.rpartition("/")[0].partition("/")[0]

    @property
    def is_open(self) -> bool:
        """Whether users choose part of the name."""
        return not set(OPEN).isdisjoint(_PLACEHOLDER.findall(self.name))

    def names(self) -> Iterator[str]:
        """Yield every name that it stands for; placeholders of `OPEN` stay."""
        closed = [name for name in _PLACEHOLDER.findall(self.name) if name in CLOSED]
        as_they_are = {name: f"{{{name}}}" for name in OPEN}
        for words in product(*(CLOSED[name] for name in closed)):
            yield self.name.format(**as_they_are, **dict(zip(closed, words, strict=True)))

    def pattern(self) -> re.Pattern[str]:
        """A pattern for the whole names that it stands for."""
        closed = {name: "|".join(map(re.escape, words)) for name, words in CLOSED.items()}
        known = {**OPEN, **closed}
        parts = enumerate(_PLACEHOLDER.split(self.name))
        return re.compile("".join(f"(?:{known[p]})" if i % 2 else re.escape(p) for i, p in parts))


OWN = Metric(
    "{name}",
    "any",
    Merge.TOKENS,
    "What a loss of your own reports: made by `token_mean`, which adds up.",
    Writer.POLICY,
)
"""The row of names that match no other row."""


def _rows() -> Iterator[Metric]:
    text = (resources.files("streamrl.metrics") / "catalogue.csv").read_text(encoding="utf-8")
    for row in csv.DictReader(text.splitlines()):
        merge, writer = Merge[row["merge"]], Writer[row["writer"]]
        absent = float(row["absent"]) if row["absent"] else None
        yield Metric(row["name"], row["unit"], merge, row["meaning"], writer, absent)


CATALOGUE: tuple[Metric, ...] = tuple(_rows())


_EXACT = {name: row for row in CATALOGUE if not row.is_open for name in row.names()}
_PATTERNS = tuple((row.pattern(), row) for row in CATALOGUE if row.is_open)


@lru_cache(maxsize=2**14)
def find(name: str) -> Metric:
    """The row of a metric; `OWN` for a name that only users' code can have."""
    if row := _EXACT.get(name):
        return row
    return next((row for pattern, row in _PATTERNS if pattern.fullmatch(name)), OWN)


def metric(name: str) -> Metric:
    """The row of one of StreamRL's metrics.

    Raises:
        KeyError: there is none.
    """
    if (row := find(name)) is OWN:
        raise KeyError(f"metrics: {name!r} is not in the catalogue; {did_you_mean(name, _EXACT)}")
    return row


def books_metrics(books: Books) -> dict[str, float]:
    """Return the columns of the books: granted is the sum of all other counts."""
    columns = ("granted", "leased", "buffered", "taken", "trained", "acknowledged")
    ended = max(1, books.ended)
    return {
        **{f"buffer/{name}": getattr(books, name) for name in columns},
        **{f"buffer/dropped_{reason}": books.dropped.get(reason, 0) for reason in DropReason},
        "buffer/failed_groups_frac": books.dropped.get(DropReason.FAILED, 0) / ended,
        "buffer/uniform_groups_frac": books.dropped.get(DropReason.UNIFORM, 0) / ended,
        "buffer/books_balanced": float(books.balanced),
    }


def buffer_metrics(stats: BufferStats) -> dict[str, float]:
    """Return the buffer's size and refusals, and sums over the generators that report to it."""
    generators = stats.generators
    return {
        **{f"buffer/refused_{reason}": stats.refused.get(reason, 0) for reason in RefusalReason},
        "buffer/num_bytes": stats.num_bytes,
        "buffer/capacity": stats.capacity,
        "buffer/staleness_bound": stats.staleness_bound,
        "buffer/max_leases_per_prompt": max((p.num_leases for p in stats.retried), default=0),
        "generator/count": len(generators),
        "generator/num_active": sum(g.num_active for g in generators),
        "generator/num_waiting": sum(g.num_waiting for g in generators),
        "generator/max_num_groups": sum(g.max_num_groups for g in generators),
        "generator/num_lost_agents": sum(g.num_lost_agents for g in generators),
    }


MAX_NAMED_GENERATORS = 64
"""If there are more generators, they get no columns in the line of a step: a thousand would fill
most of every file and dashboard."""


def generator_metrics(stats: BufferStats) -> dict[str, float]:
    """The metrics of each generator that reports."""
    generators = stats.generators
    return {
        **{
            # NaN means not measured.
            f"generator/{g.generator_id}/tokens_per_s": g.tokens_per_s if g.num_tokens else math.nan
            for g in generators
        },
        **{f"generator/{g.generator_id}/policy_version": g.policy_version for g in generators},
        **{
            f"generator/{g.generator_id}/heartbeat_age_s": age_s
            for g, age_s in zip(generators, stats.heartbeat_ages_s, strict=False)
        },
    }


def reward_metrics(stats: BufferStats, rewards: Iterable[str]) -> dict[str, float]:
    """Groups that each of these rewards failed to score, over the generators that report now, each
    since its start."""
    failed = Counter(dict.fromkeys(rewards, 0))
    for generator in stats.generators:
        failed.update({found.reward: found.num_failures for found in generator.failed_rewards})
    return {f"reward/{reward}/num_failures": count for reward, count in failed.items()}


def staleness_metrics(headers: Sequence[GroupHeader], policy_version: int) -> dict[str, float]:
    """Distances in versions between each group's furthest token (older or newer) and the version
    that trains it, and the number of groups in each bucket. `staleness_min` is the distance of the
    newest token, negative if the learner went back and trains groups of versions that it makes
    again."""
    distances = [
        max(policy_version - header.oldest_version, header.newest_version - policy_version)
        for header in headers
    ]
    numbers = Counter(bisect_left(STALENESS_EDGES, distance) for distance in distances)
    return {
        "buffer/staleness_mean": sum(distances) / len(distances),
        "buffer/staleness_max": max(distances),
        "buffer/staleness_min": policy_version - max(header.newest_version for header in headers),
        **{
            f"buffer/staleness_{bucket}/num_groups": numbers[i]
            for i, bucket in enumerate(STALENESS_BUCKETS)
        },
    }


def fairness_metrics(lengths: ResponseLengths) -> dict[str, float]:
    """Response lengths in tokens over a window, by outcome; 0 if there are none.

    Fractions are relative to the tokens that were trained or dropped in the window.
    """
    outcomes = {
        "sampled": lengths.sampled,
        "trained": lengths.trained,
        "dropped": lengths.all_dropped,
    }
    ended = max(1, lengths.trained.num_tokens + lengths.all_dropped.num_tokens)
    tokens = {reason: lengths.dropped_because(reason).num_tokens for reason in DropReason}
    return {
        **{f"fairness/{name}_length_mean": n.mean for name, n in outcomes.items()},
        **{f"fairness/{name}_length_p99": n.quantile(0.99) for name, n in outcomes.items()},
        "fairness/length_distance": length_distance(lengths.sampled, lengths.trained),
        "fairness/dropped_tokens_frac": lengths.all_dropped.num_tokens / ended,
        **{f"fairness/dropped_{reason}_tokens_frac": n / ended for reason, n in tokens.items()},
        "fairness/discarded_tokens_frac": lengths.discarded.num_tokens / ended,
    }
