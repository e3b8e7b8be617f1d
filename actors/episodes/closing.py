"""What is closed after an episode or a group, however it ends.

Invariant: a close that fails hides no earlier error and no cancellation, and one that hangs holds
nobody up for longer than CLOSE_S.
"""

import logging
from collections.abc import Awaitable, Callable
from types import TracebackType

from actors.episodes.deadline import Deadline, DeadlineError
from streamrl.errors import RolloutError

log = logging.getLogger(__name__)

CLOSE_S = 10.0


class ClosedAfter:
    """Calls `close` once after the block, also if the block was canceled.

    Raises:
        RolloutError: `close` failed, and the block did not.
    """

    def __init__(self, close: Callable[[], Awaitable[None]]) -> None:
        self._close = close

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            await self._close_in_time()
        except RolloutError as failure:
            if error is None:
                raise
            log.warning("%s", failure)

    async def _close_in_time(self) -> None:
        """Waits for `close`; the limit unblocks."""
        try:
            with Deadline(CLOSE_S):
                await self._close()
        except DeadlineError:
            log.warning("close of an environment is given up after %g s", CLOSE_S)
