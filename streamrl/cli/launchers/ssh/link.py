"""The launcher's link to one host: connected, cut off, connected again.

Invariant: while the run goes on somebody tries to reach every host, with a back-off and without an
end; a host that must not fail ends the run in one sentence instead.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from streamrl.cli.launchers.ssh.connection import BEAT_S, Connection, HostLostError
from streamrl.cli.launchers.ssh.frames import Beat, Begin, Hello, Part
from streamrl.errors import ConfigError

FIRST_DELAY_S, LONGEST_DELAY_S = 0.5, 30.0


@dataclass
class HostLink:
    """`open_agent` starts a session; `prepare` makes the host ready for the run, each time that it
    is reached. The run goes on without a host that `may_fail`."""

    host: str
    begin: Begin
    release: str
    connect_s: float
    open_agent: Callable[[Callable[[Part, bytes], None]], Awaitable[Connection]]
    notify: Callable[[str], None]
    sees: Callable[[Part, bytes], None] = lambda part, body: None
    prepare: Callable[[Connection], Awaitable[None]] | None = None
    may_fail: bool = False
    hello: Hello | None = None
    connection: Connection | None = None
    ready: asyncio.Event = field(default_factory=asyncio.Event)

    async def connect(self) -> Hello:
        """Reach the agent, within `connect_s`.

        Raises:
            HostLostError: the host or its agent does not answer.
            ConfigError: it has another release.
        """
        connection = await self.open_agent(lambda part, body: self.sees(part, body))
        try:
            async with asyncio.timeout(self.connect_s):
                hello = await connection.begin(self.begin)
        except (TimeoutError, HostLostError) as error:
            await connection.close(0.0)
            why = str(error) or f"no answer within {self.connect_s:g} s"
            raise _host_lost(self.host, why) from None
        if hello.release != self.release:
            await connection.close(0.0)
            raise ConfigError(
                f"host {self.host}: {hello.python} has StreamRL {hello.release}, and this machine "
                f"{self.release}: install the same release on both"
            )
        self.connection, self.hello = connection, hello
        return hello

    async def run(self) -> None:
        """Until cancelled: keep the host. Waits for its connection to end, then for it to answer.

        Raises:
            HostLostError: it was lost, and may not be.
            ConfigError: it can be reached, and not be used.
        """
        tries, was_ready = 0, False
        while True:
            error: HostLostError | ConfigError
            try:
                error = await self._keep(is_back=tries > 0)
                tries, was_ready = 0, True
            except (HostLostError, ConfigError) as failure:
                error = failure
            if not self.may_fail or (isinstance(error, ConfigError) and not was_ready):
                raise error
            if tries == 0:
                self.notify(f"{error}; the run goes on without its generators until it answers")
            tries += 1
            await asyncio.sleep(min(FIRST_DELAY_S * 2.0 ** (tries - 1), LONGEST_DELAY_S))

    async def close(self, grace_period_s: float) -> None:
        """End the agent and what is left of its processes."""
        if self.connection is not None:
            await self.connection.close(grace_period_s)

    async def _keep(self, *, is_back: bool) -> HostLostError:
        """Make the host ready, and keep it while the connection lasts: why it has ended. Waits
        BEAT_S between beats.

        Raises:
            HostLostError: it did not become ready.
            ConfigError: it cannot.
        """
        if self.connection is None:
            await self.connect()
        connection = self.connection
        assert connection is not None, "it is connected"
        try:
            if self.prepare is not None:
                await self.prepare(connection)
        except (HostLostError, ConfigError) as error:
            await self._forget(connection)
            raise type(error)(_named(self.host, str(error))) from None
        if is_back:
            self.notify(f"host {self.host} answers: its processes are started again")
        self.ready.set()
        try:
            while not connection.is_lost:
                connection.send(Beat())
                await connection.wait_lost(BEAT_S)
        finally:
            self.ready.clear()
        await self._forget(connection)
        return _host_lost(self.host, await connection.lost())

    async def _forget(self, connection: Connection) -> None:
        self.connection = None
        await connection.close(0.0)


_REMEDIES = (
    ("Host key verification failed", "connect once by hand, or put its key into known_hosts"),
    ("REMOTE HOST IDENTIFICATION", "its key is not the one in known_hosts"),
    ("Permission denied", "ssh may ask for nothing here, so it needs a key that the host accepts"),
    ("No module named", "install StreamRL there, or name the Python that has it: cluster.python"),
    ("not found", "cluster.python names the Python that has StreamRL"),
    ("unknown option -P", "StreamRL needs Python 3.11; cluster.python names one"),
)


def _named(host: str, sentence: str) -> str:
    name = f"host {host}: "
    return name + sentence.removeprefix(name)


def _host_lost(host: str, why: str) -> HostLostError:
    """With what a person can do about it, where ssh or Python do not say it."""
    remedy = next((remedy for sign, remedy in _REMEDIES if sign in why), "")
    error = HostLostError(f"host {host}: {why.rstrip('.')}{': ' if remedy else ''}{remedy}")
    error.is_final = bool(remedy)
    return error
