"""Checks whether a payload still fits under Redis' `maxmemory`, before Redis refuses it.

Invariant: only payloads wait. The ledger's few bytes per group come out of RESERVE_BYTES, so
leases, heartbeats and acknowledgements (which free memory) always work. A reading is used for
READING_S. What other clients put meanwhile appears in the next reading, or makes Redis refuse the
put, which then waits, too.
"""

import asyncio

from redis import exceptions

from buffers.redis.connection import RedisConnection
from streamrl.errors import BufferFullError, ConfigError

READING_S = 1.0
RESERVE_BYTES = 2**20


class RedisMemoryLimit:
    """The memory of one server, as last read by one client."""

    def __init__(self, connection: RedisConnection) -> None:
        self._connection = connection
        self._limit = 0
        self._used = 0
        self._read_at_s = float("-inf")

    async def admits(self, num_bytes: int) -> bool:
        """Whether so many bytes fit; if so, they count as used until the next reading."""
        if not await self._fits(num_bytes):
            return False
        self._used += num_bytes
        return True

    async def refusal(self, num_bytes: int) -> str:
        """Why a payload of this size would have to wait; "" if it would not."""
        return "" if await self._fits(num_bytes) else str(self.full(num_bytes))

    async def _fits(self, num_bytes: int) -> bool:
        if asyncio.get_running_loop().time() - self._read_at_s > READING_S:
            await self.read()
        return not self._limit or self._used + num_bytes + RESERVE_BYTES <= self._limit

    async def read(self) -> None:
        """Read the server's memory.

        Raises:
            ConfigError: the server may evict keys of the run.
        """
        self._read_at_s = asyncio.get_running_loop().time()
        try:
            memory = (await self._connection.call("INFO", ("INFO", "memory")))[0]
        except exceptions.ResponseError:
            return
        self._used, self._limit = int(memory["used_memory"]), int(memory["maxmemory"])
        policy = memory["maxmemory_policy"]
        if self._limit and policy != "noeviction":
            raise ConfigError(
                f"buffer.url {self._connection.url}: its maxmemory-policy {policy} lets Redis "
                "throw groups away; it must be noeviction (CONFIG SET maxmemory-policy noeviction)"
            )

    def full(self, num_bytes: int) -> BufferFullError:
        """The error about a payload that does not fit. The next check reads the memory again."""
        self._read_at_s = float("-inf")
        return BufferFullError(
            f"a group of {num_bytes / 1e6:.3g} MB does not fit into Redis at "
            f"{self._connection.url}: maxmemory is {self._limit / 1e6:.4g} MB, "
            f"{self._used / 1e6:.4g} MB are used and "
            f"{RESERVE_BYTES / 1e6:.3g} MB reserved; raise it (CONFIG SET maxmemory, redis.conf), "
            "or lower learner.checkpoint.every: a checkpoint frees the groups it contains"
        )
