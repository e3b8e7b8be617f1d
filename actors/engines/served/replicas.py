"""One engine on several servers of the same model; it acts like a router in front of them.

    a request        goes to the server with the fewest requests; the turns of an episode stay on
                     one server, whose cache has their prefix
    an update        is received by each server separately (`actors.engines.weight_targets`)
    a lost server    loses only its requests, which are sampled again on another one
    a returned one   gets the newest weights before its first request

Invariant: a request goes only to a server that has loaded the newest version sent to it. The engine
fails, with the TransportError that ends the generator, once no server is up for `retry_timeout_s`.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from weakref import WeakKeyDictionary

from actors.concurrency import end_all
from actors.engines.requests import nothing_sampled
from actors.engines.served.engine import ServedEngine
from streamrl.errors import RolloutError, TransportError, WeightTransferError
from streamrl.interfaces import CompletionHandle
from streamrl.types import Completion, LoadReport, Media, SamplingParams, WeightUpdate
from streamrl.weights.protocol import NO_LEARNER
from streamrl.weights.receiver import Holding

log = logging.getLogger(__name__)

_REOPEN_S = 1.0
_READY_S = 0.1


class Replica:
    """One of the servers. `open_engine` raises at once if the server is not up or does not fit."""

    def __init__(self, url: str, open_engine: Callable[[], Awaitable[ServedEngine]]) -> None:
        self.url = url
        self._open_engine = open_engine
        self._engine: ServedEngine | None = None
        self._has_newest = self._has_any = False
        # Totals of earlier engines of this server.
        self._ended: Mapping[str, float] = {"num_tokens": 0.0, "pause_s": 0.0}
        self.num_requests = 0

    @property
    def is_up(self) -> bool:
        return self._engine is not None

    @property
    def ready(self) -> ServedEngine | None:
        """The engine, if requests may go to it: not after it has failed, until it is opened
        again."""
        engine = self._engine
        if engine is None or engine.failed.done():
            return None
        return engine if self._has_newest and engine.is_readable else None

    def holding(self) -> Holding:
        if self._engine is None:
            return Holding.GONE
        return Holding.KEPT if self._has_any else Holding.LOST

    def gauges(self) -> Mapping[str, float]:
        gauges = self._engine.gauges() if self._engine else {}
        return {**gauges, **{n: v + gauges.get(n, 0.0) for n, v in self._ended.items()}}

    async def serve(self) -> None:
        """Open an engine, and another one after it failed, until cancelled. Waits for the server to
        come up, then for the engine's failure."""
        said = ""
        while True:
            try:
                self._engine = await self._open_engine()
                log.info("the server at %s is up and gets the newest weights", self.url)
                said = ""
                failure = await asyncio.shield(self._engine.failed)
                log.warning("the server at %s is left out: %s", self.url, failure)
                await self.close()
            except Exception as error:  # Whatever it is, the server is opened again.
                if str(error) != said:
                    log.warning("the server at %s is left out: %s", self.url, error)
                said = str(error)
                await asyncio.sleep(_REOPEN_S)

    async def load_weights(self, update: WeightUpdate) -> LoadReport:
        """
        Raises:
            WeightTransferError: the server did not load it; it gets no requests until it has loaded
                another update.
        """
        engine = self._engine
        if engine is None:
            raise WeightTransferError(f"the server at {self.url} is gone")
        try:
            report = await _load_while_up(engine, update)
        except WeightTransferError:
            self._has_newest = False
            raise
        except TransportError as error:
            engine.fail(error)
            raise WeightTransferError(str(error)) from error
        self._has_newest = self._has_any = engine is self._engine
        return report

    async def close(self) -> None:
        engine, self._engine = self._engine, None
        self._has_newest = self._has_any = False
        if engine is not None:
            gauges = engine.gauges()
            self._ended = {name: v + gauges[name] for name, v in self._ended.items()}
            await engine.close()


class ReplicatedEngine:
    """Implements `streamrl.interfaces.Engine`; made in the event loop that uses it."""

    def __init__(self, replicas: Sequence[Replica], *, retry_timeout_s: float) -> None:
        self.replicas = tuple(replicas)
        self._retry_timeout_s = retry_timeout_s
        self._replica_of: WeakKeyDictionary[asyncio.Event, Replica] = WeakKeyDictionary()
        self._policy_version = 0
        self._learner_id = ""
        self._num_resampled = 0
        self._up_s = time.monotonic()
        self._tasks = [asyncio.create_task(replica.serve()) for replica in self.replicas]
        self._is_closed = False

    @property
    def _ready(self) -> list[ServedEngine]:
        return [replica.ready for replica in self.replicas if replica.ready]

    @property
    def has_weights(self) -> bool:
        return bool(self._ready)

    @property
    def policy_version(self) -> int:
        """The oldest version that a server samples with; the last known one if there is none."""
        versions = [engine.policy_version for engine in self._ready]
        self._policy_version = min(versions, default=self._policy_version)
        return self._policy_version

    @property
    def learner_id(self) -> str:
        """The learner of all servers that requests go to; NO_LEARNER while they differ."""
        learners = {engine.learner_id for engine in self._ready}
        if learners:
            self._learner_id = learners.pop() if len(learners) == 1 else NO_LEARNER
        return self._learner_id

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        handle: CompletionHandle | None = None,
        media: Sequence[Media] = (),
    ) -> Completion:
        """A completion; sampled again on another server if one is lost meanwhile."""
        handle = handle or CompletionHandle()
        while not handle.stop.is_set():
            replica = self._choose(handle)
            if replica is None or (engine := replica.ready) is None:
                await asyncio.sleep(_READY_S)
                continue
            replica.num_requests += 1
            try:
                return await engine.generate(prompt_token_ids, sampling, handle, media)
            except TransportError as error:
                self._num_resampled += 1
                log.info("a request is sampled again elsewhere: %s", error)
            finally:
                replica.num_requests -= 1
        return nothing_sampled()

    async def load_weights(self, update: WeightUpdate) -> LoadReport:
        raise WeightTransferError("each of several servers receives by itself")

    def gauges(self) -> Mapping[str, float]:
        all_gauges = [replica.gauges() for replica in self.replicas]
        names = ("num_active", "num_waiting", "num_tokens", "pause_s")
        sums = {name: sum(gauges.get(name, 0.0) for gauges in all_gauges) for name in names}
        used = [gauges["kv_usage"] for gauges in all_gauges if "kv_usage" in gauges]
        shares = {"kv_usage": sum(used) / len(used)} if used else {}
        return {**sums, **shares, "num_resampled": float(self._num_resampled)}

    async def close(self) -> None:
        self._is_closed = True
        await end_all(self._tasks)
        await asyncio.gather(*(replica.close() for replica in self.replicas))

    def _choose(self, handle: CompletionHandle) -> Replica | None:
        """The server of the episode's last turn, else the one with the fewest requests; None while
        none has weights.

        Raises:
            TransportError: none has been up for `retry_timeout_s`.
        """
        self._raise_if_over()
        ready = [replica for replica in self.replicas if replica.ready]
        if not ready:
            return None
        last = self._replica_of.get(handle.stop)
        chosen = last if last in ready else min(ready, key=_load_of)
        self._replica_of[handle.stop] = chosen
        return chosen

    def _raise_if_over(self) -> None:
        if self._is_closed:
            raise RolloutError("the engine is closed")
        if any(replica.is_up for replica in self.replicas):
            self._up_s = time.monotonic()
        if time.monotonic() - self._up_s > self._retry_timeout_s:
            raise TransportError(
                f"all {len(self.replicas)} inference servers are gone (none is up for "
                f"{self._retry_timeout_s:g} s)"
            )


def _load_of(replica: Replica) -> tuple[int, float]:
    gauges = replica.gauges()
    return replica.num_requests, gauges.get("num_active", 0.0) + gauges.get("num_waiting", 0.0)


async def _load_while_up(engine: ServedEngine, update: WeightUpdate) -> LoadReport:
    """Load an update. Waits for the load or for the engine's failure: a load never ends once its
    sockets are closed."""
    loading = asyncio.create_task(engine.load_weights(update))
    try:
        await asyncio.wait((loading, engine.failed), return_when=asyncio.FIRST_COMPLETED)
    finally:
        await end_all([loading])
    if loading.cancelled() and engine.failed.done():
        raise WeightTransferError(f"the server has failed in the load: {engine.failed.result()}")
    return loading.result()
