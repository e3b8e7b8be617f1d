"""Whether this process stood still in a load, as one that is stopped or swapped out does.

A generator that is silent for `streamrl.weights.membership.HANDOVER_S` may have been replaced at
its server. Invariant: once it stood still for nearly so long, `require_none` raises.
"""

import asyncio
import time
from types import TracebackType
from typing import Self

from streamrl.errors import TransportError
from streamrl.weights.membership import HANDOVER_S
from streamrl.weights.protocol import HELLO_S

_TICK_S = 0.25
# The last Hello may be as old as that when the process stops.
_LONGEST_S = HANDOVER_S - 2 * HELLO_S


class Standstill:
    """An asynchronous context, which watches this process's event loop."""

    def __init__(self, longest_s: float = _LONGEST_S) -> None:
        self._longest_s = longest_s
        self._last_s = time.monotonic()
        self._stood_s = 0.0

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._tick())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._task.cancel()

    def require_none(self) -> None:
        """
        Raises:
            TransportError: another generator may be loading weights into the server by now.
        """
        self._note()
        if self._stood_s > self._longest_s:
            raise TransportError(
                f"this generator stood still for {self._stood_s:.0f} s in the middle of an update, "
                "so another one may update the server in its place"
            )

    async def _tick(self) -> None:
        """Waits a moment between two; ends when cancelled."""
        while True:
            await asyncio.sleep(_TICK_S)
            self._note()

    def _note(self) -> None:
        now_s = time.monotonic()
        self._stood_s = max(self._stood_s, now_s - self._last_s)
        self._last_s = now_s
