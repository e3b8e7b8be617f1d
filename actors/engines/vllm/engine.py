"""The vLLM engine: vLLM's asynchronous engine (V1) behind StreamRL's seam, ids in and ids out.

The model runs in vLLM's own processes; this one holds requests and weights' comings and goings.

What a recorded version means: the token's forward pass and its log-probability are of exactly that
version's weights, by vLLM's own label, which changes only while it is paused. How much of what the
pass attended to (the KV cache) is of the same version depends on `generator.vllm.pause_mode`:

    keep    requests in flight go on; their earlier tokens' KV stays of the version that made it,
            or, with recompute_kv, is made anew. A request that was submitted before an update and
            starts after it may reuse a prefix of the old version; one submitted later never does.
    wait    requests in flight end first, so all of a completion is of one version
    abort   requests in flight begin anew, so all of a completion is of one version

Invariant: every request is answered once: a completion, a RolloutError of its own, or, if vLLM
died, the error that killed it.
"""

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

import numpy as np
from vllm import SamplingParams as VllmSamplingParams
from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs import tokens_input
from vllm.outputs import CompletionOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from actors.engines.manifest import require_same_parameters
from actors.engines.model import ModelFacts
from actors.engines.prompt import require_known_tokens, room_for
from actors.engines.vllm.arguments import engine_arguments, vllm_sampling
from actors.engines.vllm.gauges import Gauges
from actors.engines.vllm.weights import WeightLoader
from streamrl.config import RunConfig
from streamrl.config.engines.vllm import VllmSettings
from streamrl.errors import ConfigError, RolloutError
from streamrl.types import Completion, FinishReason, LoadReport, SamplingParams, WeightUpdate

# vLLM's label of the weights before the first update.
_UNLABELED = "default"
_CLOSED = "the engine is closed"
# Then vLLM's processes are killed; they hold nothing that anybody needs.
_SHUTDOWN_S = 1.0


class VllmEngine:
    """Implements `streamrl.interfaces.Engine`; made in the event loop that uses it."""

    def __init__(
        self,
        arguments: AsyncEngineArgs,
        settings: VllmSettings,
        facts: ModelFacts,
    ) -> None:
        self._gauges = Gauges()
        self._llm = _start(arguments, self._gauges)
        self._loader = WeightLoader(InProcessVerbs(self._llm), settings)
        self._shapes = facts.shapes
        self._eos = facts.eos
        self._max_model_len: int = self._llm.model_config.max_model_len
        self._vocab_size: int = self._llm.model_config.get_vocab_size()
        self._policy_version = 0
        # Prefixes are shared among requests of one salt only.
        self._cache_salt = "0"
        self._pause_s = 0.0
        self._numbers = itertools.count()
        self._in_flight: set[asyncio.Task[CompletionOutput]] = set()
        self.is_closed = False

    @classmethod
    def from_config(cls, config: RunConfig, *, seed: int) -> "VllmEngine":
        """The engine a run's configuration describes, with the weights of `model.path`."""
        return cls(
            engine_arguments(config, seed=seed),
            config.generator.vllm,
            ModelFacts.of(config.model),
        )

    @property
    def policy_version(self) -> int:
        return self._policy_version

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: SamplingParams
    ) -> Completion:
        """One completion, cut at `max_new_tokens` or at the longest length."""
        room = room_for(prompt_token_ids, self._max_model_len)
        require_known_tokens(prompt_token_ids, self._vocab_size)
        params = vllm_sampling(sampling, min(sampling.max_new_tokens, room), self._eos)
        while True:
            if self.is_closed:
                raise RolloutError(_CLOSED)
            output = await self._sample(list(prompt_token_ids), params)
            # An update with pause_mode abort: begin anew.
            if output.finish_reason != FinishReason.ABORT:
                return _completion(output)

    async def load_weights(self, update: WeightUpdate) -> LoadReport:
        """Receives while sampling goes on, then loads in a pause between two steps."""
        start = perf_counter()
        require_same_parameters(update.manifest, self._shapes)
        await self._loader.receive(update)
        received = perf_counter()

        def switch() -> None:
            self._policy_version = update.policy_version
            self._cache_salt = f"{update.learner_id}/{update.policy_version}"

        pause_s = await self._loader.load(str(update.policy_version), switch)
        self._pause_s += pause_s
        return LoadReport(
            transfer_s=received - start, load_s=perf_counter() - received, pause_s=pause_s
        )

    def gauges(self) -> Mapping[str, float]:
        """Beside those of the seam: `kv_usage` (fraction) and the total `num_preemptions`."""
        return {
            "num_active": self._gauges.num_active,
            "num_waiting": self._gauges.num_waiting,
            "num_tokens": self._gauges.num_tokens,
            "pause_s": self._pause_s,
            "kv_usage": self._gauges.kv_usage,
            "num_preemptions": self._gauges.num_preemptions,
        }

    async def close(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        in_flight = list(self._in_flight)
        for asking in in_flight:
            asking.cancel()
        await asyncio.gather(*in_flight, return_exceptions=True)
        self._loader.close()
        await asyncio.to_thread(self._llm.shutdown, timeout=_SHUTDOWN_S)

    async def _sample(
        self, prompt_token_ids: list[int], params: VllmSamplingParams
    ) -> CompletionOutput:
        """vLLM's one answer. Waits for it, or for `close`; cancelling gives the slot back."""
        asking = asyncio.create_task(self._ask(prompt_token_ids, params))
        self._in_flight.add(asking)
        asking.add_done_callback(self._in_flight.discard)
        try:
            return await asking
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if self.is_closed and not (caller and caller.cancelling()):
                raise RolloutError(_CLOSED) from None
            raise

    async def _ask(
        self, prompt_token_ids: list[int], params: VllmSamplingParams
    ) -> CompletionOutput:
        prompt = tokens_input(prompt_token_ids, cache_salt=self._cache_salt)
        try:
            async for answer in self._llm.generate(prompt, params, str(next(self._numbers))):
                last = answer
        except EngineDeadError:
            raise RuntimeError("vLLM died; its log says why") from None
        except Exception as error:
            raise RolloutError(f"vLLM refused a request: {error.__cause__ or error}") from error
        return last.outputs[0]


class InProcessVerbs:
    """Implements `actors.engines.vllm.weights.WeightVerbs` by vLLM's own methods."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm

    async def start(self) -> None:
        await self._llm.start_weight_update()

    async def update(self, info: dict[str, Any]) -> None:
        await self._llm.update_weights(WeightTransferUpdateRequest(update_info=info))

    async def finish(self, label: str | None) -> None:
        await self._llm.finish_weight_update(weight_version=label)

    async def pause(self, mode: str, *, clear_cache: bool) -> None:
        await self._llm.pause_generation(mode=mode, clear_cache=clear_cache)

    async def resume(self) -> None:
        await self._llm.resume_generation()

    async def require_alive(self) -> None:
        if self._llm.errored:
            raise EngineDeadError


def _start(arguments: AsyncEngineArgs, gauges: Gauges) -> AsyncLLM:
    try:
        checked = arguments.create_engine_config()
    except ValueError as error:
        raise ConfigError(f"generator.engine vllm: vLLM refuses its arguments: {error}") from error
    return AsyncLLM.from_vllm_config(checked, stat_loggers=[gauges])


def _completion(output: CompletionOutput) -> Completion:
    first_of_each = output.logprobs.start_indices
    versions = np.full(len(output.token_ids), -1, dtype=np.int32)
    for span in output.weight_versions:
        versions[span.start : span.end] = 0 if span.version == _UNLABELED else int(span.version)
    return Completion(
        token_ids=np.array(output.token_ids, dtype=np.int32),
        logprobs=np.array([output.logprobs.logprobs[i] for i in first_of_each], dtype=np.float32),
        policy_versions=versions,
        finish_reason=FinishReason(output.finish_reason),
    )
