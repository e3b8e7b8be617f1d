"""A load of synthetic generators and a learner, which runs in real and in simulated time alike.

The generators lease, sleep as long as an engine would sample, put, and report every second; their
first groups are as good as begun before, so that they do not all end together. The
learner takes a batch, its ranks fetch their shares, it sleeps as long as it would train, advances,
and publishes a version, which all generators have `weights_s` later. Everything else is the
buffer's: whoever has a client for `run` and an event loop gets its outcome.
"""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from streamrl.types import (
    Books,
    BufferStats,
    GeneratorStatus,
    GroupHeader,
    HeartbeatReply,
    Lease,
    TakenBatch,
)

BYTES_A_TOKEN = 13
HEARTBEAT_S = 1.0
LEASE_WAIT_S = 5.0
TAKE_WAIT_S = 10.0


class Load(Struct, frozen=True, kw_only=True):
    """Lengths of answers are log-normal, in tokens; one group takes as long as its longest answer.

    A step is over `groups_per_step` groups and takes the learner `step_s` beside what it waits for.
    `seconds` are those of the run, of which the first `warm_s` are not counted.
    """

    generators: int
    groups_at_once: int = 4
    group_size: int = 8
    median_tokens: float = 1000.0
    sigma: float = 0.8
    max_tokens: int = 16_000
    tokens_per_s: float = 50.0
    groups_per_step: int
    max_staleness: int = 8
    step_s: float
    checkpoint_every: int = 5
    ranks: int = 1
    weights_s: float = 0.5
    seconds: float = 60.0
    warm_s: float = 20.0
    seed: int = 0

    def lengths(self, rng: np.random.Generator, groups: int = 1) -> NDArray[np.int64]:
        """[groups, group_size] in tokens."""
        drawn = rng.lognormal(np.log(self.median_tokens), self.sigma, (groups, self.group_size))
        return np.clip(drawn, 1, self.max_tokens).astype(np.int64)

    @property
    def means(self) -> tuple[float, float]:
        """Of a group: the seconds that it takes, and its bytes."""
        lengths = self.lengths(np.random.default_rng(0), 20_000)
        seconds = lengths.max(axis=1).mean() / self.tokens_per_s
        return float(seconds), float(lengths.sum(axis=1).mean() * BYTES_A_TOKEN)

    @property
    def possible(self) -> float:
        """Groups/s of generators that never wait."""
        return self.generators * self.groups_at_once / self.means[0]


class Outcome(Struct, frozen=True, kw_only=True):
    """`staleness` is the mean, in versions, of the oldest tokens of the groups that were counted;
    `waiting` the part of the time in which the learner waited for groups or payloads."""

    groups_per_s: float
    staleness: float
    waiting: float
    num_trained: int
    num_trained_twice: int
    books: Books


class Client(Protocol):
    """The part of `streamrl.interfaces.TrajectoryBuffer` that a load needs; a group as lengths."""

    async def lease(
        self, lease_ids: Sequence[str], generator_id: str, wait_s: float
    ) -> tuple[Lease, ...]: ...
    async def heartbeat(self, status: GeneratorStatus) -> HeartbeatReply: ...
    async def put_header(self, lease_id: str, header: GroupHeader) -> None: ...
    async def attach(self, policy_version: int, books: Books | None) -> BufferStats: ...
    async def take(self, num_groups: int, policy_version: int, wait_s: float) -> TakenBatch: ...
    async def fetch_headers(self, headers: Sequence[GroupHeader]) -> None: ...
    async def advance(self, policy_version: int, steered_bound: int = 0) -> BufferStats: ...
    async def acknowledge(self, policy_version: int) -> None: ...
    async def close(self) -> None: ...


class Weights:
    """The version that the generators have."""

    def __init__(self, delay_s: float) -> None:
        self.version = 0
        self._delay_s = delay_s
        self._arrivals: dict[int, asyncio.Event] = {}

    def publish(self, version: int) -> None:
        asyncio.get_running_loop().call_later(self._delay_s, self._arrive, version)

    async def wait_for(self, version: int) -> None:
        while self.version < version:
            await self._arrivals.setdefault(version, asyncio.Event()).wait()

    def _arrive(self, version: int) -> None:
        self.version = version
        for waited in [waited for waited in self._arrivals if waited <= version]:
            self._arrivals.pop(waited).set()


class Generator:
    def __init__(
        self, name: str, load: Load, buffer: Client, weights: Weights, seed: Sequence[int]
    ) -> None:
        self._name, self._load, self._buffer, self._weights = name, load, buffer, weights
        self._rng = np.random.default_rng(seed)
        self._held: dict[str, Lease] = {}
        self._has_room = asyncio.Event()
        self._num_begun = 0

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._send_heartbeats())
            for number in itertools.count():
                while len(self._held) >= self._load.groups_at_once:
                    self._has_room.clear()
                    await self._has_room.wait()
                room = self._load.groups_at_once - len(self._held)
                ids = [f"{self._name}/{number}.{slot}" for slot in range(room)]
                for lease in await self._buffer.lease(ids, self._name, LEASE_WAIT_S):
                    self._held[lease.lease_id] = lease
                    tasks.create_task(self._make(lease))

    async def _send_heartbeats(self) -> None:
        await asyncio.sleep(float(self._rng.uniform(0.0, HEARTBEAT_S)))
        while True:
            status = GeneratorStatus(
                generator_id=self._name,
                session=self._name,
                policy_version=self._weights.version,
                lease_ids=tuple(self._held),
                lease_ages_s=(1.0,) * len(self._held),
                lease_num_tokens=(100,) * len(self._held),
            )
            await self._buffer.heartbeat(status)
            await asyncio.sleep(HEARTBEAT_S)

    async def _make(self, lease: Lease) -> None:
        await self._weights.wait_for(lease.min_policy_version)
        oldest = self._weights.version
        lengths = tuple(map(int, self._load.lengths(self._rng)[0]))
        is_first = self._num_begun < self._load.groups_at_once
        self._num_begun += 1
        part = self._rng.uniform() if is_first else 1.0
        await asyncio.sleep(part * max(lengths) / self._load.tokens_per_s)
        header = GroupHeader(
            group_id=lease.lease_id,
            prompt_index=lease.prompt_index,
            environment="scale",
            oldest_version=oldest,
            newest_version=self._weights.version,
            lengths=lengths,
            response_lengths=lengths,
            rewards=(0.0,) * len(lengths),
            num_bytes=sum(lengths) * BYTES_A_TOKEN,
        )
        await self._buffer.put_header(lease.lease_id, header)
        del self._held[lease.lease_id]
        self._has_room.set()


class Learner:
    def __init__(self, load: Load, ranks: Sequence[Client], weights: Weights) -> None:
        self._load, self._ranks, self._weights = load, ranks, weights
        self._steps: list[tuple[float, float, list[int]]] = []
        self._seen: set[int] = set()
        self._num_trained = 0
        self.stats: BufferStats | None = None

    async def run(self, until_s: float) -> None:
        loop, first = asyncio.get_running_loop(), self._ranks[0]
        self.stats = await first.attach(0, None)
        version, began_s = 0, loop.time()
        while loop.time() < until_s:
            batch = await first.take(self._load.groups_per_step, version, TAKE_WAIT_S)
            if not batch.headers:
                continue
            count = len(self._ranks)
            shares = [batch.headers[rank::count] for rank in range(count)]
            readers = zip(self._ranks, shares, strict=True)
            await asyncio.gather(*(rank.fetch_headers(share) for rank, share in readers if share))
            waited_s = loop.time() - began_s
            await asyncio.sleep(self._load.step_s)
            self._note(batch.headers, version, waited_s)
            version += 1
            self.stats = await first.advance(version)
            self._weights.publish(version)
            if version % self._load.checkpoint_every == 0:
                await first.acknowledge(version)
            began_s = loop.time()

    def _note(self, headers: Sequence[GroupHeader], version: int, waited_s: float) -> None:
        lags = [version - header.oldest_version for header in headers]
        self._steps.append((asyncio.get_running_loop().time(), waited_s, lags))
        self._seen.update(header.prompt_index for header in headers)
        self._num_trained += len(headers)

    def outcome(self, from_s: float) -> Outcome:
        counted = [step for step in self._steps if step[0] >= from_s]
        assert len(counted) > 1, "the run is too short for two steps"
        assert self.stats is not None
        took_s = counted[-1][0] - counted[0][0]
        return Outcome(
            groups_per_s=sum(len(lags) for *_, lags in counted[1:]) / took_s,
            staleness=float(np.mean([lag for *_, lags in counted[1:] for lag in lags])),
            waiting=sum(waited_s for _, waited_s, _ in counted[1:]) / took_s,
            num_trained=self._num_trained,
            num_trained_twice=self._num_trained - len(self._seen),
            books=self.stats.books,
        )


async def run(load: Load, connect: Callable[[], Client]) -> Outcome:
    """What the learner saw from `warm_s` on. Each generator and rank has a client of its own."""
    loop, weights = asyncio.get_running_loop(), Weights(load.weights_s)
    began_s = loop.time()
    ranks = [connect() for _ in range(load.ranks)]
    clients = [connect() for _ in range(load.generators)]
    generators = [
        loop.create_task(Generator(f"g{i}", load, buffer, weights, (load.seed, i)).run())
        for i, buffer in enumerate(clients)
    ]
    learner = Learner(load, ranks, weights)
    try:
        await learner.run(began_s + load.seconds)
    finally:
        for task in generators:
            task.cancel()
        results = await asyncio.gather(*generators, return_exceptions=True)
        for client in (*clients, *ranks):
            await client.close()
    failed = [error for error in results if not isinstance(error, asyncio.CancelledError)]
    assert not failed, failed[:3]
    return learner.outcome(began_s + load.warm_s)
