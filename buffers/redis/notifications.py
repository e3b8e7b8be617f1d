"""Notifications from Redis to the calls that wait for a lease or a batch.

Invariant: a call that waits is delayed by POLL_S at most. The scripts publish on the run's channel
whenever a lease may be granted or a group taken; where the subscription is down, or the user may
not subscribe, the calls poll. `_read` waits for messages of the channel.
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


class Notification(NamedTuple):
    """`may_lease`: a lease may be granted. `num_buffered` groups are ready to be taken.

    `learner_term` is the present one.
    """

    may_lease: int
    num_buffered: int
    learner_term: int


class RedisNotifications:
    """One client's subscription to the run's channel."""

    def __init__(self, connection: RedisConnection, channel: str) -> None:
        self._connection = connection
        self._channel = channel
        self._conditions: dict[asyncio.Event, Callable[[Notification], bool]] = {}
        self._reader: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def subscribe(self, condition: Callable[[Notification], bool]) -> Iterator[asyncio.Event]:
        """An event that is set at each notification for which `condition` holds."""
        event = asyncio.Event()
        self._conditions[event] = condition
        try:
            yield event
        finally:
            del self._conditions[event]

    def start(self) -> None:
        """Subscribe to the channel; called when a call first has to wait."""
        if self._reader is None:
            self._reader = asyncio.create_task(self._read())

    async def close(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)

    async def _read(self) -> None:
        """Runs until cancelled. Waits for messages; after a lost connection, POLL_S."""
        while True:
            with contextlib.suppress(exceptions.RedisError, OSError):
                async with self._connection.client.pubsub() as subscription:
                    await subscription.subscribe(self._channel)
                    async for message in subscription.listen():
                        self._notify(message["type"], message["data"])
            await asyncio.sleep(POLL_S)

    def _notify(self, kind: str, data: bytes) -> None:
        if kind == "message":
            notification = Notification(*map(int, data.split()))
            for event, condition in self._conditions.items():
                if condition(notification):
                    event.set()
        else:
            # The subscription has begun: changes before it were not notified.
            for event in self._conditions:
                event.set()
