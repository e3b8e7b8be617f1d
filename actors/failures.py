"""The groups that failed in this generator: the last error, and the rows that fail again.

Invariant: a row is counted under its place in the file, over the epochs that repeat it. The
generator's heartbeats report both.
"""

from collections import Counter

from streamrl.errors import LostAgentError
from streamrl.types import MAX_FAILED_ROWS, FailedRow, GroupFailure
from streamrl.types.failures import shortened


class FailureRecord:
    """Of one process."""

    def __init__(self) -> None:
        self._rows: Counter[str] = Counter()
        self.last: GroupFailure | None = None
        self.num_lost_agents = 0
        """Groups whose agent disappeared."""

    def add(self, prompt_index: int, row: str, error: Exception) -> str:
        """Count the failure of a group of this prompt; the sentence for the log."""
        self.num_lost_agents += isinstance(error, LostAgentError)
        self.last = GroupFailure(prompt_index=prompt_index, sentence=shortened(str(error)))
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
