"""An engine whose model another process serves over HTTP: requests, versions, and the server's end.

What a recorded version means is the server's to keep: it labels each token with the version whose
weights sampled it (see `actors.engines.vllm.served`, `actors.engines.sglang.server`).

Invariant: every request is answered once: a completion, a RolloutError of its own, or, once the
server is gone for longer than anybody waits, the TransportError that ends the generator. A server
whose weights are not those this engine gave it (`Labels`) is as good as gone.
"""

import asyncio
import itertools
import logging
import time
import uuid
from collections.abc import Mapping, Sequence

from msgspec import structs

from actors.engines.manifest import require_same_parameters
from actors.engines.model import ModelFacts
from actors.engines.prompt import require_known_tokens, room_for
from actors.engines.served.http import ConnectionLostError, RefusedError, patiently
from actors.engines.served.server import Request, Server
from streamrl.errors import RolloutError, TransportError
from streamrl.types import Completion, LoadReport, SamplingParams, WeightUpdate

log = logging.getLogger(__name__)
_CLOSED = "the engine is closed"
_READINGS_S = 0.25


class ServedEngine:
    """Implements `streamrl.interfaces.Engine`; made in the event loop that uses it.

    At most twice `max_num_seqs` requests are with the server, so that it always has the next one
    at hand; the others wait here.
    """

    def __init__(
        self,
        server: Server,
        facts: ModelFacts,
        *,
        max_num_seqs: int,
        max_model_len: int,
        retry_timeout_s: float,
    ) -> None:
        self._server = server
        self._facts = facts
        self._max_model_len = max_model_len
        self._retry_timeout_s = retry_timeout_s
        self._room = asyncio.Semaphore(2 * max_num_seqs)
        self._num_asking = 0
        self._policy_version = 0
        self._num_updates = self._num_loads_begun = self._num_loads_ended = 0
        self._pause_s = 0.0
        self._name = uuid.uuid4().hex[:12]
        self._numbers = itertools.count()
        self._in_flight: set[asyncio.Task[Completion]] = set()
        self._farewells: set[asyncio.Task[None]] = set()
        self._readings: Mapping[str, float] = {}
        self._failure: TransportError | None = None
        self.is_closed = False
        self._watching = asyncio.create_task(self._watch())

    @property
    def policy_version(self) -> int:
        return self._policy_version

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: SamplingParams
    ) -> Completion:
        """One completion, cut at `max_new_tokens` or at the longest length."""
        room = room_for(prompt_token_ids, self._max_model_len)
        require_known_tokens(prompt_token_ids, self._facts.vocab_size)
        self._raise_if_over()
        asking = asyncio.create_task(self._complete(list(prompt_token_ids), sampling, room))
        self._in_flight.add(asking)
        asking.add_done_callback(self._in_flight.discard)
        try:
            return await asking
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if not (caller and caller.cancelling()):
                self._raise_if_over()
            raise

    async def load_weights(self, update: WeightUpdate) -> LoadReport:
        """Receives while sampling goes on, then loads in a pause between two steps."""
        self._raise_if_over()
        start = time.perf_counter()
        require_same_parameters(update.manifest, self._facts.shapes)
        await self._server.receive(update)
        received = time.perf_counter()

        def switch() -> None:
            self._policy_version = update.policy_version
            self._num_updates += 1

        self._num_loads_begun += 1
        try:
            pause_s = await self._server.load(update.policy_version, switch)
        finally:
            self._num_loads_ended += 1
        self._pause_s += pause_s
        return LoadReport(
            transfer_s=received - start,
            load_s=time.perf_counter() - received,
            pause_s=pause_s,
        )

    def gauges(self) -> Mapping[str, float]:
        """The server's readings, at most a moment old, and what waits on this side."""
        read = {"num_active": 0.0, "num_waiting": 0.0, "num_tokens": 0.0, **self._readings}
        waiting = read["num_waiting"] + len(self._in_flight) - self._num_asking
        return {**read, "num_waiting": waiting, "pause_s": self._pause_s}

    async def close(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        self._watching.cancel()
        await self._end_requests()
        await asyncio.wait([self._watching, *self._farewells])
        await self._server.close()

    async def _complete(
        self, prompt_token_ids: list[int], sampling: SamplingParams, room: int
    ) -> Completion:
        """Ask until there is an answer: an update with pause_mode abort begins requests anew."""
        eos = frozenset() if sampling.ignore_eos else self._facts.eos
        request = Request(
            id="",
            prompt_token_ids=prompt_token_ids,
            sampling=sampling,
            max_new_tokens=min(sampling.max_new_tokens, room),
            stops=eos | frozenset(sampling.stop_token_ids),
            cache_salt="",
        )
        async with self._room:
            self._num_asking += 1
            try:
                while True:
                    answer = await patiently(lambda: self._ask(request), self._retry_timeout_s)
                    if answer is not None:
                        return answer
            except TransportError as error:
                self._fail(error)
                raise
            finally:
                self._num_asking -= 1

    async def _ask(self, request: Request) -> Completion | None:
        request_id = f"{self._name}-{next(self._numbers):012d}"
        salt = f"{self._name}-{self._num_updates}"
        known = structs.replace(request, id=request_id, cache_salt=salt)
        num_loads = self._num_loads_ended
        try:
            answer = await self._server.sample(known)
        except (asyncio.CancelledError, ConnectionLostError):
            farewell = asyncio.create_task(self._abort(request_id))
            self._farewells.add(farewell)
            farewell.add_done_callback(self._farewells.discard)
            raise
        if answer is None and self._num_loads_begun == num_loads:
            raise RolloutError("the inference server gave a request up without an update")
        return answer

    async def _abort(self, request_id: str) -> None:
        try:
            await self._server.abort(request_id)
        except Exception as error:
            log.debug("request %s was not aborted: %s", request_id, error)

    async def _watch(self) -> None:
        """Reads the server's gauges, a moment between two; ends when the server is gone."""
        while True:
            try:
                self._readings = await patiently(self._server.readings, self._retry_timeout_s)
            except RefusedError as error:
                log.debug("no readings: %s", error)
            except TransportError as error:
                self._fail(error)
                await self._end_requests()
                return
            await asyncio.sleep(_READINGS_S)

    async def _end_requests(self) -> None:
        asking = list(self._in_flight)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)

    def _fail(self, error: TransportError) -> None:
        self._failure = self._failure or error

    def _raise_if_over(self) -> None:
        if self.is_closed:
            raise RolloutError(_CLOSED)
        if self._failure is not None:
            raise TransportError(str(self._failure)) from self._failure
