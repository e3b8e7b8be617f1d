"""Whether a run that has finished is over for a client of Redis, which keeps it for ever.

A process that joins a finished run may have been started to go on with it, before its learner has
attached: a learner has RESUMES_WITHIN_S for that, as after the start of a buffer with a journal.
"""

import time
from collections.abc import Callable

from buffers.ledger.state import RESUMES_WITHIN_S


class RunEnd:
    """As one client has seen it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._joined_s: float | None = None
        self._has_gone_on = False

    def is_over(self, finished: bool) -> bool:
        """Whether to end, where Redis says now that the run is `finished`."""
        if self._joined_s is None:
            self._joined_s = self._clock()
        self._has_gone_on = self._has_gone_on or not finished
        is_late = self._clock() - self._joined_s >= RESUMES_WITHIN_S
        return finished and (self._has_gone_on or is_late)
