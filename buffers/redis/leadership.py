"""Decides which buffer daemon serves a run, and says where: one at a time; others stand by.

    daemon   its name, address and key, with an expiry of LEASE_S that it renews every RENEW_S

Invariant: a daemon that takes over first writes its new, unique name as the term into the fence
(`buffers.redis.journal_storage`). So writes of an earlier daemon are refused, whatever it believes
and whatever the server has lost. The expiry only decides how soon another daemon tries. `acquire`
waits until no other daemon holds the run, and polls every POLL_S.
"""

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from msgspec import Struct
from redis import exceptions

from buffers.redis.connection import Answer, Command, RedisConnection, namespace
from buffers.redis.journal_storage import connected, read_fence, require_format
from buffers.redis.memory_limit import RedisMemoryLimit
from streamrl.errors import HandedOverError, TransportError

log = logging.getLogger(__name__)

LEASE_S, RENEW_S, POLL_S, FULL_S = 3.0, 0.75, 0.25, 1.0
LEASE_MS = round(1000 * LEASE_S)


class Daemon(Struct, frozen=True):
    """`url` and the public `key` of its server are "" until it serves."""

    name: str
    url: str = ""
    key: str = ""


async def find_daemon(connection: RedisConnection, run: str) -> Daemon | None:
    """The daemon that serves the run or is about to; None if there is none."""
    found = (await connection.call("find_daemon", ("GET", f"{namespace(run)}daemon")))[0]
    return msgspec.json.decode(found, type=Daemon) if found else None


async def require_usable(connection: RedisConnection, run: str) -> None:
    """
    Raises:
        OtherReleaseError: another release has written the run.
        ConfigError: the server refuses this user, or may evict keys of the run.
    """
    await require_format(connection, run)
    await RedisMemoryLimit(connection).read()


async def served_at(url: str, run: str, *, deadline_s: float) -> str | None:
    """The address of the run's daemon; None if there is none."""
    async with connected(url, run, deadline_s) as connection:
        daemon = await find_daemon(connection, run)
        return None if daemon is None else daemon.url or "an address that it has yet to choose"


class Leadership:
    def __init__(self, url: str, run: str, *, deadline_s: float) -> None:
        self.connection = RedisConnection(url, run, deadline_s=deadline_s, retry_s=LEASE_S)
        self._run = run
        self._key, self._fence = f"{namespace(run)}daemon", f"{namespace(run)}fence"
        self._daemon = Daemon(uuid.uuid4().hex)

    async def acquire(self) -> str:
        """Take the run over; return this daemon's new, unique term.

        Raises:
            ConfigError: see `require_usable`.
        """
        self._daemon = Daemon(uuid.uuid4().hex)
        is_first = True
        entry = self._entry("NX")
        while not (await _with_room(lambda: self.connection.call("acquire", entry)))[0]:
            if is_first:
                log.info("another buffer daemon serves the run; this one stands by")
                is_first = False
            await self._bound_expiry()
            await asyncio.sleep(POLL_S)
        await require_usable(self.connection, self._run)
        term = self._daemon.name

        def set_term(fence: bytes | None) -> list[Command]:
            return [("SET", self._fence, f"{term}:{read_fence(fence)[1]}")]

        await _with_room(lambda: self.connection.transaction("acquire", self._fence, set_term))
        return term

    async def _bound_expiry(self) -> None:
        """Limit the entry's expiry to LEASE_MS. If the server's clock was set back, or a failover
        brought another clock, the entry of a daemon that is gone would stay too long. A daemon that
        serves renews it.
        """
        left_ms = (await self.connection.call("acquire", ("PTTL", self._key)))[0]
        if not 0 <= left_ms <= LEASE_MS:
            await self.connection.call("acquire", ("PEXPIRE", self._key, LEASE_MS))

    async def announce(self, url: str, key: str) -> None:
        """Publish the server's address and key for clients. Waits for Redis, as `renew` does.

        Raises:
            HandedOverError: see `renew`.
        """
        self._daemon = Daemon(self._daemon.name, url, key)
        while True:
            try:
                return await _with_room(lambda: self._if_ours("announce", self._entry()))
            except TransportError as error:
                log.warning("%s", error)
                await asyncio.sleep(RENEW_S)

    async def renew(self) -> None:
        """Renew this daemon's entry until cancelled, every RENEW_S. While Redis does not answer,
        keep trying: the fence shows whether another daemon has taken over.

        Raises:
            HandedOverError: this daemon's entry has expired or is lost.
        """
        while True:
            await asyncio.sleep(RENEW_S)
            try:
                # PEXPIRE works while memory is full; SET would be refused.
                await self._if_ours("renew", ("PEXPIRE", self._key, LEASE_MS))
            except TransportError as error:
                log.warning("%s", error)

    async def resign(self) -> None:
        """Remove this daemon's entry, so that another daemon may take over at once.

        Raises:
            HandedOverError: another daemon has already taken over.
        """
        await self._if_ours("resign", ("DEL", self._key))

    async def close(self) -> None:
        await self.connection.close()

    async def _if_ours(self, name: str, command: Command) -> None:
        def commands_for(found: bytes | None) -> list[Command]:
            if found is None or msgspec.json.decode(found, type=Daemon).name != self._daemon.name:
                raise HandedOverError(
                    "this daemon serves the run no longer: another one has taken over, or Redis "
                    "has lost what it had"
                )
            return [command]

        await self.connection.transaction(name, self._key, commands_for)

    def _entry(self, *options: Any) -> Command:
        value = msgspec.json.encode(self._daemon)
        return ("SET", self._key, value, "PX", LEASE_MS, *options)


async def _with_room(call: Callable[[], Awaitable[Answer]]) -> Answer:
    """Return the call's answer. While Redis is full, repeat the call every FULL_S."""
    while True:
        try:
            return await call()
        except exceptions.OutOfMemoryError as error:
            log.error("this buffer daemon waits for memory in Redis: %s", error)
        await asyncio.sleep(FULL_S)
