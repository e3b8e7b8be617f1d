"""Waiting for a condition, under a deadline."""

import asyncio
from collections.abc import Callable


async def until(
    condition: Callable[[], bool], deadline_s: float = 20.0, every_s: float = 0.01
) -> None:
    """Waits for the condition, which it looks at every so often; unblocked by it or the deadline.

    Raises:
        TimeoutError: at the deadline.
    """
    async with asyncio.timeout(deadline_s):
        while not condition():
            await asyncio.sleep(every_s)
