"""Waiting for a condition, under a deadline."""

import asyncio
import time
from collections.abc import Callable

import pytest

# A hang is a hang, and a machine of many tenants is slow.
DEADLINE_S = 120.0


async def until(
    condition: Callable[[], bool], deadline_s: float = DEADLINE_S, every_s: float = 0.01
) -> None:
    """Waits for the condition, which it looks at every so often; unblocked by it or the deadline.

    Raises:
        TimeoutError: at the deadline.
    """
    async with asyncio.timeout(deadline_s):
        while not condition():
            await asyncio.sleep(every_s)


class LoopClock:
    """The clock of the running loop, by which its timers go off; a test may put it forward."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead_s = 0.0
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "time", lambda: time.monotonic() + self.ahead_s)


def block_until(
    condition: Callable[[], bool],
    deadline_s: float = DEADLINE_S,
    every_s: float = 0.02,
    explain: Callable[[], str] = str,
) -> None:
    """`until` for a test that has no loop; at the deadline it fails with what `explain` tells."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, explain()
        time.sleep(every_s)
