"""An engine whose model another process serves over HTTP.

The server labels each token with the version whose weights sampled it; `actors.engines.vllm.engine`
and `actors.engines.sglang.server` say which version the KV cache belongs to.

Invariant: every request gets one answer: a completion that the model can have sampled, a
RolloutError of its own, whatever the server answers, or, once no connection is made for
`retry_timeout_s`, the TransportError that ends the generator. A server whose weights are not those
that this engine loaded (`Labels`) ends the generator as well. Prompts of two engines share no
prefixes.
"""

import asyncio
import contextlib
import itertools
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

from msgspec import structs

from actors.engines.model import ModelFacts, fitted
from actors.engines.requests import (
    InFlightRequests,
    aborted_on,
    answered,
    nothing_sampled,
    slot_or_stop,
    stops_of,
)
from actors.engines.served.http import (
    BrokenAnswerError,
    BusyError,
    ConnectionLostError,
    RefusedError,
    SlowAnswerError,
    retry_lost,
)
from actors.engines.served.process import ServerProcess
from actors.engines.served.server import ForeignWeightsError, ServedRequest, Server, require_sound
from actors.engines.updates import UpdatableEngine
from streamrl.errors import RolloutError, TransportError, WeightTransferError
from streamrl.interfaces import CompletionHandle
from streamrl.types import (
    Completion,
    FinishReason,
    HeldEndpoint,
    Media,
    SamplingParams,
    WeightUpdate,
)
from streamrl.weights.membership import HANDOVER_S
from streamrl.weights.protocol import HELLO_S

_TICK_S = 0.25
# The last Hello may be this old when the process stops.
_LONGEST_S = HANDOVER_S - 2 * HELLO_S


@asynccontextmanager
async def standstill(longest_s: float = _LONGEST_S) -> AsyncIterator[Callable[[], None]]:
    """Yields a check that raises once another generator may be loading weights into the server: a
    generator that was silent for `HANDOVER_S`, for example because it was stopped or swapped out,
    may have been replaced.
    """
    last_s, stood_s = time.monotonic(), 0.0

    def note() -> None:
        nonlocal last_s, stood_s
        now_s = time.monotonic()
        stood_s, last_s = max(stood_s, now_s - last_s), now_s

    async def tick() -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            note()

    def require_none() -> None:
        note()
        if stood_s > longest_s:
            raise TransportError(
                f"this generator stood still for {stood_s:.0f} s in the middle of an update, "
                "so another one may update the server in its place"
            )

    ticking = asyncio.create_task(tick())
    try:
        yield require_none
    finally:
        ticking.cancel()


class ServerWeights:
    """What an engine knows about its server's weights, which it or another generator loads.

    With labels of a run, other generators use the server, too. The learner has one of them load
    each version; the others learn of it from a `HeldEndpoint`, or earlier from an answer, whose
    tokens carry the server's labels. A version is accepted only if this engine has loaded it or the
    server says that it has it.

    `policy_version` is the last one seen, `newest_version` that of the learner's newest update,
    `highest_version` the highest of any update: if a learner went back, requests begun before may
    have tokens of it. `num_changes` grows with each noticed change.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self.is_shared = server.labels.is_shared
        self.policy_version = self.newest_version = self.highest_version = self.num_changes = 0

    async def learn(self, answer: Completion) -> None:
        """Update from an answer's versions and, if another generator may have loaded one, from the
        server's label."""
        newest = int(answer.policy_versions.max(initial=-1))
        if newest > self.newest_version and self.is_shared:
            with contextlib.suppress(ForeignWeightsError):
                there = self._server.labels.version(await self._server.label())
                self.note_newest(max(self.newest_version, there))
        if self.policy_version < newest <= self.newest_version:
            self.on_version(newest)

    def note_newest(self, policy_version: int) -> None:
        self.newest_version = policy_version
        self.highest_version = max(self.highest_version, policy_version)

    def on_version(self, policy_version: int) -> None:
        """Note that the server samples with this version."""
        self.policy_version = policy_version
        self.num_changes += 1

    async def require_own(self, found: ForeignWeightsError | None = None) -> None:
        """
        Raises:
            TransportError: the server says that it has other weights, as `found` says.
        """
        label = await self._server.label()
        if not self._server.labels.is_own(label):
            name = found or f"{self._server.name} has weights called {label[:100]!r}"
            raise TransportError(
                f"{name}: the server was started again, or serves somebody else, too"
            ) from found


log = logging.getLogger(__name__)


_READINGS_S, _READINGS_PER_LABEL = 0.25, 4
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0


class ServedEngine(UpdatableEngine):
    """Implements `streamrl.interfaces.Engine`; made in the event loop that uses it.

    At most twice `max_num_seqs` requests are sent to the server at a time, so that it always has a
    next one; the others wait here. With `keeps_old_kv`, requests that an update finds in the
    server's queue are sent again, so no more are sent than it samples at a time. `process` is the
    server's, if this engine started it.
    """

    def __init__(
        self,
        server: Server,
        facts: ModelFacts,
        *,
        max_num_seqs: int,
        max_model_len: int,
        retry_timeout_s: float,
        keeps_old_kv: bool = False,
        process: ServerProcess | None = None,
    ) -> None:
        super().__init__(facts.shapes)
        self._server = server
        self._process = process
        self._facts = facts
        self._max_model_len = max_model_len
        self._retry_timeout_s = retry_timeout_s
        self._keeps_old_kv = keeps_old_kv
        self._slots = asyncio.Semaphore(max_num_seqs if keeps_old_kv else 2 * max_num_seqs)
        self._num_sent = 0
        self._weights = ServerWeights(server)
        self._updates = server.updates
        self._num_loads_begun = self._num_loads_ended = 0
        self._is_loaded = asyncio.Event()
        """Cleared while this engine loads an update."""
        self._is_loaded.set()
        self._name = uuid.uuid4().hex[:12]
        self._numbers = itertools.count()
        self._requests = InFlightRequests[Completion](self._raise_if_over)
        self._aborts: set[asyncio.Task[None]] = set()
        self._readings: Mapping[str, float] = {}
        self.is_readable = True
        """Whether the server answered when last asked for its gauges."""
        self._num_failed = 0
        self.failed: asyncio.Future[TransportError] = asyncio.get_running_loop().create_future()
        """The error with which every request fails, once known."""
        self.is_closed = False
        self._watch_task = asyncio.create_task(self._watch())

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        handle: CompletionHandle | None = None,
        media: Sequence[Media] = (),
    ) -> Completion:
        """One completion, cut at `max_new_tokens`, at the longest length or by the handle.

        The handle's number of tokens stays -1, since the server answers only once, at the end.
        """
        if media:
            raise RolloutError(
                f"{self._server.name} samples from token ids alone, and a prompt has images: use "
                "generator.engine hf, or vllm without a URL"
            )
        sampling = fitted(sampling, prompt_token_ids, self._max_model_len, self._facts.vocab_size)
        self._raise_if_over()
        request = ServedRequest(
            id="",
            prompt_token_ids=list(prompt_token_ids),
            sampling=sampling,
            stops=stops_of(sampling, self._facts.eos),
            cache_salt="",
            expert_shape=self._facts.expert_shape if sampling.keep_routed_experts else (0, 0),
        )
        stop = handle.stop if handle else asyncio.Event()
        return await self._requests.run(self._complete(request, stop))

    def gauges(self) -> Mapping[str, float]:
        """The server's last readings, and the requests waiting on this side."""
        readings = {"num_active": 0.0, "num_waiting": 0.0, "num_tokens": 0.0, **self._readings}
        waiting = readings["num_waiting"] + len(self._requests) - self._num_sent
        return {**readings, "num_waiting": waiting, "pause_s": self._pause_s}

    def fail(self, error: TransportError) -> None:
        """Make every request fail with this error from now on."""
        if not self.failed.done():
            self.failed.set_result(error)

    async def close(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        self._watch_task.cancel()
        await self._requests.cancel_all()
        await asyncio.wait([self._watch_task, *self._aborts])
        await self._server.close()
        if self._process is not None:
            self._process.close()

    async def _receive(self, update: WeightUpdate) -> None:
        self._raise_if_over()
        server = self._server
        try:
            if not isinstance(update.endpoint, HeldEndpoint):
                await self._updates.receive(update)
            elif (label := await server.label()) != server.labels.label_of(update):
                raise WeightTransferError(
                    f"{server.name} has weights called {label[:100]!r}, not version "
                    f"{update.policy_version}"
                )
        except (RefusedError, ConnectionLostError, SlowAnswerError) as error:
            raise WeightTransferError(f"{server.name} did not take an update: {error}") from error

    async def _apply(self, update: WeightUpdate, on_loaded: Callable[[], None]) -> float:
        """Load the update even if the server already has that version's label: the generator that
        loaded it may have been killed before sampling resumed."""
        weights, server = self._weights, self._server
        weights.note_newest(update.policy_version)

        def loaded() -> None:
            weights.on_version(update.policy_version)
            on_loaded()

        if isinstance(update.endpoint, HeldEndpoint):
            loaded()
            return 0.0
        self._num_loads_begun += 1
        self._is_loaded.clear()
        try:
            async with standstill() as require_none:
                check = require_none if weights.is_shared else lambda: None
                label = server.labels.label_of(update)
                return await self._updates.load_in_pause(label, loaded, check)
        except RefusedError as error:
            raise TransportError(f"{server.name} did not load an update: {error}") from error
        except (ConnectionLostError, SlowAnswerError) as error:
            raise TransportError(
                f"{server.name} was lost in the middle of an update: {error}; if it does not run "
                "any more, start it again"
            ) from error
        finally:
            self._num_loads_ended += 1
            self._is_loaded.set()

    async def _complete(self, request: ServedRequest, stop: asyncio.Event) -> Completion:
        """Send the request once there is a slot; return the answer."""

        async def send() -> Completion:
            answer = await retry_lost(lambda: self._send(request, stop), self._retry_timeout_s)
            self._num_failed = 0
            return answer

        async with slot_or_stop(self._slots, stop) as has_slot:
            self._num_sent += has_slot
            try:
                if not has_slot:
                    return nothing_sampled()
                return await answered(send, request.sampling, stop)
            except (RolloutError, RefusedError, BrokenAnswerError, SlowAnswerError) as error:
                await self._pause()
                raise RolloutError(f"{self._server.name}: {error}") from error
            except TransportError as error:
                self.fail(error)
                raise
            finally:
                self._num_sent -= has_slot

    async def _pause(self) -> None:
        """Pause longer after each failure in a row: otherwise a server that fails every request at
        once would use up the prompts."""
        pause_s = _FIRST_PAUSE_S * 2.0 ** min(self._num_failed, 10)
        self._num_failed += 1
        await asyncio.sleep(min(pause_s, _LONGEST_PAUSE_S))

    async def _send(self, request: ServedRequest, stop: asyncio.Event) -> Completion:
        request_id = f"{self._name}-{next(self._numbers):012d}"
        salt = f"{self._name}-{self._weights.num_changes}"
        identified = structs.replace(request, id=request_id, cache_salt=salt)
        version = self._weights.policy_version
        num_loads = self._num_loads_ended
        try:
            async with aborted_on(stop, lambda: self._abort(request_id)):
                answer = await self._server.sample(identified)
            await self._weights.learn(answer)
            require_sound(
                answer,
                request,
                vocab_size=self._facts.vocab_size,
                newest_version=self._weights.highest_version,
            )
        except ForeignWeightsError as error:
            await self._weights.require_own(error)
            raise
        except BusyError:
            # vLLM 0.33 answers this way to requests that arrive in a pause that ends those in
            # flight.
            await self._is_loaded.wait()
            raise
        except (asyncio.CancelledError, ConnectionLostError, SlowAnswerError):
            aborting = asyncio.create_task(self._abort(request_id))
            self._aborts.add(aborting)
            aborting.add_done_callback(self._aborts.discard)
            raise
        is_aborted = answer.finish_reason is FinishReason.ABORT and not stop.is_set()
        if is_aborted and self._num_loads_begun == num_loads:
            if self._weights.is_shared:
                # Wait for an update that another generator loads.
                raise BusyError("a request", 503, "given up without an update", 0.0)
            raise RolloutError("it gave a request up without an update")
        if self._keeps_old_kv and version not in answer.policy_versions[:1]:
            # It started after an update, on prefixes that the previous version computed.
            if len(answer.policy_versions) and version == self._weights.policy_version:
                self._weights.on_version(int(answer.policy_versions[0]))
            return nothing_sampled(FinishReason.ABORT)
        return answer

    async def _abort(self, request_id: str) -> None:
        try:
            await self._server.abort(request_id)
        except Exception as error:
            log.debug("request %s was not aborted: %s", request_id, error)

    async def _watch(self) -> None:
        """Read the server's gauges at short intervals; unreadable ones are 0. Ends when the server
        is gone, or a shared one has foreign weights."""
        for number in itertools.count():
            try:
                readings = await retry_lost(self._read, self._retry_timeout_s)
                self._on_readings(readings)
                if number % _READINGS_PER_LABEL == 0 and self._weights.is_shared:
                    await retry_lost(self._weights.require_own, self._retry_timeout_s)
            except (RefusedError, BrokenAnswerError, SlowAnswerError) as error:
                self._on_readings({}, str(error))
            except TransportError as error:
                self.fail(error)
                await self._requests.cancel_all()
                return
            await asyncio.sleep(_READINGS_S)

    def _on_readings(self, readings: Mapping[str, float], error: str = "") -> None:
        """Store readings; `error` says why there are none, and is logged once. The total of tokens
        never falls."""
        if self.is_readable and error:
            log.warning("%s's gauges cannot be read: %s", self._server.name, error)
        elif not (self.is_readable or error):
            log.info("%s's gauges can be read again", self._server.name)
        total = max(readings.get("num_tokens", 0.0), self._readings.get("num_tokens", 0.0))
        self._readings, self.is_readable = {**readings, "num_tokens": total}, not error

    async def _read(self) -> Mapping[str, float]:
        if self._process is not None:
            self._process.require_alive()
        return await self._server.readings()

    def _raise_if_over(self) -> None:
        if self.failed.done():
            raise TransportError(str(self.failed.result())) from self.failed.result()
        if self.is_closed:
            raise RolloutError("the engine is closed")
