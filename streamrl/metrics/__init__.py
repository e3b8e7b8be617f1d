"""The metrics of a run: what there is, how it is merged, and those of the buffer.

    metric        what the catalogue says of a metric, and its rules of merging
    catalogue     all rows, of catalogue.csv, and the row of a name
    buffer        the metrics of the buffer and the generators, from their stats

Invariant: a metric that StreamRL reports has a row; a name without one is of the user's own code.
"""

from streamrl.metrics.buffer import (
    books_metrics,
    buffer_metrics,
    fairness_metrics,
    reward_metrics,
    sampling_metrics,
    staleness_metrics,
)
from streamrl.metrics.catalogue import CATALOGUE, find, metric
from streamrl.metrics.metric import OWN, STALENESS_BUCKETS, STALENESS_EDGES, Merge, Metric, Writer

__all__ = [
    "CATALOGUE",
    "OWN",
    "STALENESS_BUCKETS",
    "STALENESS_EDGES",
    "Merge",
    "Metric",
    "Writer",
    "books_metrics",
    "buffer_metrics",
    "fairness_metrics",
    "find",
    "metric",
    "reward_metrics",
    "sampling_metrics",
    "staleness_metrics",
]
