"""When a generator gives up: its groups fail one after the other.

A group that fails is data. If every group fails, the reward or the environment is wrong, and each
further failure drops a prompt.
"""

from collections.abc import Mapping
from typing import Any

from streamrl.error_record import ErrorRecord
from streamrl.errors import RolloutError, StreamRLError
from streamrl.service import user_code_details

# A reward that fails for two groups of three gets past the first with probability 1 - 2e-6.
MAX_FAILURES_AT_START = 32
MAX_FAILURES = 50


class FailureLimit:
    """Counts the failures since the last group that was put."""

    def __init__(self) -> None:
        self._num_failures = 0
        self._limit = MAX_FAILURES_AT_START
        self._origins: frozenset[str] = frozenset()

    def on_success(self) -> None:
        self._num_failures = 0
        self._limit = MAX_FAILURES

    def on_failure(self, error: StreamRLError) -> None:
        """
        Raises:
            RolloutError: the failures have reached the limit.
        """
        self._num_failures += 1
        if self._num_failures >= self._limit:
            raise RolloutError(
                f"{error}; {self._num_failures} groups have failed one after the other"
            ) from error.__cause__

    def details(self, error: StreamRLError) -> Mapping[str, Any]:
        """Arguments of a logging call: the traceback of the user's code, once for each place that
        raises."""
        origin = ErrorRecord.of(error.__cause__ or error).origin
        if origin in self._origins:
            return {}
        self._origins |= {origin}
        return user_code_details(error)
