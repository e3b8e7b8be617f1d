"""What an operation costs while 100 to 100,000 groups wait: in the ledger, and in `memory://`.

A cycle leases, puts and takes GROUPS_PER_STEP small groups and leaves the line as long as it was;
the median of the cycles counts. Called by `bench_buffer`.
"""

import asyncio
import statistics
import time
from collections.abc import Iterator

import msgspec

from buffers.ledger.ledger import Ledger
from buffers.ledger.state import BufferState
from buffers.memory import MemoryBuffer
from streamrl.types import GroupHeader, TrajectoryGroup
from tests.records import make_group

LENGTHS = (100, 1_000, 10_000, 100_000)
GROUPS_PER_STEP = 10
CYCLES = 100
OPERATIONS = ("lease", "put", "take", "advance")
TTL_S = 1e9

Costs = dict[str, float]


def measure() -> Iterator[dict[str, object]]:
    """A line per level and operation; `ratio` is the dearest length over the cheapest one's."""
    for level, cost in (("ledger", _ledger), ("memory", _memory)):
        costs = {length: cost(length) for length in LENGTHS}
        for operation in OPERATIONS:
            by_length = {length: round(1e6 * costs[length][operation], 2) for length in LENGTHS}
            yield {
                "case": "waiting groups",
                "level": level,
                "operation": operation,
                "ratio": round(max(by_length.values()) / by_length[LENGTHS[0]], 3),
                "limit": 1.5,
                "us_by_waiting": by_length,
            }


def _long_ledger(length: int) -> Ledger:
    """With room for `length` and a cycle more, and no group too old while we measure."""
    return Ledger(groups_per_step=GROUPS_PER_STEP, max_staleness=length // GROUPS_PER_STEP + CYCLES)


def _ledger(length: int) -> Costs:
    ledger, number = _long_ledger(length), 0
    header = GroupHeader.of(make_group(0))
    learner_term = ledger.attach(0)

    def lease() -> list[tuple[str, int]]:
        nonlocal number
        number += GROUPS_PER_STEP
        names = [f"g/{n}" for n in range(number, number + GROUPS_PER_STEP)]
        return [(name, ledger.lease(name, 0.0, TTL_S).prompt_index) for name in names]  # type: ignore[union-attr]

    def put(leases: list[tuple[str, int]]) -> None:
        for name, prompt_index in leases:
            ledger.put(name, msgspec.structs.replace(header, prompt_index=prompt_index), 0.0)

    for _ in range(length // GROUPS_PER_STEP):
        put(lease())
    timings: dict[str, list[float]] = {operation: [] for operation in OPERATIONS}
    for version in range(CYCLES):
        times = [time.perf_counter()]
        leases = lease()
        times.append(time.perf_counter())
        put(leases)
        times.append(time.perf_counter())
        assert len(ledger.take(GROUPS_PER_STEP, version, learner_term)) == GROUPS_PER_STEP
        times.append(time.perf_counter())
        ledger.advance(version + 1, learner_term)
        times.append(time.perf_counter())
        ledger.acknowledge(version + 1, learner_term)
        ledger.drain_freed()
        _book(timings, times)
    return _medians(timings)


def _memory(length: int) -> Costs:
    async def cycles() -> Costs:
        state = BufferState[TrajectoryGroup](_long_ledger(length), lease_ttl_s=TTL_S)
        buffer, group, number = MemoryBuffer(state), make_group(0), 0
        await buffer.attach(0, None)

        async def lease() -> list[tuple[str, int]]:
            nonlocal number
            number += GROUPS_PER_STEP
            names = [f"g/{n}" for n in range(number, number + GROUPS_PER_STEP)]
            leases = [lease for name in names for lease in await buffer.lease([name], "g", 0.0)]
            return [(lease.lease_id, lease.prompt_index) for lease in leases]

        async def put(leases: list[tuple[str, int]]) -> None:
            for name, prompt_index in leases:
                await buffer.put(name, msgspec.structs.replace(group, prompt_index=prompt_index))

        for _ in range(length // GROUPS_PER_STEP):
            await put(await lease())
        timings: dict[str, list[float]] = {operation: [] for operation in OPERATIONS}
        for version in range(CYCLES):
            times = [time.perf_counter()]
            leases = await lease()
            times.append(time.perf_counter())
            await put(leases)
            times.append(time.perf_counter())
            loan = await buffer.take(GROUPS_PER_STEP, version, 0.0)
            assert len(loan.headers) == GROUPS_PER_STEP
            times.append(time.perf_counter())
            await buffer.advance(version + 1)
            times.append(time.perf_counter())
            await buffer.acknowledge(version + 1)
            _book(timings, times)
        return _medians(timings)

    return asyncio.run(cycles())


def _book(timings: dict[str, list[float]], times: list[float]) -> None:
    for operation, start, end in zip(OPERATIONS, times[:-1], times[1:], strict=True):
        timings[operation].append((end - start) / GROUPS_PER_STEP)


def _medians(timings: dict[str, list[float]]) -> Costs:
    return {operation: statistics.median(values) for operation, values in timings.items()}
