"""The connection to a run's Redis server; repeats commands until they are answered.

Invariant: a call either returns the server's answer or raises within its deadline; it may be sent
twice. While Redis is unavailable (restarting, stopped, failing over) calls wait here.
"""

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias, TypeVar

from redis import exceptions
from redis.asyncio import Redis

from buffers.redis.topology import RedisTopology, redacted
from buffers.zmq.client import Stops
from streamrl.config.secrets import REDIS_PASSWORD
from streamrl.errors import ConfigError, TransportError

log = logging.getLogger(__name__)

Command: TypeAlias = tuple[bytes | str | int | float, ...]
Answer = TypeVar("Answer")
FIRST_DELAY_S, LONGEST_DELAY_S = 0.05, 2.0
SLOWEST_BYTES_PER_S, SLOWEST_WORDS_PER_S = 10e6, 1e5

_UNAVAILABLE = (
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.ReadOnlyError,
    exceptions.ClusterDownError,
    exceptions.TryAgainError,
    exceptions.AskError,
    OSError,
)
_REFUSED = (
    exceptions.AuthenticationError,
    exceptions.AuthorizationError,
    exceptions.AuthenticationWrongNumberOfArgsError,
    exceptions.NoPermissionError,
)
# A full disk, or a server that is busy, has become a replica, or has lost its replicas.
_UNAVAILABLE_WORDS = ("MISCONF", "BUSY", "READONLY", "MASTERDOWN", "NOREPLICAS")


def namespace(run: str) -> str:
    """The prefix of a run's keys; the braces keep them in one slot of a cluster."""
    return f"streamrl:{{{run}}}:"


class RedisConnection:
    """One client's connections. `retry_s` is how long the first attempt waits for an answer."""

    def __init__(self, url: str, run: str, *, deadline_s: float, retry_s: float) -> None:
        self.url = redacted(url)
        self.deadline_s = deadline_s
        self._topology = RedisTopology(url)
        self._exists: Command = ("EXISTS", namespace(run) + "fence")
        self._retry_s = retry_s

    async def close(self) -> None:
        await self._topology.close()

    async def call(self, name: str, *commands: Command) -> list[Any]:
        """Send commands in one pipeline; return their answers. See `run`."""

        async def send(client: "Redis") -> list[Any]:
            if len(commands) == 1:
                return [await client.execute_command(*commands[0])]
            pipeline = client.pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)
            return list(await pipeline.execute())

        return await self.run(name, send, _work_s(commands))

    async def transaction(
        self,
        name: str,
        key: str,
        commands_for: Callable[[bytes | None], list[Command]],
        alike: Sequence[Command] = (),
    ) -> list[Any]:
        """Run all of the commands or none; return their answers. See `run`.

        `commands_for` makes the commands for the current value of `key`, or raises. `alike` are
        commands of the same number and size, from which the time is estimated.
        """

        async def send(client: "Redis") -> list[Any]:
            async with client.pipeline(transaction=True) as pipeline:
                await pipeline.watch(key)
                commands = commands_for(await pipeline.immediate_execute_command("GET", key))
                pipeline.multi()
                for command in commands:
                    pipeline.execute_command(*command)
                return list(await pipeline.execute())

        return await self.run(name, send, _work_s(alike))

    async def run(
        self, name: str, send: Callable[["Redis"], Awaitable[Answer]], work_s: float = 0.0
    ) -> Answer:
        """Return what `send` returns; it asks the node that holds the run.

        Waits until the deadline, and after each failure twice as long before the next attempt.
        `work_s`, the time that an attempt takes in any case, is added to the deadline and to each
        attempt's time-out.

        Raises:
            TransportError: there was no answer until the deadline of this connection.
            ConfigError: the server refuses this user.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.deadline_s + work_s
        retry_timeout_s = self._retry_s + work_s
        delay_s, stops = FIRST_DELAY_S, Stops()
        while True:
            client, begun_s = self._topology.client, loop.time()
            timeout_s = min(deadline - begun_s, retry_timeout_s)
            try:
                async with asyncio.timeout(timeout_s):
                    if client is not self._topology.holder:
                        await client.execute_command(*self._exists)
                        self._topology.holder = client
                    return await send(client)
            except exceptions.WatchError:
                continue
            except (exceptions.RedisError, OSError) as error:
                if isinstance(error, exceptions.MovedError):
                    self._topology.follow(error)
                else:
                    self._raise_if_final(error)
                    self._topology.switch_node(client)
                deadline += stops.lost_s(loop.time() - begun_s, timeout_s)
                if loop.time() + delay_s >= deadline:
                    raise self._timed_out(name, error) from error
                message = _summary(error)
                log.warning("no answer from Redis at %s to %s: %s", self.url, name, message)
            retry_timeout_s *= 2
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, LONGEST_DELAY_S)

    def _raise_if_final(self, error: Exception) -> None:
        """Raise errors that no later attempt can avoid."""
        message = str(error)
        if isinstance(error, _REFUSED):
            raise ConfigError(
                f"buffer.url {self.url}: Redis refuses this user: {message}; it needs the right "
                f"password ({REDIS_PASSWORD} or buffer.password_file), and an ACL such as "
                "~streamrl:* resetchannels &streamrl:* +@all -@admin"
            ) from error
        if reason := _certificate_error(error):
            raise ConfigError(
                f"buffer.url {self.url}: the server's certificate is not trusted: {reason}; name "
                "the authority that signed it: rediss://host:port/0?ssl_ca_certs=FILE"
            ) from error
        if not (
            isinstance(error, _UNAVAILABLE) or any(word in message for word in _UNAVAILABLE_WORDS)
        ):
            raise error

    def _timed_out(self, name: str, error: Exception) -> TransportError:
        return TransportError(
            f"Redis at {self.url} has not answered {name} for {self.deadline_s:g} s "
            f"({_summary(error)}): is it running, and is buffer.url right?"
        )


def _work_s(commands: Sequence[Command]) -> float:
    """The time that a slow server needs for these commands; some commits free 100,000 groups."""
    num_bytes = sum(len(word) for c in commands for word in c if isinstance(word, bytes))
    return num_bytes / SLOWEST_BYTES_PER_S + sum(map(len, commands)) / SLOWEST_WORDS_PER_S


def _certificate_error(error: BaseException | None) -> str:
    """Why TLS rejects the server's certificate, if that caused the error; else ""."""
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return error.verify_message
        error = error.__cause__ or error.__context__
    return ""


def _summary(error: Exception) -> str:
    """The first sentence of Redis' message, without the sentinel clients that it lists."""
    return str(error).partition(". ")[0].partition(" : <")[0] or type(error).__name__
