"""When a generator gives up: its groups fail one after the other, or most are malformed.

A group that fails is data. If every group fails, the reward or the environment is wrong, and each
further failure drops a prompt. A group that the buffer cannot read is never data: if most are so,
what is installed is wrong, and the run would train on the few that are left.
"""

from collections import deque
from collections.abc import Mapping
from typing import Any

from streamrl.error_record import ErrorRecord
from streamrl.errors import RolloutError, StreamRLError, WireError
from streamrl.service import user_code_details

# A reward that fails for two groups of three gets past the first with probability 1 - 2e-6.
MAX_FAILURES_AT_START = 32
MAX_FAILURES = 50


class FailureLimit:
    """Counts the failures since the last group that was put, and the malformed of the last
    MAX_FAILURES groups."""

    def __init__(self) -> None:
        self._num_failures = 0
        self._limit = MAX_FAILURES_AT_START
        self._are_malformed: deque[bool] = deque(maxlen=MAX_FAILURES)
        self._origins: frozenset[str] = frozenset()

    def on_success(self) -> None:
        self._num_failures = 0
        self._limit = MAX_FAILURES
        self._are_malformed.append(False)

    def on_failure(self, error: StreamRLError) -> None:
        """
        Raises:
            RolloutError: the failures have reached the limit, or most groups are malformed.
        """
        self._num_failures += 1
        self._are_malformed.append(isinstance(error, WireError))
        if self._num_failures >= self._limit:
            raise RolloutError(
                f"{error}; {self._num_failures} groups have failed one after the other"
            ) from error.__cause__
        num_malformed, num_groups = sum(self._are_malformed), len(self._are_malformed)
        if num_groups == MAX_FAILURES and 2 * num_malformed > num_groups:
            raise RolloutError(
                f"{error}; {num_malformed} of the last {num_groups} groups were refused as "
                "malformed"
            ) from error

    def details(self, error: StreamRLError) -> Mapping[str, Any]:
        """Arguments of a logging call: the traceback of the user's code, once for each place that
        raises."""
        origin = ErrorRecord.of(error.__cause__ or error).origin
        if origin in self._origins:
            return {}
        self._origins |= {origin}
        return user_code_details(error)
