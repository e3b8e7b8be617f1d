"""How much each connection to the weight port may send, and what was refused.

A connection has a budget of messages, which refills with time. A refused message costs as much as
REFUSED_COST others, a message above the budget is dropped unread and costs too: a connection that
goes on is ignored until it has been quiet.

Invariant: one connection has at most BURST + MESSAGES_PER_S * seconds of its messages decoded. What
is kept of connections is bounded; the one that was silent for longest is forgotten.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

log = logging.getLogger(__name__)

MESSAGES_PER_S = 100.0
BURST = 200.0
REFUSED_COST = 25.0
MAX_CONNECTIONS = 8192
LOG_S = 10.0


@dataclass(frozen=True)
class _Budget:
    """Messages left at `at_s`; below 0 the connection is ignored."""

    messages: float
    at_s: float


class Connections:
    """The connections of one socket, by routing id. Runs in one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._budgets: OrderedDict[bytes, _Budget] = OrderedDict()
        self._logged_s = -LOG_S
        self.num_refused = 0
        self.num_ignored = 0

    def admits(self, connection: bytes) -> bool:
        """Whether to read a message that has arrived; it counts in any case."""
        is_admitted = self._spend(connection, 1.0) >= 0
        self.num_ignored += not is_admitted
        return is_admitted

    def refuse(self, connection: bytes, origin: str, reason: str) -> None:
        """Count a message that was read in vain; log it, if none was logged for LOG_S."""
        self.num_refused += 1
        self._spend(connection, REFUSED_COST)
        if self._clock() - self._logged_s >= LOG_S:
            self._logged_s = self._clock()
            log.warning(
                "refused a message to the weight port from %s: %s (%d refused so far, %d ignored)",
                *(origin, reason, self.num_refused, self.num_ignored),
            )

    def _spend(self, connection: bytes, cost: float) -> float:
        now_s = self._clock()
        budget = self._budgets.pop(connection, _Budget(BURST, now_s))
        refilled = min(BURST, budget.messages + (now_s - budget.at_s) * MESSAGES_PER_S)
        left = max(-BURST, refilled - cost)
        self._budgets[connection] = _Budget(left, now_s)
        if len(self._budgets) > MAX_CONNECTIONS:
            self._budgets.popitem(last=False)
        return left
