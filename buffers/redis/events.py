"""A run's keys, read or deleted by a process that takes no part in the run.

The events are a Redis stream that the scripts append to, about 50 bytes an event; it is kept until
`forget` deletes the run.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from buffers.ledger.entries import Event, LedgerSnapshot
from buffers.redis import replies
from buffers.redis.connection import SCHEMA, RedisConnection, namespace, other_schema
from buffers.redis.topology import redacted
from streamrl.types import DropReason

PAGE = 1000


async def read_events(url: str, run: str, *, deadline_s: float = 60.0) -> AsyncIterator[Event]:
    """Every event of the run so far, oldest first."""
    after = "-"
    async with _connected(url, run, deadline_s) as connection:
        while True:
            command = ("XRANGE", f"{namespace(run)}events", after, "+", "COUNT", PAGE)
            page = (await connection.call("read_events", command))[0]
            for _, fields in page:
                yield _event(fields)
            if len(page) < PAGE:
                return
            after = f"({page[-1][0].decode()}"


async def read_snapshot(url: str, run: str, *, deadline_s: float = 60.0) -> LedgerSnapshot:
    """The totals of the run's ledger that an audit compares with its events.

    Raises:
        OtherReleaseError: the run has another schema.
    """
    names = ("schema", "granted", "unseen", "acknowledged")
    async with _connected(url, run, deadline_s) as connection:
        numbers, dropped, lengths = await connection.call(
            "read_snapshot",
            ("HMGET", f"{namespace(run)}state", *names),
            ("HGETALL", f"{namespace(run)}dropped"),
            ("HGETALL", f"{namespace(run)}lengths"),
        )
    schema, granted, unseen, acknowledged = (int(number or 0) for number in numbers)
    if granted and schema != SCHEMA:
        raise other_schema(redacted(url), schema or 1)
    return LedgerSnapshot(
        granted=granted,
        unseen=unseen,
        acknowledged=acknowledged,
        dropped={DropReason(reason.decode()): int(n) for reason, n in dropped.items()},
        lengths=replies.lengths((name.decode(), int(n)) for name, n in lengths.items()),
    )


async def forget(url: str, run: str, *, deadline_s: float = 60.0) -> int:
    """Delete every key of the run; returns how many there were."""
    cursor, num_keys = 0, 0
    async with _connected(url, run, deadline_s) as connection:
        while True:
            command = ("SCAN", cursor, "MATCH", f"{namespace(run)}*", "COUNT", PAGE)
            cursor, keys = (await connection.call("forget", command))[0]
            if keys:
                num_keys += (await connection.call("forget", ("UNLINK", *keys)))[0]
            if not int(cursor):
                return num_keys


@asynccontextmanager
async def _connected(url: str, run: str, deadline_s: float) -> AsyncIterator[RedisConnection]:
    connection = RedisConnection(url, run, deadline_s=deadline_s, retry_s=deadline_s)
    try:
        yield connection
    finally:
        await connection.close()


def _event(fields: dict[bytes, bytes]) -> Event:
    packed = fields[b"response_lengths"]
    return Event(
        prompt_index=int(fields[b"prompt_index"]),
        state=fields[b"state"].decode(),
        reason=fields[b"reason"].decode() or None,
        lease_id=fields[b"lease_id"].decode(),
        response_lengths=msgspec.msgpack.decode(packed, type=tuple[int, ...]) if packed else (),
    )
