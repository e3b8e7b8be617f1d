"""The Redis of a run: whether it answers, keeps what it is given, and agrees on the time.

Waits ANSWER_S for each answer at most.
"""

import asyncio
import time
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from msgspec import Struct

from streamrl.cli.doctor.findings import Finding, ok, problem, warn
from streamrl.config import RunConfig
from streamrl.errors import ConfigError

ANSWER_S = 2.0
SKEW_S = 1.0


class RedisFacts(Struct, frozen=True):
    """`skew_s` is how far its clock is ahead of this machine's; `maxmemory` is 0 for no limit."""

    version: str = ""
    is_aof: bool = False
    fsync: str = ""
    aof_error: str = ""
    policy: str = ""
    maxmemory: int = 0
    used_memory: int = 0
    skew_s: float = 0.0


def ask_redis(config: RunConfig) -> RedisFacts | str:
    """The facts of the server that `buffer.url` names, or why there are none."""
    if find_spec("redis") is None:
        return "the package redis is not installed: pip install 'streamrl[redis]'"
    from redis.exceptions import RedisError

    try:
        return asyncio.run(_ask(config.buffer.secret_url))
    except (RedisError, OSError, TimeoutError, ConfigError) as error:
        return str(error) or type(error).__name__


def check_redis(facts: RedisFacts | str, url: str) -> Iterator[Finding]:
    """`url` is shown, so it has no password."""
    if isinstance(facts, str):
        remedy = "start it, and see whether buffer.url, firewall and password are right"
        yield problem("redis", f"{url} does not answer: {facts}", remedy)
        return
    yield ok("redis", f"{url} answers: Redis {facts.version}")
    yield from _check_persistence(facts)
    yield from _check_memory(facts)
    yield from check_skew(facts.skew_s)


def check_skew(skew_s: float) -> Iterator[Finding]:
    if abs(skew_s) >= SKEW_S:
        yield warn(
            "clock skew",
            f"the clock of Redis is {abs(skew_s):.3g} s {'ahead' if skew_s > 0 else 'behind'}: "
            "times of logs and metrics do not compare",
            "run chronyd or systemd-timesyncd on both hosts, and streamrl doctor on each",
        )
    else:
        yield ok("clock skew", f"the clock of Redis is {abs(skew_s) * 1000:.0f} ms away")


def _check_persistence(facts: RedisFacts) -> Iterator[Finding]:
    if facts.aof_error:
        sentence = f"its last write of the append-only file failed: {facts.aof_error}"
        yield problem("redis persistence", sentence, "free disk space on the host of Redis")
    elif not facts.is_aof:
        yield problem(
            "redis persistence",
            "it keeps no append-only file: a restart loses the groups since the last snapshot",
            "redis-cli CONFIG SET appendonly yes, and appendonly yes in its configuration",
        )
    elif facts.fsync == "no":
        yield warn(
            "redis persistence",
            "appendfsync is no: a crash of its machine loses what the kernel has not written",
            "redis-cli CONFIG SET appendfsync everysec",
        )
    else:
        yield ok("redis persistence", f"append-only file, appendfsync {facts.fsync or 'unknown'}")


def _check_memory(facts: RedisFacts) -> Iterator[Finding]:
    if facts.maxmemory and facts.policy not in ("noeviction", ""):
        yield problem(
            "redis memory",
            f"maxmemory-policy is {facts.policy}: a full Redis would evict the run's groups",
            "redis-cli CONFIG SET maxmemory-policy noeviction",
        )
    elif facts.maxmemory and facts.used_memory > 0.8 * facts.maxmemory:
        sentence = f"{facts.used_memory / 2**20:.0f} of {facts.maxmemory / 2**20:.0f} MiB are used"
        yield warn("redis memory", sentence, "raise maxmemory, or delete runs that have ended")
    else:
        limit = f"{facts.maxmemory / 2**20:.0f} MiB" if facts.maxmemory else "no limit"
        yield ok("redis memory", f"maxmemory: {limit}, {facts.policy or 'noeviction'}")


async def _ask(url: str) -> RedisFacts:
    from buffers.redis.topology import RedisTopology

    topology = RedisTopology(url)
    client: Any = topology.client
    try:
        async with asyncio.timeout(2 * ANSWER_S):
            start_s = time.time()
            seconds, microseconds = await client.time()
            middle_s = (start_s + time.time()) / 2
            found = await client.info()
            fsync = await _fsync(client)
    finally:
        await topology.close()
    error = found.get("aof_last_write_status", "ok")
    return RedisFacts(
        version=str(found.get("redis_version", "")),
        is_aof=bool(found.get("aof_enabled")),
        fsync=fsync,
        aof_error="" if error == "ok" else str(error),
        policy=str(found.get("maxmemory_policy", "")),
        maxmemory=int(found.get("maxmemory", 0)),
        used_memory=int(found.get("used_memory", 0)),
        skew_s=seconds + microseconds / 1e6 - middle_s,
    )


async def _fsync(client: Any) -> str:
    """ "" where the user may not read the server's configuration."""
    from redis.exceptions import ResponseError

    try:
        found = await client.config_get("appendfsync")
    except ResponseError:
        return ""
    values = {_text(name): _text(value) for name, value in found.items()}
    return values.get("appendfsync", "")


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
