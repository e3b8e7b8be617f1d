"""`redis://`: a client of a run whose payloads and journal are in Redis.

The ledger is in a buffer daemon, whose address is in Redis (`buffers.redis.leadership`). Requests
go to the daemon, payloads to and from Redis. Invariant: a payload is in Redis before the daemon is
told its key, and has an expiry longer than the put may take, so it is kept exactly if a header
followed it.

`_follow` looks for a new address of the daemon every FOLLOW_S. If another daemon has taken over,
the client connects to it and sends its open requests again.
"""

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import zmq
from msgspec import structs
from redis import exceptions

from buffers import messages as m
from buffers.quarantine import Quarantine
from buffers.redis.connection import Command, RedisConnection, namespace
from buffers.redis.leadership import Daemon, find_daemon, require_usable
from buffers.redis.memory_limit import RedisMemoryLimit
from buffers.zmq.client import ZmqBuffer
from streamrl import wire
from streamrl.curve import choose_family, use_key
from streamrl.errors import LostMemoryError, StreamRLError, TransportError, WireError
from streamrl.types import (
    BufferStats,
    DropReason,
    PackedGroup,
    SiblingHeader,
    TrajectoryGroup,
    pack,
)

log = logging.getLogger(__name__)

FETCHED_AT_ONCE = 16
FOLLOW_S, FIRST_FOLLOW_S, POLL_S = 0.5, 0.05, 0.5
# Nobody waits for the answer to a put this long after the deadline.
LATE_S = 600


class RedisBuffer(ZmqBuffer):
    """Implements `streamrl.interfaces.TrajectoryBuffer` for the run of this name."""

    def __init__(
        self,
        url: str,
        run: str,
        *,
        deadline_s: float = 60.0,
        retry_s: float = 5.0,
        final_version: int | None = None,
        max_group_bytes: int = wire.MAX_MESSAGE_BYTES,
        quarantine: Path | None = None,
    ) -> None:
        """`quarantine` is the folder for malformed groups of this client."""
        self._connection = RedisConnection(url, run, deadline_s=deadline_s, retry_s=retry_s)
        super().__init__(
            self._connection.url,
            deadline_s=deadline_s,
            retry_s=retry_s,
            final_version=final_version,
        )
        self._run = run
        self._max_group_bytes = max_group_bytes
        self._quarantine = None if quarantine is None else Quarantine(quarantine)
        self._memory_limit = RedisMemoryLimit(self._connection)
        self._daemon: Daemon | None = None
        self._failure: StreamRLError | None = None
        self._unreachable: TransportError | None = None
        self._follower = asyncio.create_task(self._follow())

    async def put(self, lease_id: str, group: TrajectoryGroup) -> None:
        self._require_redis()
        payload = wire.encode(pack(group))
        try:
            packed = wire.decode(payload, PackedGroup, max_bytes=self._max_group_bytes)
        except WireError as error:
            if self._quarantine is not None:
                self._quarantine.keep(lease_id, [payload], error)
            await self.release(lease_id, DropReason.MALFORMED)
            raise
        async with self._puts:
            is_full = await self._memory_limit.refusal(len(payload))
            if is_full and (siblings := await super().fetch_siblings(lease_id)):
                # Otherwise a group whose siblings have filled Redis could never be put.
                await self._connection.call("put", ("UNLINK", *map(bytes, siblings)))
            key = await self._write(payload)
            stored = m.StoredGroup(packed.header(len(payload)), key)
            await self._call(m.PutRequest(lease_id), m.Done, 0.0, wire.encode(stored))

    async def put_sibling(self, sibling: SiblingHeader, payload: bytes) -> None:
        """Raises BufferFullError if there is no room for it now; only groups wait for room."""
        self._require_redis()
        if await self._memory_limit.refusal(len(payload)):
            raise self._memory_limit.full(len(payload))
        async with self._puts:
            key = await self._write(payload)
        await super().put_sibling(sibling, key)

    async def fetch_siblings(self, lease_id: str) -> tuple[bytes | memoryview, ...]:
        """The payloads of siblings; b"" for one that Redis has lost, which is sampled again."""
        keys = await super().fetch_siblings(lease_id)
        return tuple(payload or b"" for payload in await self._read_payloads(keys))

    async def advance(self, policy_version: int, steered_bound: int = 0) -> BufferStats:
        return await self._with_refusal(await super().advance(policy_version, steered_bound))

    async def stats(self) -> BufferStats:
        return await self._with_refusal(await super().stats())

    async def _with_refusal(self, stats: BufferStats) -> BufferStats:
        """Add the reason why a payload of mean size would have to wait, if it would."""
        books = stats.books
        num_groups = books.buffered + books.taken + books.trained
        refusal = await self._memory_limit.refusal(stats.num_bytes // max(1, num_groups))
        return structs.replace(stats, refusal=stats.refusal or refusal)

    async def close(self) -> None:
        self._follower.cancel()
        await asyncio.gather(self._follower, return_exceptions=True)
        await self._connection.close()
        await super().close()

    async def _call(
        self, request: m.Request, expected: type[m.Expected], wait_s: float = 0.0, *payloads: bytes
    ) -> tuple[m.Expected, list[memoryview]]:
        self._require_redis()
        return await super()._call(request, expected, wait_s, *payloads)

    def _likely_cause(self) -> str:
        if self._unreachable is not None:
            return str(self._unreachable)
        if self._daemon is None:
            return "no buffer daemon serves the run: `streamrl buffer` starts one"
        return f"its daemon at {self._daemon.url or 'an address not yet known'} does not answer"

    async def _follow(self) -> None:
        """Follow the daemon's address until cancelled, or until Redis refuses this client for good,
        which ends all calls.

        Waits FOLLOW_S between looks.
        """
        while True:
            try:
                if self._daemon is None:
                    await require_usable(self._connection, self._run)
                found = await find_daemon(self._connection, self._run)
            except TransportError as error:
                log.warning("%s", error)
                self._unreachable = error
                continue
            except StreamRLError as error:
                return self._fail(error)
            except exceptions.RedisError as error:
                return self._fail(TransportError(f"Redis at {self._url}: {error}"))
            self._unreachable = None
            if found is not None and found.url and found != self._daemon:
                self._reconnect(found.url, partial(_set_key, found))
                self._daemon = found
            await asyncio.sleep(FIRST_FOLLOW_S if self._daemon is None else FOLLOW_S)

    def _require_redis(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _fail(self, error: StreamRLError) -> None:
        self._failure = error
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(error)

    async def _write(self, payload: bytes) -> bytes:
        """Write a payload; return its key. Waits for memory in Redis, which acknowledged groups
        free; polls every POLL_S.

        Raises:
            BufferFullError: there was no room until the deadline.
        """
        key = f"{namespace(self._run)}payload:{uuid.uuid4().hex}".encode()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._deadline_s
        # NX: an attempt that arrives late must not set an expiry on a payload that is kept by then.
        command: Command = ("SET", key, payload, "EX", round(self._deadline_s) + LATE_S, "NX")
        while True:
            if await self._memory_limit.admits(len(payload)):
                with contextlib.suppress(exceptions.OutOfMemoryError):
                    await self._connection.call("put", command)
                    return key
            full = self._memory_limit.full(len(payload))
            if loop.time() >= deadline:
                raise full
            log.warning("waiting: %s", full)
            await asyncio.sleep(POLL_S)

    async def _groups(
        self, prompt_indices: Sequence[int], payloads: Sequence[Any]
    ) -> tuple[TrajectoryGroup, ...]:
        """Fetch groups. Raises LostMemoryError if Redis has lost or damaged some; the daemon is
        told, and these are sampled again."""
        groups: list[TrajectoryGroup] = []
        lost: list[int] = []
        read = await self._read_payloads(payloads)
        for prompt_index, payload in zip(prompt_indices, read, strict=True):
            try:
                groups += await super()._groups([prompt_index], [payload or b""])
            except WireError as error:
                log.warning("the group of prompt %d: %s", prompt_index, error)
                lost.append(prompt_index)
        if lost:
            await self._call(m.LostRequest(tuple(lost), self._learner_term), m.Done)
            raise LostMemoryError(f"Redis has lost the groups of the prompts {lost}")
        return tuple(groups)

    async def _read_payloads(self, keys: Sequence[Any]) -> list[bytes | None]:
        payloads: list[bytes | None] = []
        for start in range(0, len(keys), FETCHED_AT_ONCE):
            names = [bytes(key) for key in keys[start : start + FETCHED_AT_ONCE]]
            payloads += (await self._connection.call("fetch", ("MGET", *names)))[0]
        return payloads


def _set_key(daemon: Daemon, socket: "zmq.Socket[bytes]") -> None:
    choose_family(socket, daemon.url)
    if daemon.key:
        use_key(socket, daemon.key)
