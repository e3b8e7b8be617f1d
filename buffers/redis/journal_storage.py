"""The journal of a run in Redis, beside its payloads: if a buffer daemon is lost with its machine,
one on another machine continues from it.

    fence          TERM:COMMIT, the name of the daemon that writes and the number of its last commit
    journal        hash: the format, the run's settings, the ledger's totals, and the next lease's
                   number
    entries        hash by prompt: its lease, state, header, siblings, and by their numbers (a
                   group's is -1) the keys of its payloads; or that it is free
    payload:UUID   a group or a sibling, written by its generator and read by the learner or another
                   generator
    events         hash by commit: its transitions; never deleted

Invariant: each commit is one transaction (MULTI), made only if the fence is as this daemon left it.
So only one of two daemons writes, and if the server has lost commits (a failover, a snapshot), this
is noticed before anything is added: `HandedOverError` is raised, and the daemon begins anew from
what the server has. A payload has no expiry exactly while an entry names it: generators write it
with an expiry, the commit that names it removes the expiry, and the commit that frees it deletes
it. So a payload that no header followed expires by itself, and no entry names a payload that is not
there.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import compress, islice
from typing import Any, TypeVar

import msgspec
from redis import exceptions

from buffers.journal.journal import (
    Changes,
    EntryRow,
    EventRow,
    JournalContent,
    events_of,
)
from buffers.ledger.entries import Event, LedgerSnapshot
from buffers.ledger.state import PayloadKey
from buffers.redis.connection import Command, RedisConnection, namespace
from streamrl.errors import (
    HandedOverError,
    OtherReleaseError,
    StorageError,
    TransportError,
)

# The format of a run's keys and values, raised with every change. Up to 6, the ledger was in Lua.
FORMAT = 10
PAGE = 1000
# The daemon's thread waits this long for Redis; then it refuses its clients, who ask again.
ANSWER_S, RETRY_S = 1.5, 1.0

Result = TypeVar("Result")
Item = TypeVar("Item")
_pack, _unpack = msgspec.msgpack.encode, msgspec.msgpack.decode


class RedisStorage:
    """Implements `buffers.journal.journal.JournalStorage` for the daemon that `term` belongs to.

    Calls wait for Redis, at most ANSWER_S, in a separate event loop; only one thread may call at a
    time.
    """

    place_type = bytes

    def __init__(self, url: str, run: str, term: str) -> None:
        self._run = asyncio.Runner()
        self._connection = RedisConnection(url, run, deadline_s=ANSWER_S, retry_s=RETRY_S)
        self.name = f"of the run {run} at {self._connection.url}"
        self._namespace = namespace(run)
        self._fence = self._namespace + "fence"
        self._term = term
        self._confirmed = self._attempted = 0
        self._uncertain: set[bytes] = set()
        self._next_number = 0

    def read(self) -> JournalContent:
        fence = self._wait(self._connection.call("read", ("GET", self._fence)))[0]
        _, self._confirmed = read_fence(fence)
        self._attempted = self._confirmed
        # From here on no other daemon changes what is read.
        self._require_ours(fence)
        journal, entries = (self._wait(self._read_hash(name)) for name in ("journal", "entries"))
        self._next_number = int(journal.get(b"next_number", 0))
        return JournalContent(
            settings=msgspec.json.decode(journal[b"settings"]) if b"settings" in journal else None,
            snapshot=_snapshot(journal),
            rows=map(msgspec.msgpack.Decoder(EntryRow).decode, entries.values()),
            next_number=self._next_number,
        )

    def recover(self, places: Mapping[PayloadKey, bytes]) -> dict[PayloadKey, bytes]:
        there: dict[PayloadKey, bytes] = {}
        for page in _pages(places.items()):
            keys = [key for _, key in page]
            found = self._wait(self._connection.call("recover", ("EXISTS", *keys)))
            if found[0] < len(page):
                each = (("EXISTS", key) for key in keys)
                found = self._wait(self._connection.call("recover", *each))
                page = tuple(compress(page, found))
            there.update(page)
        return there

    def stage(self, payloads: Sequence[bytes | memoryview]) -> list[bytes]:
        """Return the keys: generators have already written the payloads, and `payloads` are their
        keys."""
        return [bytes(key) for key in payloads]

    def commit(self, changes: Changes[bytes]) -> frozenset[PayloadKey]:
        number = self._attempted = self._attempted + 1
        commands: list[Command] = [("PERSIST", key) for key in changes.added.values()]
        commands += [("SET", self._fence, f"{self._term}:{number}"), *self._commands(changes)]
        self._uncertain |= set(changes.added.values())
        answers = self._wait(self._write(commands))[: len(changes.added)]
        # 0: it was persistent already, since this is a second attempt, or it does not exist.
        unsure = [i for i, is_new in zip(changes.added, answers, strict=True) if not is_new]
        there = self.recover({key: changes.added[key] for key in unsure})
        self._confirmed = number
        self._uncertain.clear()
        self._next_number = max(self._next_number, *(1 + row[0] for row in changes.events), 0)
        return frozenset(unsure) - there.keys()

    def close(self) -> None:
        self._run.run(self._connection.close())
        self._run.close()

    async def _read_hash(self, name: str) -> dict[bytes, bytes]:
        """Read a hash page by page, each within ANSWER_S."""
        found: dict[bytes, bytes] = {}
        cursor = 0
        while True:
            command = ("HSCAN", self._namespace + name, cursor, "COUNT", PAGE)
            cursor, page = (await self._connection.call("read", command))[0]
            found |= page
            if not cursor:
                return found

    async def _write(self, commands: list[Command]) -> list[Any]:
        """Run a commit's commands. If memory is full, delete freed payloads first; if the commit
        then fails for good, their groups are sampled again."""
        try:
            return await self._transact(commands)
        except exceptions.OutOfMemoryError:
            freeing = [command for command in commands if command[0] == "UNLINK"]
            if not freeing:
                raise
            await self._transact(freeing)
            return await self._transact(commands)

    async def _transact(self, commands: list[Command]) -> list[Any]:
        def if_ours(fence: bytes | None) -> list[Command]:
            self._require_ours(fence)
            return commands

        return await self._connection.transaction("commit", self._fence, if_ours, commands)

    def _commands(self, changes: Changes[bytes]) -> list[Command]:
        """The commands of a commit. They may run twice, and after those of a commit that only
        seemed to fail."""
        journal: dict[str, bytes | int] = {}
        if changes.settings is not None:
            journal |= {"format": FORMAT, "settings": msgspec.json.encode(changes.settings)}
        if changes.snapshot is not None:
            journal["snapshot"] = _pack(changes.snapshot)
        if changes.events:
            numbers = (1 + row[0] for row in changes.events)
            journal["next_number"] = max(self._next_number, *numbers)
        # Payloads named by a failed commit and freed since.
        freed = [*(self._uncertain - set(changes.added.values())), *changes.freed]
        commands: list[Command] = [
            *self._set("journal", journal),
            *self._set("entries", {row[0]: _pack(row) for row in changes.entries}),
        ]
        if changes.closed:
            commands.append(("HDEL", self._namespace + "entries", *changes.closed))
        if freed:
            commands.append(("UNLINK", *freed))
        if changes.events:
            # Overwrite what failed commits since then may have written: these events include
            # theirs.
            commands += self._set("events", {self._confirmed + 1: _pack(changes.events)})
        return commands

    def _set(self, name: str, values: Mapping[Any, bytes | int]) -> list[Command]:
        pairs = [word for pair in values.items() for word in pair]
        return [("HSET", self._namespace + name, *pairs)] if pairs else []

    def _require_ours(self, fence: bytes | None) -> None:
        """Raise HandedOverError unless the fence is as this daemon left it."""
        term, number = read_fence(fence)
        if term != self._term or not self._confirmed <= number <= self._attempted:
            raise HandedOverError(
                f"the journal {self.name} is at term and commit {term}:{number}, and this daemon "
                f"left it at {self._term}:{self._confirmed}: another daemon has taken over, or the "
                "server has lost its last commits"
            )

    def _wait(self, call: Coroutine[Any, Any, Result]) -> Result:
        try:
            return self._run.run(call)
        except (TransportError, exceptions.RedisError) as error:
            raise StorageError(f"the journal {self.name} cannot be written: {error}") from error


def read_fence(fence: bytes | None) -> tuple[str, int]:
    """The term in a fence, and the number of its last commit."""
    term, _, number = (fence or b":0").decode().partition(":")
    return term, int(number)


async def require_format(connection: RedisConnection, run: str) -> None:
    """Raise OtherReleaseError if another release has written the run."""
    command = ("HGET", f"{namespace(run)}journal", "format")
    old = ("EXISTS", f"{namespace(run)}state")
    found, is_old = await connection.call("read", command, old)
    if is_old or int(found or FORMAT) != FORMAT:
        what = f"run.name: the run {run} at {connection.url}"
        remedy = "start the run anew with --new (or streamrl buffer books --forget)"
        raise OtherReleaseError.of(what, 6 if is_old else int(found), FORMAT, remedy)


async def read_snapshot(url: str, run: str, *, deadline_s: float = 60.0) -> LedgerSnapshot:
    """The totals of the run's ledger; blank if there is no run.

    Raises:
        OtherReleaseError: another release has written the run.
    """
    async with connected(url, run, deadline_s) as connection:
        await require_format(connection, run)
        command = ("HGETALL", f"{namespace(run)}journal")
        return _snapshot((await connection.call("read", command))[0])


async def read_events(url: str, run: str) -> AsyncIterator[Event]:
    """Every event of the run so far, oldest first."""
    key = f"{namespace(run)}events"
    async with connected(url, run) as connection:
        found = (await connection.call("read_events", ("HKEYS", key)))[0]
        for numbers in _pages(sorted(map(int, found))):
            command: Command = ("HMGET", key, *numbers)
            for commit in (await connection.call("read_events", command))[0]:
                rows: list[EventRow] = _unpack(commit, type=list[EventRow])
                for _, prompt_index, lease_id, letters, lengths in rows:
                    for event in events_of(prompt_index, lease_id, letters, lengths):
                        yield event


async def forget(url: str, run: str, *, deadline_s: float = 60.0) -> int:
    """Delete every key of the run; return how many there were."""
    cursor, num_keys = 0, 0
    async with connected(url, run, deadline_s) as connection:
        while True:
            command = ("SCAN", cursor, "MATCH", f"{namespace(run)}*", "COUNT", PAGE)
            cursor, keys = (await connection.call("forget", command))[0]
            if keys:
                num_keys += (await connection.call("forget", ("UNLINK", *keys)))[0]
            if not int(cursor):
                return num_keys


@asynccontextmanager
async def connected(url: str, run: str, deadline_s: float = 60.0) -> AsyncIterator[RedisConnection]:
    connection = RedisConnection(url, run, deadline_s=deadline_s, retry_s=deadline_s)
    try:
        yield connection
    finally:
        await connection.close()


def _pages(items: Iterable[Item]) -> Iterator[tuple[Item, ...]]:
    """Yield pages of at most PAGE items."""
    rest = iter(items)
    while page := tuple(islice(rest, PAGE)):
        yield page


def _snapshot(journal: Mapping[bytes, bytes]) -> LedgerSnapshot:
    packed = journal.get(b"snapshot")
    return _unpack(packed, type=LedgerSnapshot) if packed else LedgerSnapshot()
