"""The metrics of a daemon for Prometheus, at http://HOST:PORT/metrics.

    readings    statuses and stats as metrics
    exported    the newest readings of a daemon, for a registry of prometheus-client, by the names
                of families.csv
    start       the server of prometheus-client, and the file by which Prometheus finds the daemon

Invariant: a daemon hands over what it measures anyway, and waits for no scrape.
"""

from streamrl.tracking.prometheus.exported import Exported as Exported
from streamrl.tracking.prometheus.start import exporting as exporting
