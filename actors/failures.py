"""The failed groups of this generator.

`FailureRecord`: the last error, the rows that fail again, and the rewards that did not score them.
Invariant: a row is counted under its place in the file, over the epochs that repeat it. The
generator's heartbeats report all of it.

`FailureLimit`: a generator gives up when its groups fail one after the other, or most are
malformed. A single failed group is just recorded. If every group fails, the reward or the
environment is wrong, and each further failure would drop a prompt. A group that the buffer cannot
read is always an error: if most are unreadable, the installation is wrong, and the run would train
on the few left.
"""

from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

from streamrl.diagnosis.causes import NOTHING_SCORED
from streamrl.errors import (
    ErrorRecord,
    LostAgentError,
    RewardError,
    RolloutError,
    StreamRLError,
    WireError,
)
from streamrl.service import user_code_details
from streamrl.types import MAX_FAILED_ROWS, FailedReward, FailedRow, GroupFailure
from streamrl.types.reasons import shortened


class FailureRecord:
    def __init__(self) -> None:
        self._rows: Counter[str] = Counter()
        self._rewards: Counter[str] = Counter()
        self.last: GroupFailure | None = None
        self.num_lost_agents = 0
        """The number of groups whose agent disappeared."""

    def add(self, prompt_index: int, row: str, error: Exception) -> str:
        """Count a failed group of this prompt; returns the sentence for the log."""
        self.num_lost_agents += isinstance(error, LostAgentError)
        self.last = GroupFailure(prompt_index=prompt_index, sentence=shortened(str(error)))
        if isinstance(error, RewardError):
            self._rewards[error.reward] += 1
        if not row:
            return f"prompt {prompt_index} failed: {error}"
        self._rows[row] += 1
        count = self._rows[row]
        times = f", failed {count} times" if count > 1 else ""
        return f"prompt {prompt_index} ({row}{times}) failed: {error}"

    @property
    def rows(self) -> tuple[FailedRow, ...]:
        """The rows that failed most, at most MAX_FAILED_ROWS."""
        most = self._rows.most_common(MAX_FAILED_ROWS)
        return tuple(FailedRow(row=shortened(row), num_failures=count) for row, count in most)

    @property
    def rewards(self) -> tuple[FailedReward, ...]:
        counts = self._rewards.items()
        return tuple(FailedReward(reward=name, num_failures=count) for name, count in counts)


# A reward that fails for two of three groups stays below the limit with probability 1 - 2e-6.
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
        self._has_failed = False

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
                f"{self.remedy(error)}"
            ) from error.__cause__
        num_malformed, num_groups = sum(self._are_malformed), len(self._are_malformed)
        if num_groups == MAX_FAILURES and 2 * num_malformed > num_groups:
            raise RolloutError(
                f"{error}; {num_malformed} of the last {num_groups} groups were refused as "
                "malformed"
            ) from error

    def remedy(self, error: StreamRLError) -> str:
        """The end of the error about a reward that has scored no group yet; "" for other errors."""
        is_first = self._limit == MAX_FAILURES_AT_START and isinstance(error, RewardError)
        return f"; {NOTHING_SCORED}" if is_first else ""

    def first_remedy(self, error: StreamRLError) -> str:
        """The same for the log, only at the first failure; otherwise ""."""
        has_failed, self._has_failed = self._has_failed, True
        return "" if has_failed else self.remedy(error)

    def details(self, error: StreamRLError) -> Mapping[str, Any]:
        """Arguments of a logging call: the traceback of the user's code, once for each place that
        raises."""
        origin = ErrorRecord.of(error.__cause__ or error).origin
        if origin in self._origins:
            return {}
        self._origins |= {origin}
        return user_code_details(error)
