"""vLLM's asynchronous engine (V1) as an engine of StreamRL: token ids in, token ids out.

The model runs in vLLM's own processes; this one holds requests and passes updates on.

A token's recorded version is that of the weights whose forward pass sampled it, by vLLM's own
label, which changes only while vLLM is paused. Which version the KV cache belongs to depends on
`generator.vllm.pause_mode`:

    keep    requests in flight continue; the KV cache of their earlier tokens remains that of the
            version that computed it or, with recompute_kv, is computed again. Requests without a
            token start over, so that none reuses a prefix that the old version has computed
    wait    requests in flight end first, so a completion has a single version
    abort   requests in flight start over, so a completion has a single version

Invariant: every request gets one answer: a completion, its own RolloutError, or, if vLLM has ended,
a TransportError with the last line of vLLM's errors.
"""

import asyncio
import itertools
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from vllm import SamplingParams as VllmSamplingParams
from vllm.config import VllmConfig
from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.envs import disable_envs_cache, enable_envs_cache
from vllm.inputs import TokensPrompt, tokens_input
from vllm.outputs import CompletionOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.loggers import PrometheusStatLogger, StatLoggerBase
from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats

from actors.concurrency import first_result
from actors.engines import require_torchvision
from actors.engines.completions import candidates, completion, recorded, sets_of
from actors.engines.model import ModelFacts, fitted, require_all_sent
from actors.engines.requests import (
    InFlightRequests,
    aborted_on,
    answered,
    nothing_sampled,
    stops_of,
)
from actors.engines.served.process import death
from actors.engines.served.server import UNLABELED
from actors.engines.updates import UpdatableEngine
from actors.engines.vllm.arguments import engine_arguments, vllm_sampling
from actors.engines.vllm.plugin import ERROR_LOG_VARIABLE
from actors.engines.vllm.weights import WeightLoader
from streamrl.config import RunConfig
from streamrl.errors import ConfigError, RolloutError, TransportError
from streamrl.interfaces import CompletionHandle
from streamrl.placement.hosts import visible_alone
from streamrl.types import (
    Completion,
    FinishReason,
    LoadReport,
    Media,
    SamplingParams,
    WeightUpdate,
)
from streamrl.vision.parts import decode
from streamrl.vision.patches import PatchReader
from streamrl.vision.places import Placeholders


class Gauges(StatLoggerBase):
    """The last reading of the scheduler, and totals since the start; vLLM calls `record` after each
    step, in the event loop."""

    def __init__(self) -> None:
        names = ("num_active", "num_waiting", "kv_usage", "num_tokens", "num_preemptions")
        self.readings: dict[str, float] = dict.fromkeys(names, 0)

    def __call__(self, vllm_config: VllmConfig, engine_index: int = 0) -> "Gauges":
        """vLLM expects a factory; there is one engine, so one object."""
        return self

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        if scheduler_stats is not None:
            waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
            self.readings["num_active"] = scheduler_stats.num_running_reqs
            self.readings["num_waiting"] = waiting
            self.readings["kv_usage"] = scheduler_stats.kv_cache_usage
        if iteration_stats is not None:
            self.readings["num_tokens"] += iteration_stats.num_generation_tokens
            self.readings["num_preemptions"] += iteration_stats.num_preempted_reqs

    def log_engine_initialized(self) -> None:
        """Do nothing: the generator's log already names the engine."""


_END_S = 2.0


class VllmProcesses:
    """Finds out why vLLM's processes ended, since vLLM's exceptions only refer to a stack trace
    elsewhere. The reason is the last line of the file in `folder` to which
    `actors.engines.vllm.plugin` writes errors, and the exit code, since a process killed by a
    signal writes nothing."""

    def __init__(self, folder: Path) -> None:
        self._log_file = folder.absolute() / f"vllm-{os.getpid()}.log"
        self._processes: tuple[BaseProcess, ...] = ()

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Wrap the call that starts vLLM's processes.

        Raises:
            TransportError: vLLM did not start, with the last line of its errors.
        """
        self._log_file.parent.mkdir(parents=True, exist_ok=True)
        self._log_file.write_text("")
        os.environ[ERROR_LOG_VARIABLE] = str(self._log_file)
        before = multiprocessing.active_children()
        try:
            yield
        except Exception as error:
            raise TransportError(f"{error}; {self.death()}") from error
        self._processes = tuple(p for p in multiprocessing.active_children() if p not in before)

    def death(self) -> TransportError:
        """The error for vLLM's end. Waits for the end of its processes, at most `_END_S` each."""
        for process in self._processes:
            process.join(_END_S)
        codes = [process.exitcode for process in self._processes if process.exitcode]
        # The code of the process that failed first, as far as can be known: vLLM ends the others
        # itself.
        own = [code for code in codes if code not in (-signal.SIGTERM, -signal.SIGKILL)]
        return death("vLLM", next(iter([*own, *codes]), None), self._log_file)


@dataclass(frozen=True)
class VllmPrompt:
    """`token_ids` are what the model reads. With images, vLLM gets `collapsed` instead: one
    placeholder for each image, which vLLM's own processor expands to all of its tokens."""

    token_ids: list[int]
    collapsed: list[int] = field(default_factory=list)
    images: tuple[Any, ...] = ()
    media_ids: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        token_ids: list[int],
        media: Sequence[Media],
        reader: PatchReader,
        placeholders: Placeholders,
    ) -> "VllmPrompt":
        """
        Raises:
            RolloutError: a medium is malformed, has no place, or is a video.
        """
        if any(medium.kind == "video" for medium in media):
            raise RolloutError(
                "a prompt has a video, which vLLM would cut into frames of its own: use "
                "generator.engine hf"
            )
        sizes = [reader.size(medium) for medium in media]
        images = tuple(decode(medium.parts[0], "a medium") for medium in media)
        ids = tuple(medium.id for medium in media)
        return cls(token_ids, placeholders.collapse(token_ids, sizes), images, ids)

    def salted(self, cache_salt: str) -> Any:
        """The prompt as vLLM's `generate` takes it. Only prompts with the same salt share prefixes
        and image features, which vLLM caches by the image's uuid."""
        if not self.images:
            return tokens_input(self.token_ids, cache_salt=cache_salt)
        return TokensPrompt(
            prompt_token_ids=self.collapsed,
            multi_modal_data={"image": list(self.images)},
            multi_modal_uuids={"image": [f"{cache_salt}/{one}" for one in self.media_ids]},
            cache_salt=cache_salt,
        )

    def require_same(self, read: Sequence[int] | None) -> None:
        """
        Raises:
            RolloutError: vLLM's model has read token ids other than the recorded ones.
        """
        if self.images and list(read or ()) != self.token_ids:
            raise RolloutError(
                f"vLLM read {len(read or ())} tokens of a prompt that has {len(self.token_ids)}: "
                "its image processor has other settings than that of model.path"
            )


_AGAIN_S, _CHECK_S = 0.05, 1.0
# After this time vLLM's processes are killed; they have no state to save.
_SHUTDOWN_S = 1.0


class VllmEngine(UpdatableEngine):
    """Implements `streamrl.interfaces.Engine`; made in the event loop that uses it."""

    def __init__(self, config: RunConfig, *, seed: int, is_shared: bool = False) -> None:
        """Start vLLM with the weights of `model.path`; no other generator shares it.

        Raises:
            ConfigError: vLLM refuses the configuration, or lacks what the model needs.
            TransportError: vLLM did not start.
        """
        facts = ModelFacts.of(config.model)
        super().__init__(facts.shapes)
        require_all_sent(config.generator, facts)
        path, trust = config.model.path, config.model.trust_remote_code
        if facts.placeholders is not None:
            require_torchvision(path)
        self._reader = PatchReader.of(path, trust_remote_code=trust)
        self._placeholders = facts.placeholders
        self._eos = facts.eos
        self._gauges = Gauges()
        self._processes = VllmProcesses(config.run.path / "logs")
        arguments = engine_arguments(config, facts, seed=seed)
        with _finding(config.generator.device):
            self._llm = _start(arguments, self._gauges, self._processes)
        num_workers = self._llm.vllm_config.parallel_config.world_size_across_dp
        self._loader = WeightLoader(
            self._llm,
            self._require_alive,
            config.generator.vllm,
            num_workers=num_workers,
            request=WeightTransferUpdateRequest,
        )
        self._max_model_len: int = self._llm.model_config.max_model_len
        self._vocab_size: int = self._llm.model_config.get_vocab_size()
        # Only requests with the same salt share prefixes.
        self._cache_salt = "0"
        self._numbers = itertools.count()
        # Handles of requests in vLLM, by id; none is submitted while an update is loaded.
        self._submitted: dict[str, CompletionHandle] = {}
        self._may_submit = asyncio.Event()
        self._may_submit.set()
        self._requests = InFlightRequests[list[CompletionOutput]](self._raise_if_closed)
        self.is_closed = False

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        handle: CompletionHandle | None = None,
        media: Sequence[Media] = (),
    ) -> Completion:
        """One completion, cut at `max_new_tokens`, at the longest length or by the handle."""
        handle = handle or CompletionHandle()
        sampling = fitted(sampling, prompt_token_ids, self._max_model_len, self._vocab_size)
        prompt = VllmPrompt(list(prompt_token_ids))
        if media:
            reader, places = self._reader, self._placeholders
            if reader is None or places is None:
                raise RolloutError("a prompt has images, and the model of model.path sees none")
            token_ids = prompt.token_ids
            prompt = await asyncio.to_thread(VllmPrompt.of, token_ids, media, reader, places)
        params = vllm_sampling(sampling, stops_of(sampling, self._eos))

        async def send() -> Completion:
            handle.num_tokens = 0
            self._raise_if_closed()
            outputs = await self._requests.run(self._sample(prompt, params, handle))
            if not outputs:
                return nothing_sampled(FinishReason.ABORT)
            return _completion(outputs, sampling, prompt.token_ids)

        return await answered(send, sampling, handle.stop)

    def gauges(self) -> Mapping[str, float]:
        """The gauges of the interface, and `kv_usage` (fraction) and the total
        `num_preemptions`."""
        return {**self._gauges.readings, "pause_s": self._pause_s}

    async def close(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        await self._requests.cancel_all()
        await self._loader.close()
        await asyncio.to_thread(self._llm.shutdown, timeout=_SHUTDOWN_S)

    async def load_weights(self, update: WeightUpdate) -> LoadReport:
        """Load an update. Waits for that or for vLLM's end, after which an unanswered call would
        wait forever (https://github.com/vllm-project/vllm/pull/56416).

        Raises:
            TransportError: vLLM has ended.
        """
        try:
            return await first_result(super().load_weights(update), self._until_dead())
        except EngineDeadError as error:
            raise await asyncio.to_thread(self._processes.death) from error

    async def _until_dead(self) -> NoReturn:
        """Raise what vLLM has ended with. Waits for that."""
        while True:
            await asyncio.sleep(_CHECK_S)
            await self._require_alive()

    async def _receive(self, update: WeightUpdate) -> None:
        await self._loader.receive(update)

    async def _apply(self, update: WeightUpdate, on_loaded: Callable[[], None]) -> float:
        self._may_submit.clear()
        try:
            if self._loader.settings.keeps_old_kv:
                await self._llm.abort([i for i, h in self._submitted.items() if h.num_tokens == 0])
            return await self._loader.load_in_pause(str(update.policy_version), on_loaded)
        finally:
            self._may_submit.set()

    def _on_loaded(self, update: WeightUpdate) -> None:
        super()._on_loaded(update)
        self._cache_salt = f"{update.learner_id}/{update.policy_version}"

    async def _sample(
        self, prompt: VllmPrompt, params: VllmSamplingParams, handle: CompletionHandle
    ) -> list[CompletionOutput]:
        """vLLM's answers, each with its new tokens; [] if vLLM accepts no requests at present.
        Waits until no update is being loaded, then for the last answer; canceling frees the
        request's slot."""
        await self._may_submit.wait()
        salted = prompt.salted(self._cache_salt)
        request_id = str(next(self._numbers))
        self._submitted[request_id] = handle
        outputs: list[CompletionOutput] = []
        try:
            async with aborted_on(handle.stop, lambda: self._llm.abort(request_id)):
                async for answer in self._llm.generate(salted, params, request_id):
                    outputs += answer.outputs
                    handle.num_tokens += len(outputs[-1].token_ids)
        except EngineDeadError as error:
            raise await asyncio.to_thread(self._processes.death) from error
        except Exception as error:
            # vLLM 0.33 answers this way to requests that arrive in a pause that ends those in
            # flight.
            if getattr(error, "status_code", None) == HTTPStatus.SERVICE_UNAVAILABLE:
                await asyncio.sleep(_AGAIN_S)
                return []
            raise RolloutError(f"vLLM refused a request: {error.__cause__ or error}") from error
        finally:
            del self._submitted[request_id]
        prompt.require_same(answer.prompt_token_ids)
        return outputs

    async def _require_alive(self) -> None:
        if self._llm.errored:
            raise await asyncio.to_thread(self._processes.death)

    def _raise_if_closed(self) -> None:
        if self.is_closed:
            raise RolloutError("the engine is closed")


@contextmanager
def _finding(device: str) -> Iterator[None]:
    """Let vLLM's processes, which take every GPU that they see, see only this one during the
    block."""
    name = "CUDA_VISIBLE_DEVICES"
    before = os.environ.get(name)
    os.environ.update(visible_alone(device, os.environ))
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


def _start(arguments: AsyncEngineArgs, gauges: Gauges, processes: VllmProcesses) -> AsyncLLM:
    """Start vLLM without two costs per token in our event loop that are of no use here: observing
    it for Prometheus, and reading environment variables again (vLLM's own processes cache them,
    too)."""
    disable_envs_cache()
    try:
        checked = arguments.create_engine_config()
    except ValueError as error:
        raise ConfigError(f"generator.engine vllm: vLLM refuses its arguments: {error}") from error
    with processes.starting():
        llm = AsyncLLM.from_vllm_config(checked, stat_loggers=[gauges])
    enable_envs_cache()
    loggers = llm.logger_manager.stat_loggers
    loggers[:] = [one for one in loggers if not isinstance(one, PrometheusStatLogger)]
    return llm


def _completion(
    outputs: Sequence[CompletionOutput], sampling: SamplingParams, prompt: Sequence[int]
) -> Completion:
    last, found = outputs[-1], [output.logprobs for output in outputs]
    token_ids = [token_id for output in outputs for token_id in output.token_ids]
    versions = np.full(len(token_ids), -1, dtype=np.int32)
    for span in last.weight_versions:
        versions[span.start : span.end] = 0 if span.version == UNLABELED else int(span.version)
    mask, top = sets_of(
        (
            candidates(some.token_ids[start:end], some.logprobs[start:end])
            for some in found
            for start, end in zip(some.start_indices, some.end_indices, strict=True)
        ),
        sampling,
    )
    experts = None
    if sampling.keep_routed_experts:
        experts = recorded(last.routed_experts, prompt, token_ids, "vLLM", last.finish_reason)
    return completion(
        token_ids,
        [some.logprobs[i] for some in found for i in some.start_indices],
        versions,
        last.finish_reason,
        sampling_mask=mask,
        top_logprobs=top,
        routed_experts=experts,
    )
