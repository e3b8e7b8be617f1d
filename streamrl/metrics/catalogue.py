"""The catalogue: the rows of all metrics, and the row of a name.

Invariant: a name has one row. Of rows with open placeholders the first that fits counts.
"""

from collections import Counter
from collections.abc import Mapping
from functools import lru_cache

from streamrl.errors import did_you_mean
from streamrl.metrics.metric import OWN, Metric
from streamrl.metrics.mismatch import MISMATCH
from streamrl.metrics.system import SYSTEM
from streamrl.metrics.training import TRAINING

CATALOGUE: tuple[Metric, ...] = (*TRAINING, *MISMATCH, *SYSTEM)


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
