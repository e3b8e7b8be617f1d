"""The groups of this generator that are not trained: those that failed, and uniform ones.

`FailureRecord`: the last error, the rows that fail again, and the rewards that did not score them.
Invariant: a row is counted under its place in the file, over the epochs that repeat it. The
generator's heartbeats report all of it.

`FailureLimit`: a generator gives up when its groups fail one after the other, or most are
malformed. A group that fails is data. If every group fails, the reward or the environment is wrong,
and each further failure drops a prompt. A group that the buffer cannot read is never data: if most
are so, what is installed is wrong, and the run would train on the few that are left.

`UniformFilter`: which groups are left out of training, since their siblings' rewards are all alike.
At most `max_refills` groups are left out for each one that is kept, and for each of the
first step's beforehand. So a generator whose groups are all alike neither stands still nor spins.
"""

import logging
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import Any

from streamrl.config.algorithm.settings import DynamicSamplingSettings
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
from streamrl.types import MAX_FAILED_ROWS, FailedReward, FailedRow, GroupFailure, TrajectoryGroup
from streamrl.types.reasons import shortened
from streamrl.types.rollouts import ALIKE_WITHIN


class FailureRecord:
    """Of one process."""

    def __init__(self) -> None:
        self._rows: Counter[str] = Counter()
        self._rewards: Counter[str] = Counter()
        self.last: GroupFailure | None = None
        self.num_lost_agents = 0
        """Groups whose agent disappeared."""

    def add(self, prompt_index: int, row: str, error: Exception) -> str:
        """Count the failure of a group of this prompt; the sentence for the log."""
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
        """Those that failed most, at most MAX_FAILED_ROWS."""
        most = self._rows.most_common(MAX_FAILED_ROWS)
        return tuple(FailedRow(row=shortened(row), num_failures=count) for row, count in most)

    @property
    def rewards(self) -> tuple[FailedReward, ...]:
        """Those that failed."""
        counts = self._rewards.items()
        return tuple(FailedReward(reward=name, num_failures=count) for name, count in counts)


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
        """The end of the sentence about a reward that has scored no group yet; "" for others."""
        is_first = self._limit == MAX_FAILURES_AT_START and isinstance(error, RewardError)
        return f"; {NOTHING_SCORED}" if is_first else ""

    def first_remedy(self, error: StreamRLError) -> str:
        """The same for the log; "" but for the first failure."""
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


log = logging.getLogger(__name__)


class UniformFilter:
    """The groups of one generator, one after the other."""

    def __init__(self, settings: DynamicSamplingSettings | None, groups_per_step: int) -> None:
        self._settings = settings
        self._most = 0.0 if settings is None else settings.max_refills * groups_per_step
        self._left = self._most
        self._has_warned = False

    def leaves_out(self, group: TrajectoryGroup) -> bool:
        """Whether the group is released instead of put."""
        if self._settings is None:
            return False
        is_uniform = self._is_uniform(group, self._settings.metric)
        if is_uniform and self._left >= 1:
            self._left -= 1
            log.info("prompt %d is left out: its rewards are all alike", group.prompt_index)
            return True
        if is_uniform:
            self._warn(
                "of too many groups all siblings have one %s: one of %g is trained nevertheless, "
                "as algorithm.dynamic_sampling.max_refills says",
                self._settings.metric,
                self._settings.max_refills + 1,
            )
        self._left = min(self._most, self._left + self._settings.max_refills)
        return False

    def _is_uniform(self, group: TrajectoryGroup, metric: str) -> bool:
        if metric == "reward":
            return _are_alike(t.reward for t in group.trajectories)
        values = [t.metrics.get(metric) for t in group.trajectories]
        known = [value for value in values if value is not None]
        if len(known) < len(values):
            self._warn(
                "algorithm.dynamic_sampling.metric: environment %s does not record %r, so no group "
                "is left out",
                group.environment,
                metric,
            )
        return len(known) == len(values) and _are_alike(known)

    def _warn(self, sentence: str, *values: object) -> None:
        """Once for all groups."""
        if not self._has_warned:
            log.warning(sentence, *values)
        self._has_warned = True


def _are_alike(values: Iterable[float]) -> bool:
    known = tuple(values)
    return max(known) - min(known) <= ALIKE_WITHIN
