"""`redis://`: the buffer in a Redis server, without a daemon of ours.

Invariant: Redis holds the whole state, and every change of it is one atomic script on the server
(`buffers/redis/lua`), so any client may die at any moment. A client keeps only its learner's term.
Redis >= 6.2; with AOF (`appendfsync always`) nothing is lost if the server dies.

A server may restart with an older state (AOF `everysec`, a snapshot). The learner is then refused,
because its term or version is ahead; it attaches again with its books, which bring the ledger up to
date. A lease that the older state does not contain is refused at the next heartbeat or put, and its
prompt is granted again.
"""

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import structs
from redis import exceptions

from buffers import messages
from buffers.quarantine import Quarantine
from buffers.redis import replies
from buffers.redis.connection import Command, RedisConnection, namespace, other_schema, script
from buffers.redis.memory_limit import RedisMemoryLimit
from buffers.redis.notifications import POLL_S, Notification, RedisNotifications
from buffers.redis.run_end import RunEnd
from streamrl import wire
from streamrl.errors import LedgerError, UnknownGeneratorError, WireError
from streamrl.types import (
    Books,
    BufferStats,
    DropReason,
    GeneratorStatus,
    GroupHeader,
    HeartbeatReply,
    Lease,
    OverduePolicy,
    PackedGroup,
    SchedulingState,
    TakenBatch,
    TrajectoryGroup,
    pack,
)

Result = TypeVar("Result")
MAX_PUTS = 4
FETCHED_AT_ONCE = 16
STAGED_LIFE_S = 600
LARGE_BYTES = 2**16


@dataclass(frozen=True)
class RedisSettings:
    """The settings of the ledger and of this client.

    Those of the ledger are stored when a learner attaches; until then a server uses any client's.
    `clock` is for tests: the scripts use it instead of the server's clock.
    """

    groups_per_step: int
    max_staleness: int
    overdue: OverduePolicy = OverduePolicy.WAIT
    final_version: int | None = None
    lease_ttl_s: float = 30.0
    max_group_bytes: int = wire.MAX_MESSAGE_BYTES
    quarantine: Path | None = None
    deadline_s: float = 60.0
    retry_s: float = 5.0
    clock: Callable[[], float] | None = None


class RedisBuffer:
    """Implements `streamrl.interfaces.TrajectoryBuffer` for the run of this name."""

    def __init__(self, url: str, run: str, settings: RedisSettings) -> None:
        self._namespace = namespace(run)
        self._settings = settings
        waits = {"deadline_s": settings.deadline_s, "retry_s": settings.retry_s}
        self._connection = RedisConnection(url, run, **waits)
        self._notifications = RedisNotifications(self._connection, self._namespace + "changed")
        self._memory_limit = RedisMemoryLimit(self._connection)
        self._puts = asyncio.Semaphore(MAX_PUTS)
        self._end = RunEnd()
        self._learner_term = 0

    async def lease(
        self, lease_ids: Sequence[str], generator_id: str, wait_s: float, learner_id: str = ""
    ) -> tuple[Lease, ...]:
        async def attempt() -> tuple[tuple[Lease, ...], float]:
            leases, expires_in_s = await self._call("lease", generator_id, learner_id, *lease_ids)
            return replies.leases(leases), replies.next_expiry_s(expires_in_s, POLL_S)

        return await self._wait_for(attempt, wait_s, lambda n: n.may_lease > 0)

    async def put(self, lease_id: str, group: TrajectoryGroup) -> None:
        payload = wire.encode(pack(group))
        try:
            packed = wire.decode(payload, PackedGroup, max_bytes=self._settings.max_group_bytes)
        except WireError as error:
            await self._refuse_malformed(lease_id, payload, error)
            raise
        async with self._puts:
            await self._put_payload(lease_id, packed.header(len(payload)), payload)

    async def release(self, lease_id: str, reason: DropReason, lengths: Sequence[int] = ()) -> None:
        packed = msgspec.msgpack.encode(tuple(lengths)) if lengths else b""
        await self._call("release", lease_id, reason, packed)

    async def heartbeat(self, status: GeneratorStatus) -> HeartbeatReply:
        held = [(x.lease_id, x.prompt_index, x.min_policy_version) for x in status.held]
        reply = await self._call(
            "heartbeat",
            status.generator_id,
            status.session,
            int(status.is_leaving),
            wire.encode(structs.replace(status, held=())),
            msgspec.msgpack.encode(held),
            *status.lease_ids,
        )
        answer, learner_term = replies.heartbeat_reply(reply)
        is_over = self._end.is_over(answer.finished, learner_term)
        return structs.replace(answer, finished=is_over)

    async def attach(
        self, policy_version: int, books: Books | None, learner_id: str = ""
    ) -> BufferStats:
        await self._memory_limit.read()
        packed = b"" if books is None else msgspec.msgpack.encode(books)
        call_id = uuid.uuid4().hex
        reply = await self._call("attach", policy_version, packed, call_id, learner_id)
        self._learner_term = reply[0]
        return replies.stats(reply[1])

    async def take(
        self,
        num_groups: int,
        policy_version: int,
        wait_s: float,
        *,
        with_payloads: bool = False,
        num_held: int | None = None,
    ) -> TakenBatch:
        """See the interface. Payloads are read in a second round trip, once their keys are known:
        a script would copy each one twice inside Redis and block other clients meanwhile."""
        held = -1 if num_held is None else num_held

        async def attempt() -> tuple[TakenBatch, float]:
            reply = await self._call("take", num_groups, policy_version, self._learner_term, held)
            return replies.taken(reply), POLL_S

        def may_take(n: Notification) -> bool:
            is_enough = n.num_buffered >= num_groups - (num_held or 0)
            return is_enough or n.learner_term != self._learner_term

        taken = await self._wait_for(attempt, wait_s, may_take)
        new = taken.headers[num_held or 0 :] if with_payloads else ()
        groups = await self.fetch([header.prompt_index for header in new])
        return structs.replace(taken, groups=groups)

    async def fetch(self, prompt_indices: Sequence[int]) -> tuple[TrajectoryGroup, ...]:
        payloads: list[bytes | None] = []
        for start in range(0, len(prompt_indices), FETCHED_AT_ONCE):
            keys = [self._payload_key(i) for i in prompt_indices[start : start + FETCHED_AT_ONCE]]
            payloads.extend((await self._connection.call("fetch", ("MGET", *keys)))[0])
        missing = [
            prompt_index
            for prompt_index, payload in zip(prompt_indices, payloads, strict=True)
            if payload is None
        ]
        if missing:
            raise LedgerError(f"no group is held for the prompts {missing}")
        return tuple(replies.group(payload) for payload in payloads if payload is not None)

    async def advance(self, policy_version: int) -> BufferStats:
        reply = await self._call("advance", policy_version, self._learner_term)
        return await self._with_refusal(replies.stats(reply))

    async def acknowledge(self, policy_version: int) -> None:
        await self._call("acknowledge", policy_version, self._learner_term)

    async def finish(self) -> None:
        await self._call("finish", self._learner_term)

    async def drain(self) -> None:
        await self._call("drain")

    async def set_scheduling_state(
        self, generator_id: str, scheduling_state: SchedulingState
    ) -> None:
        is_known, known = await self._call("set_scheduling_state", generator_id, scheduling_state)
        if not is_known:
            raise UnknownGeneratorError.among(generator_id, (name.decode() for name in known))

    async def stats(self) -> BufferStats:
        stats = replies.stats(await self._call("stats"))
        is_over = self._end.is_over(stats.finished, stats.books.learner_term)
        stats = structs.replace(stats, is_over=is_over)
        return await self._with_refusal(stats)

    async def close(self) -> None:
        await self._notifications.close()
        await self._connection.close()

    async def _with_refusal(self, stats: BufferStats) -> BufferStats:
        """With the reason why a payload of the mean size would have to wait, if it would."""
        books = stats.books
        num_groups = books.buffered + books.taken + books.trained
        refusal = await self._memory_limit.refusal(stats.num_bytes // max(1, num_groups))
        return structs.replace(stats, refusal=refusal)

    async def _put_payload(self, lease_id: str, header: GroupHeader, payload: bytes) -> None:
        """Waits for memory in Redis, until the deadline; sends an expired payload again."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._settings.deadline_s
        token = uuid.uuid4().hex
        is_large = len(payload) > LARGE_BYTES
        staged: Command = ("SET", f"{self._namespace}staged:{token}", payload, "EX", STAGED_LIFE_S)
        staging = staged if is_large else None
        first = (token, b"" if is_large else payload, lease_id, wire.encode(header))
        versions = (header.oldest_version, header.newest_version)
        facts = (header.group_id, header.prompt_index, *versions, header.num_bytes)
        fields = (*facts, msgspec.msgpack.encode(header.response_lengths))
        while True:
            await self._memory_limit.wait_for(len(payload))
            try:
                await self._call("put", *first, *fields, staging=staging)
                return
            except exceptions.OutOfMemoryError as error:
                full = self._memory_limit.full(len(payload))
                if loop.time() >= deadline:
                    raise full from error
            except _AgainError:
                continue
            await asyncio.sleep(POLL_S)

    async def _refuse_malformed(self, lease_id: str, payload: bytes, error: WireError) -> None:
        if self._settings.quarantine is not None:
            Quarantine(self._settings.quarantine).keep(lease_id, [payload], error)
        await self._call("refuse_malformed", lease_id)

    async def _wait_for(
        self,
        attempt: Callable[[], Awaitable[tuple[Result, float]]],
        wait_s: float,
        condition: Callable[[Notification], bool],
    ) -> Result:
        """The first answer that is not empty, or the last one when `wait_s` is over.

        Waits for a notification for which `condition` holds, or for the seconds that an empty
        answer returns (until an expiry, or POLL_S).
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        with self._notifications.subscribe(condition) as event:
            while True:
                event.clear()
                answer, retry_s = await attempt()
                remaining_s = deadline - loop.time()
                if answer or remaining_s <= 0:
                    return answer
                self._notifications.start()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(remaining_s, retry_s)):
                        await event.wait()

    async def _call(self, name: str, *arguments: Any, staging: Command | None = None) -> list[Any]:
        """The answer of one script call; raises the error that it names."""
        settings = self._settings
        now_s = "" if settings.clock is None else repr(settings.clock())
        final = -1 if settings.final_version is None else settings.final_version
        command: Command = (
            *("EVALSHA", script()[1], 1, f"{self._namespace}state", name, now_s),
            *(settings.lease_ttl_s, settings.groups_per_step, settings.max_staleness, final),
            tuple(OverduePolicy).index(settings.overdue),
            *arguments,
        )
        commands = (command,) if staging is None else (staging, command)
        answer: list[Any] = (await self._connection.call(name, *commands))[-1]
        kind, *reply = answer
        if kind == b"ok":
            return reply
        if kind == b"again":
            raise _AgainError
        if kind == b"full":
            raise exceptions.OutOfMemoryError
        if kind == b"schema":
            raise other_schema(self._connection.url, reply[0])
        raise messages.ErrorReply(kind.decode(), reply[0].decode()).exception()

    def _payload_key(self, prompt_index: int) -> str:
        return f"{self._namespace}payload:{prompt_index}"


class _AgainError(Exception):
    """The staged payload expired before the script ran."""
