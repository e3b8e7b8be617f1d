"""The metrics of a run: what there is, how it is merged, and those of the buffer.

    metric        what catalogue.csv says of a metric, its rules of merging, and the row of a name
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
from streamrl.metrics.metric import (
    CATALOGUE,
    OWN,
    STALENESS_BUCKETS,
    STALENESS_EDGES,
    Merge,
    Metric,
    Writer,
    find,
    metric,
)
