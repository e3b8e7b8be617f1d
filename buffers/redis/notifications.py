"""Who waits for a lease or a batch is woken by the server, not by asking again and again.

Invariant: a watcher misses no change it waits for by more than POLL_S. The scripts publish a line
on the run's channel whenever a lease may be granted or a group taken; should the subscription be
down, or the user not be allowed to subscribe, the poll remains. One per `RedisBuffer`.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import NamedTuple

from redis import exceptions

from buffers.redis.connection import RedisConnection

log = logging.getLogger(__name__)

POLL_S = 1.0


class Change(NamedTuple):
    """`room`: a lease may be granted. `num_buffered` groups wait; `learner_term` is the newest."""

    room: int
    num_buffered: int
    learner_term: int


class RedisNotifications:
    """Hands what the channel says to those who watch."""

    def __init__(self, connection: RedisConnection, channel: str) -> None:
        self._connection = connection
        self._channel = channel
        self._watchers: dict[asyncio.Event, Callable[[Change], bool]] = {}
        self._listening: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def watch(self, wanted: Callable[[Change], bool]) -> Iterator[asyncio.Event]:
        """An event that is set at each change that is wanted."""
        woken = asyncio.Event()
        self._watchers[woken] = wanted
        try:
            yield woken
        finally:
            del self._watchers[woken]

    def start(self) -> None:
        """Subscribe, once somebody has to wait."""
        if self._listening is None:
            self._listening = asyncio.create_task(self._listen())

    async def close(self) -> None:
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.gather(self._listening, return_exceptions=True)

    async def _listen(self) -> None:
        """Until cancelled. Waits for messages; after a lost connection, POLL_S."""
        while True:
            with contextlib.suppress(exceptions.RedisError, OSError):
                async with self._connection.client.pubsub() as subscription:
                    await subscription.subscribe(self._channel)
                    async for message in subscription.listen():
                        self._hand_out(message["type"], message["data"])
            await asyncio.sleep(POLL_S)

    def _hand_out(self, kind: str, data: bytes) -> None:
        if kind == "message":
            change = Change(*map(int, data.split()))
            for woken, wanted in self._watchers.items():
                if wanted(change):
                    woken.set()
        else:
            # What changed before the subscription held was not heard.
            for woken in self._watchers:
                woken.set()
