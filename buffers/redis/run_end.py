"""Whether a run that has finished is over for a client of Redis, which keeps it for ever.

A process that joins a finished run may have been started to go on with it, before its learner has
attached: a learner has RESUMES_WITHIN_S for that, as after the start of a buffer with a journal.
"""

import time
from collections.abc import Callable

from buffers.ledger.state import RESUMES_WITHIN_S


class RunEnd:
    """As one client has seen it, from its first call on."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._joined_s: float | None = None
        self._first_term = 0
        self._has_gone_on = False

    def is_over(self, finished: bool, learner_term: int) -> bool:
        """Whether to end, where Redis says now that the run is `finished` and what the term of its
        last learner is."""
        if self._joined_s is None:
            self._joined_s, self._first_term = self._clock(), learner_term
        self._has_gone_on |= not finished or learner_term != self._first_term
        is_late = self._clock() - self._joined_s >= RESUMES_WITHIN_S
        return finished and (self._has_gone_on or is_late)
