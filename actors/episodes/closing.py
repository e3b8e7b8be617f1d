"""What is closed after an episode or a group, however it ends.

Invariant: a close that fails hides no earlier error and no cancellation, and one that hangs holds
nobody up for longer than CLOSE_S.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from streamrl.errors import RolloutError

log = logging.getLogger(__name__)

CLOSE_S = 10.0


@asynccontextmanager
async def closed_after(close: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Calls `close` once after the block, also if the block was canceled.

    Raises:
        RolloutError: `close` failed, and the block did not.
    """
    try:
        yield
    except BaseException:
        try:
            await _in_time(close)
        except RolloutError as error:
            log.warning("%s", error)
        raise
    await _in_time(close)


async def _in_time(close: Callable[[], Awaitable[None]]) -> None:
    """Waits for `close`; the limit unblocks."""
    limit = asyncio.timeout(CLOSE_S)
    try:
        async with limit:
            await close()
    except TimeoutError:
        if not limit.expired():
            raise
        log.warning("close of an environment is given up after %g s", CLOSE_S)
