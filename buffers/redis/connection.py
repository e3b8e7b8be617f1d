"""The connection to a run's Redis server: commands that are repeated until they are answered.

Invariant: a call either returns the server's answer or raises within its deadline; it may be sent
twice, because every script of `buffers/redis/lua` may run twice. While Redis is unavailable
(restarting, stopped, failing over) calls wait here.
"""

import asyncio
import hashlib
import logging
import re
import ssl
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any, TypeAlias

from redis import exceptions
from redis.asyncio import Redis

from buffers.redis.topology import RedisTopology, redacted
from streamrl.config.secrets import REDIS_PASSWORD
from streamrl.errors import ConfigError, OtherReleaseError, TransportError

log = logging.getLogger(__name__)

Command: TypeAlias = tuple[bytes | str | int | float, ...]
# Of a run's keys and their values; raised with every change of them.
SCHEMA = 6
SCRIPT_FILES = ("state", "lengths", "entries", "ledger", "batches", "calls")
FIRST_DELAY_S, LONGEST_DELAY_S = 0.05, 2.0
SLOWEST_BYTES_PER_S = 10e6

_UNAVAILABLE = (
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.ReadOnlyError,
    exceptions.ClusterDownError,
    exceptions.TryAgainError,
    exceptions.AskError,
    OSError,
    TimeoutError,
)
_REFUSED = (
    exceptions.AuthenticationError,
    exceptions.AuthorizationError,
    exceptions.AuthenticationWrongNumberOfArgsError,
    exceptions.NoPermissionError,
)
# Redis 6 reports these as errors of the script: a full disk, a script that takes long, a server
# that has become a replica, or has lost its own.
_UNAVAILABLE_WORDS = ("MISCONF", "BUSY", "READONLY", "MASTERDOWN", "NOREPLICAS")
# How Redis 6 reports a lack of permission inside a script.
_REFUSED_IN_SCRIPT = ("NOPERM", "can't run this command", "can't access at least one of the keys")


def namespace(run: str) -> str:
    """The prefix of a run's keys; the braces keep them in one slot of a cluster."""
    return f"streamrl:{{{run}}}:"


def other_schema(url: str, found: int) -> OtherReleaseError:
    """The refusal of a run whose keys have the schema `found`."""
    remedy = "start the run anew with --new (or streamrl buffer books --forget)"
    return OtherReleaseError.of(f"run.name: the run at {url}", found, SCHEMA, remedy)


@cache
def script() -> tuple[str, str]:
    """The source of the ledger's script, and its SHA-1, by which EVALSHA names it."""
    folder = resources.files("buffers.redis") / "lua"
    source = "\n".join((folder / f"{n}.lua").read_text() for n in SCRIPT_FILES)
    source = f"local SCHEMA = {SCHEMA}\n{source}"
    return source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()


class RedisConnection:
    """One client's connections. `retry_s` is the time for the answer to a first attempt."""

    def __init__(self, url: str, run: str, *, deadline_s: float, retry_s: float) -> None:
        self.url = redacted(url)
        self.deadline_s = deadline_s
        self._topology = RedisTopology(url)
        self._exists: Command = ("EXISTS", namespace(run) + "state")
        self._retry_s = retry_s

    @property
    def client(self) -> "Redis":
        """The client of the node that holds the run, as far as is known."""
        return self._topology.client

    async def close(self) -> None:
        await self._topology.close()

    async def call(self, name: str, *commands: Command, wait_s: float = 0.0) -> list[Any]:
        """The answers to the commands, which are sent in one pipeline.

        Waits for them until the deadline, and after a failure twice as long each time before the
        next attempt.

        Raises:
            TransportError: unanswered for `wait_s` and the deadline of this connection.
            ConfigError: the server refuses this user.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s + self.deadline_s
        num_bytes = sum(len(word) for c in commands for word in c if isinstance(word, bytes))
        retry_timeout_s = self._retry_s + num_bytes / SLOWEST_BYTES_PER_S
        delay_s = FIRST_DELAY_S
        while True:
            client = self.client
            try:
                async with asyncio.timeout(min(deadline - loop.time(), retry_timeout_s)):
                    return await self._attempt(commands)
            except (*_REFUSED, *_UNAVAILABLE, exceptions.ResponseError) as error:
                if isinstance(error, exceptions.MovedError):
                    self._topology.follow(error)
                else:
                    self._raise_if_final(error)
                    self._topology.switch_node(client)
                if loop.time() + delay_s >= deadline:
                    raise self._timed_out(name, wait_s, error) from error
                message = _summary(error)
                log.warning("no answer from the buffer at %s to %s: %s", self.url, name, message)
            retry_timeout_s *= 2
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, LONGEST_DELAY_S)

    async def _attempt(self, commands: Sequence[Command]) -> list[Any]:
        try:
            if (client := self.client) is not self._topology.holder:
                await client.execute_command(*self._exists)
                self._topology.holder = client
            return await self._send(commands)
        except exceptions.NoScriptError:
            await self.client.execute_command("SCRIPT LOAD", script()[0])
            return await self._send(commands)

    async def _send(self, commands: Sequence[Command]) -> list[Any]:
        if len(commands) == 1:
            return [await self.client.execute_command(*commands[0])]
        pipeline = self.client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        return list(await pipeline.execute())

    def _raise_if_final(self, error: Exception) -> None:
        """Raise the errors that no later attempt can avoid."""
        message = str(error)
        if isinstance(error, _REFUSED) or any(words in message for words in _REFUSED_IN_SCRIPT):
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

    def _timed_out(self, name: str, wait_s: float, error: Exception) -> TransportError:
        return TransportError(
            f"the buffer at {self.url} has not answered {name} for {wait_s + self.deadline_s:g} s "
            f"({_summary(error)}): is Redis running, and is buffer.url right?"
        )


def _certificate_error(error: BaseException | None) -> str:
    """Why TLS rejects the server's certificate, if that caused the error; else ""."""
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return error.verify_message
        error = error.__cause__ or error.__context__
    return ""


def _summary(error: Exception) -> str:
    """The first sentence of Redis' message, without the position in the script."""
    message = re.sub(r"^Error running script.*: -", "", str(error)).partition(". ")[0]
    return message or type(error).__name__
