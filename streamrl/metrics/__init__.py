"""The metrics of a run: what there is, how it is merged, and those of the buffer.

    metric        what catalogue.csv says of a metric, its rules of merging, and the row of a name
    buffer        the metrics of the buffer and the generators, from their stats

Invariant: a metric that StreamRL reports has a row; a name without one is of the user's own code.
"""

from streamrl.metrics.buffer import (
    books_metrics as books_metrics,
    buffer_metrics as buffer_metrics,
    fairness_metrics as fairness_metrics,
    reward_metrics as reward_metrics,
    sampling_metrics as sampling_metrics,
    staleness_metrics as staleness_metrics,
)
from streamrl.metrics.metric import (
    CATALOGUE as CATALOGUE,
    OWN as OWN,
    STALENESS_BUCKETS as STALENESS_BUCKETS,
    STALENESS_EDGES as STALENESS_EDGES,
    Merge as Merge,
    Metric as Metric,
    Writer as Writer,
    find as find,
    metric as metric,
)
