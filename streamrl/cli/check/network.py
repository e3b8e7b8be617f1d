"""Checks that the run can listen at its addresses, read its keys and reach its servers, and that
its Redis keeps what it is given. Waits ANSWER_S for a connection, 2 REDIS_S for Redis's answers.
"""

import asyncio
import errno
import socket
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from msgspec import Struct, ValidationError, convert
from msgspec.structs import replace

from streamrl.config import RunConfig
from streamrl.config.addresses import bound_socket, host_of, places_of, port_of
from streamrl.config.secrets import REDIS_PASSWORD
from streamrl.curve import read_key
from streamrl.errors import ConfigError, StreamRLError
from streamrl.extras import not_installed
from streamrl.findings import CONFIGURATION, MACHINE, Finding

ANSWER_S = 0.8
_REDIS_PORTS = {"redis+sentinel": 26379}


def check_addresses(config: RunConfig) -> Iterator[Finding]:
    """Check the addresses at which the run's processes listen here; those on other machines are
    checked there."""
    url, address = config.buffer.url, config.weights.address
    if config.buffer.binds_url:
        yield from check_listening("buffer.url", url)
    yield from check_listening("weights.address", address)
    prometheus, agent = config.tracking.prometheus, config.generator.agent
    if prometheus.enabled:
        yield from check_listening("tracking.prometheus.host", f"tcp://{prometheus.host}:0")
    if any(entry.environment == "agent" for entry in config.entries):
        yield from check_listening("generator.agent.host", f"tcp://{agent.host}:0")
        yield from CONFIGURATION.refusal(lambda: agent.token)
    if config.buffer.curve is not None:
        yield from _check_keys(config.buffer.curve)
    yield CONFIGURATION.ok(f"buffer.url: {url}; weights.address: {address}")


def check_servers(config: RunConfig) -> Iterator[Finding]:
    """Check Redis and the inference servers that run elsewhere. Waits ANSWER_S for each server."""
    if config.buffer.url.startswith("redi"):
        yield from _check_redis(config)
    for url in config.generator.urls:
        host, port = next(places_of(url))
        default = 443 if url.startswith("https") else 80
        if reason := _unreachable(host, int(port or default)):
            setting = f"generator.{config.generator.engine}"
            yield CONFIGURATION.warning(
                f"{setting}.url: {url} does not answer ({reason}); generators wait for it for "
                f"{setting}.start_timeout_s"
            )


def check_secrets(config: RunConfig, origin: str | None) -> Iterator[Finding]:
    """Check that Redis's password is where others cannot read it. `origin` is where buffer.url was
    set."""
    buffer = config.buffer
    if buffer.password_of_url and origin is not None and not origin.startswith("environment"):
        is_typed = origin.startswith("--set")
        reader = "other users of this machine" if is_typed else "readers of a file"
        yield CONFIGURATION.warning(
            f"buffer.url: holds a password, which {reader} can see; it is written nowhere else. "
            f"Give it as {REDIS_PASSWORD} in the environment, or as buffer.password_file"
        )
    if buffer.password_file is not None:
        yield from _check_private("buffer.password_file", buffer.password_file)


def check_listening(setting: str, address: str) -> Iterator[Finding]:
    host, port = host_of(address), port_of(address)
    try:
        bound_socket(host, port).close()
    except OSError as error:
        refuse = error.errno == errno.EACCES
        yield (CONFIGURATION.problem if refuse else CONFIGURATION.warning)(
            f"{setting}: cannot listen at {address} here: {error.strerror}"
        )


def _check_keys(folder: Path) -> Iterator[Finding]:
    if not folder.is_dir():
        yield CONFIGURATION.problem(
            f"buffer.curve: there is no folder {folder}; `streamrl keys new` makes it"
        )
        return
    for name in ("server.public", "client.public", "client.secret", "server.secret"):
        try:
            read_key(folder, name)
        except ConfigError as error:
            # Generators do not need the server's secret and should not have it.
            is_absent = name == "server.secret" and isinstance(error.__cause__, OSError)
            yield (CONFIGURATION.warning if is_absent else CONFIGURATION.problem)(str(error))
            continue
        if name.endswith("secret"):
            yield from _check_private("buffer.curve", folder / name)


def _check_private(setting: str, file: Path) -> Iterator[Finding]:
    try:
        mode = file.stat().st_mode & 0o777
    except OSError as error:
        yield CONFIGURATION.problem(f"{setting}: cannot read {file}: {error.strerror}")
        return
    if mode & 0o077:
        yield CONFIGURATION.warning(
            f"{setting}: {file} has mode {mode:04o}, so that other users can read it: chmod 600"
        )


def _check_redis(config: RunConfig) -> Iterator[Finding]:
    if found := list(CONFIGURATION.refusal(lambda: config.buffer.secret_url)):
        yield from found
        return
    url = config.buffer.url
    default = _REDIS_PORTS.get(url.partition("://")[0], 6379)
    reasons = [_unreachable(host, int(port or default)) for host, port in places_of(url)]
    if all(reasons):
        remedy = "start it, and see whether buffer.url and the firewall are right"
        yield MACHINE.problem(f"buffer.url: no Redis answers at {url}: {reasons[0]}", remedy)
        return
    try:
        asyncio.run(_require_usable(config))
    except ConfigError as error:
        yield CONFIGURATION.problem(str(error))
        return
    except (StreamRLError, ImportError, TimeoutError) as error:
        yield CONFIGURATION.warning(f"buffer.url: {url} does not answer yet: {error}")
    yield from check_redis(ask_redis(config), url)


async def _require_usable(config: RunConfig) -> None:
    from buffers.redis.connection import RedisConnection
    from buffers.redis.leadership import require_usable

    url, run = config.buffer.secret_url, config.run.name
    connection = RedisConnection(url, run, deadline_s=ANSWER_S, retry_s=ANSWER_S)
    try:
        async with asyncio.timeout(2 * ANSWER_S):
            await require_usable(connection, run)
    finally:
        await connection.close()


def _unreachable(host: str, port: int) -> str:
    """Return why no connection can be made; "" if one can. Waits ANSWER_S."""
    try:
        with socket.create_connection((host, port), ANSWER_S):
            return ""
    except OSError as error:
        return error.strerror or str(error)


REDIS_S = 2.0


class RedisFacts(Struct, frozen=True):
    """What the server reports under these names. `appendfsync` is "" if the user may not read it,
    `maxmemory` is 0 for no limit."""

    redis_version: str | float = ""
    aof_enabled: bool = False
    appendfsync: str = ""
    aof_last_write_status: str = "ok"
    maxmemory_policy: str = "noeviction"
    maxmemory: int = 0
    used_memory: int = 0


def ask_redis(config: RunConfig) -> RedisFacts | str:
    """Return the facts about the server that `buffer.url` names, or why there are none."""
    if find_spec("redis") is None:
        return str(not_installed("the client", "redis"))
    from redis.exceptions import RedisError

    try:
        return asyncio.run(_ask(config.buffer.secret_url))
    except (RedisError, OSError, TimeoutError, ConfigError, ValidationError) as error:
        return str(error) or type(error).__name__


def check_redis(facts: RedisFacts | str, url: str) -> Iterator[Finding]:
    """Check the facts about Redis. `url` is shown, so it must not contain a password."""
    if isinstance(facts, str):
        remedy = "start it, and see whether buffer.url, firewall and password are right"
        yield MACHINE.problem(f"{url} does not answer: {facts}", remedy, cause="redis")
        return
    yield MACHINE.ok(f"{url} answers: Redis {facts.redis_version}", cause="redis")
    yield replace(_of_persistence(facts), cause="redis persistence")
    yield replace(_of_memory(facts), cause="redis memory")


def _of_persistence(facts: RedisFacts) -> Finding:
    if (status := facts.aof_last_write_status) != "ok":
        sentence = f"Redis: the last write of the append-only file failed: {status}"
        return MACHINE.problem(sentence, "free disk space on the host of Redis")
    if not facts.aof_enabled:
        return MACHINE.problem(
            "Redis keeps no append-only file: a restart loses the groups since the last snapshot",
            "redis-cli CONFIG SET appendonly yes, and appendonly yes in its configuration",
        )
    if facts.appendfsync == "no":
        return MACHINE.warning(
            "Redis has appendfsync no: a crash of its machine loses what is not on the disk yet",
            "redis-cli CONFIG SET appendfsync everysec",
        )
    return MACHINE.ok(f"append-only file, appendfsync {facts.appendfsync or 'unknown'}")


def _of_memory(facts: RedisFacts) -> Finding:
    policy = facts.maxmemory_policy
    if facts.maxmemory and policy != "noeviction":
        return MACHINE.problem(
            f"Redis: maxmemory-policy is {policy}: when full it would evict the run's groups",
            "redis-cli CONFIG SET maxmemory-policy noeviction",
        )
    if facts.maxmemory and facts.used_memory > 0.8 * facts.maxmemory:
        used, room = facts.used_memory / 2**20, facts.maxmemory / 2**20
        sentence = f"Redis: {used:.0f} of {room:.0f} MiB are used"
        return MACHINE.warning(sentence, "raise maxmemory, or delete runs that have ended")
    limit = f"{facts.maxmemory / 2**20:.0f} MiB" if facts.maxmemory else "no limit"
    return MACHINE.ok(f"maxmemory: {limit}, {policy}")


async def _ask(url: str) -> RedisFacts:
    from redis.exceptions import ResponseError

    from buffers.redis.topology import RedisTopology

    topology = RedisTopology(url)
    client: Any = topology.client
    fsync: dict[str, str] = {}
    try:
        async with asyncio.timeout(2 * REDIS_S):
            found = await client.info()
            with suppress(ResponseError):
                fsync = await client.config_get("appendfsync")
    finally:
        await topology.close()
    return convert({**found, **fsync}, RedisFacts, strict=False)
