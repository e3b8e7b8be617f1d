"""The last gauges of a server, for an engine that reads them again and again.

Invariant: the total of tokens never falls, and that the gauges cannot be read is logged once.
"""

import logging
from collections.abc import Mapping

log = logging.getLogger(__name__)


class Readings:
    """Of the server `name`; what cannot be read is 0."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.is_readable = True
        self.last: Mapping[str, float] = {}

    def on_readings(self, readings: Mapping[str, float], error: str = "") -> None:
        """`error` is why there are none."""
        if self.is_readable and error:
            log.warning("%s's gauges cannot be read: %s", self._name, error)
        elif not (self.is_readable or error):
            log.info("%s's gauges can be read again", self._name)
        total = max(readings.get("num_tokens", 0.0), self.last.get("num_tokens", 0.0))
        self.last, self.is_readable = {**readings, "num_tokens": total}, not error
