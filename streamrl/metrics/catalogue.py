"""The catalogue: the rows of all metrics, and the row of a name.

`catalogue.csv` has a metric a line, with the names of `Merge` and `Writer`. Names of rollout
importance sampling are those of verl; its values are before bound and veto, but those `applied`.

Invariant: a name has one row. Of rows with open placeholders the first that fits counts.
"""

import csv
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib import resources

from streamrl.errors import did_you_mean
from streamrl.metrics.metric import OWN, UNITS, Merge, Metric, Writer


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
