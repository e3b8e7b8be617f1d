"""What an engine knows of its server's weights; it loads them, or another generator does.

With labels of a run, other generators use the server, too. The learner has one of them load each
version; the others learn of it by a `HeldEndpoint`, or earlier from an answer, whose tokens bear
the labels of the server.

Invariant: `num_changes` grows with each change of the server's weights that is noticed, and no
version is accepted that neither this engine has loaded nor the server says it has.

`Standstill`: whether this process stood still in a load, as one that is stopped or swapped out
does. A generator that is silent for `streamrl.weights.membership.HANDOVER_S` may have been replaced
at its server: once it stood still for nearly so long, `require_none` raises.
"""

import asyncio
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from actors.engines.served.http import ConnectionLostError, RefusedError, SlowAnswerError
from actors.engines.served.server import ForeignWeightsError, Server
from streamrl.errors import TransportError, WeightTransferError
from streamrl.types import Completion, HeldEndpoint, WeightUpdate
from streamrl.weights.membership import HANDOVER_S
from streamrl.weights.protocol import HELLO_S

_TICK_S = 0.25
# The last Hello may be as old as that when the process stops.
_LONGEST_S = HANDOVER_S - 2 * HELLO_S


class Standstill:
    """An asynchronous context, which watches this process's event loop."""

    def __init__(self, longest_s: float = _LONGEST_S) -> None:
        self._longest_s = longest_s
        self._last_s = time.monotonic()
        self._stood_s = 0.0

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._tick())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._task.cancel()

    def require_none(self) -> None:
        """
        Raises:
            TransportError: another generator may be loading weights into the server by now.
        """
        self._note()
        if self._stood_s > self._longest_s:
            raise TransportError(
                f"this generator stood still for {self._stood_s:.0f} s in the middle of an update, "
                "so another one may update the server in its place"
            )

    async def _tick(self) -> None:
        """Waits a moment between two; ends when cancelled."""
        while True:
            await asyncio.sleep(_TICK_S)
            self._note()

    def _note(self) -> None:
        now_s = time.monotonic()
        self._stood_s = max(self._stood_s, now_s - self._last_s)
        self._last_s = now_s


_STOLEN = "the server was started again, or serves somebody else, too"


class ServerWeights:
    """Of one server. `policy_version` is the last one seen, `newest_version` the newest known."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.is_shared = server.labels.is_shared
        self.policy_version = self.newest_version = 0
        self.num_changes = self.num_loads_begun = self.num_loads_ended = 0

    async def receive(self, update: WeightUpdate) -> None:
        """
        Raises:
            WeightTransferError: it did not arrive, or the server does not hold it.
        """
        try:
            if isinstance(update.endpoint, HeldEndpoint):
                await self._require_held(update)
            else:
                await self._server.updates.receive(update)
        except (RefusedError, ConnectionLostError, SlowAnswerError) as error:
            raise WeightTransferError(
                f"{self._server.name} did not take an update: {error}"
            ) from error

    async def apply(self, update: WeightUpdate, on_loaded: Callable[[], None]) -> float:
        """Has the server load what was received, or notes that it has; returns the seconds in which
        nothing was sampled.

        Also if the server's label is that version's: whoever loaded it may have been killed before
        sampling went on.
        """
        self.newest_version = max(self.newest_version, update.policy_version)

        def loaded() -> None:
            self.on_version(update.policy_version)
            on_loaded()

        if isinstance(update.endpoint, HeldEndpoint):
            loaded()
            return 0.0
        self.num_loads_begun += 1
        try:
            async with Standstill() as standstill:
                check = standstill.require_none if self.is_shared else lambda: None
                label = self._server.labels.label_of(update)
                return await self._server.updates.load_in_pause(label, loaded, check)
        except RefusedError as error:
            raise TransportError(f"{self._server.name} did not load an update: {error}") from error
        finally:
            self.num_loads_ended += 1

    async def learn(self, answer: Completion) -> None:
        """From an answer's versions and, if another generator may have loaded one, from the label
        of the server."""
        newest = int(answer.policy_versions.max(initial=-1))
        if newest > self.newest_version and self.is_shared:
            self.newest_version = max(self.newest_version, await self._version_there())
        if self.policy_version < newest <= self.newest_version:
            self.on_version(newest)

    def on_version(self, policy_version: int) -> None:
        """The server samples with this version."""
        self.policy_version = policy_version
        self.num_changes += 1

    async def require_own(self, found: ForeignWeightsError | None = None) -> None:
        """
        Raises:
            TransportError: the server says that its weights are others, as it had `found`.
        """
        label = await self._server.label()
        if not self._server.labels.is_own(label):
            name = found or f"{self._server.name} has weights called {label[:100]!r}"
            raise TransportError(f"{name}: {_STOLEN}") from found

    async def _version_there(self) -> int:
        """-1 if the server has no weights of its owner."""
        try:
            return self._server.labels.version(await self._server.label())
        except ForeignWeightsError:
            return -1

    async def _require_held(self, update: WeightUpdate) -> None:
        label = await self._server.label()
        if label != self._server.labels.label_of(update):
            raise WeightTransferError(
                f"{self._server.name} has weights called {label[:100]!r}, not version "
                f"{update.policy_version}"
            )
