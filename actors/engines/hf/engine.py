"""The HF engine: a transformers model in this process, with continuous batching.

One thread decodes; the event loop hands it requests and weights and gets completions back. Between
two tokens the thread admits requests, returns finished ones and swaps weights, so no request waits
for the longest completion and no update interrupts one.

Invariant: every request gets one answer: a completion, its own RolloutError, or, if the thread has
died, the thread's error.

The model is loaded by transformers; `generator.engine_kwargs` may add to the settings, but not
contradict them.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Self

import torch
from transformers import PreTrainedModel

from actors.engines.hf.batch import HfRequest, RunningBatch
from actors.engines.model import device_of, eos_token_ids, fitted
from actors.engines.requests import nothing_sampled
from actors.engines.updates import UpdatableEngine
from streamrl.config import RunConfig
from streamrl.errors import ConfigError, RolloutError, WeightTransferError
from streamrl.interfaces import CompletionHandle
from streamrl.types import Completion, Media, SamplingParams, TensorSpec, WeightUpdate
from streamrl.vision.families import load_pretrained
from streamrl.vision.patches import PatchReader
from streamrl.vision.tower import vision_tower
from streamrl.weights import lora
from streamrl.weights.layout import Layout, dtype_name
from streamrl.weights.transports.receive import TransferReceiver


@dataclass(frozen=True)
class _Copy:
    """A set of parameters: its bytes, and a view of each parameter by name."""

    manifest: tuple[TensorSpec, ...]
    data: torch.Tensor
    views: dict[str, torch.Tensor]

    @classmethod
    def make(cls, manifest: tuple[TensorSpec, ...], device: torch.device) -> "_Copy":
        layout = Layout(manifest, 1)
        data = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device)
        return cls(manifest, data, {s.spec.name: s.read(s.of(data)) for s in layout.slots})


class SpareWeights:
    """A second set of parameters, filled while the first one samples; those the learner does not
    send keep their values. An update never writes to a parameter in use.

    `swap` exchanges storage pointers, so sampling pauses for microseconds however large the model
    is. Each set has the layout of the update's bytes, so an update in the engine's precision is
    received in place. LoRA factors are merged on arrival: then a set holds only the matrices with
    factors, and their base is kept besides.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._active = dict(model.named_parameters())
        self._used: _Copy | None = None
        self._spare: _Copy | None = None
        self._base: dict[str, torch.Tensor] | None = {
            name: parameter.data for name, parameter in self._active.items()
        }

    def landing(self, manifest: tuple[TensorSpec, ...]) -> torch.Tensor | None:
        """Memory to receive the update in place; None if its precision differs. Called once for
        each update, before `stage`.

        Raises:
            WeightTransferError: the update holds LoRA factors, and an earlier one a whole model.
        """
        own = self._own(manifest)
        if self._spare is None or self._spare.manifest != own:
            self._spare = _Copy.make(own, next(iter(self._active.values())).device)
        return self._spare.data if own == manifest else None

    def base(self, name: str) -> torch.Tensor:
        """The parameter as it was when the engine started."""
        assert self._base is not None, "landing() refused the factors"
        return self._base[name]

    def _own(self, manifest: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
        """The part of the update that is staged, in the engine's precision."""
        names = tuple(spec.name for spec in manifest)
        if not lora.is_of_factors(manifest):
            self._base = None
        elif self._base is None:
            raise WeightTransferError(
                "LoRA's factors after a whole model: the base is gone, start this generator again"
            )
        else:
            names = tuple(dict.fromkeys(map(lora.matrix_of, names)))
            self._base = {name: self._base[name] for name in names}
        return tuple(
            TensorSpec(name, dtype_name(p.dtype), (*p.shape,))
            for name, p in ((name, self._active[name]) for name in names)
        )

    def stage(self, received: lora.Tensors) -> None:
        """Keep an update's tensors for the next swap, in the engine's precision, with factors
        merged into their matrices."""
        assert self._spare is not None, "landing() was called"
        for name, tensor in lora.merged(received, self.base):
            view = self._spare.views[name]
            if tensor.data_ptr() != view.data_ptr():
                view.copy_(tensor)

    def swap(self) -> None:
        """Make the staged set active; the active one becomes the next staging area."""
        assert self._spare is not None, "nothing was staged"
        for name, staged in self._spare.views.items():
            self._active[name].data = staged
        self._used, self._spare = self._spare, self._used


def load_model(config: RunConfig) -> PreTrainedModel:
    """The model at `model.path` in `generator.dtype`, on the CPU.

    Raises:
        ConfigError: the model is missing or incomplete, cannot be made with
            `generator.engine_kwargs`, or has no LM head for `generator.lm_head_dtype`.
    """
    path, trust = config.model.path, config.model.trust_remote_code
    kwargs = config.generator.engine_kwargs
    try:
        dtype = getattr(torch, config.generator.dtype)
        model: PreTrainedModel = load_pretrained(
            path, dtype=dtype, trust_remote_code=trust, **kwargs
        )
    except (OSError, ValueError, TypeError, ImportError) as error:
        if kwargs:
            names = ", ".join(kwargs)
            raise ConfigError(
                f"model.path {path!r} with generator.engine_kwargs ({names}): {error}"
            ) from error
        if isinstance(error, TypeError | ImportError):
            raise
        raise ConfigError(f"model.path: no model at {path!r}: {error}") from error
    if config.generator.lm_head_dtype:
        _use_float32_head(model)
    return model


def _use_float32_head(model: PreTrainedModel) -> None:
    """Compute logits in float32 from the weights as they are (MiniMax-M1, arXiv 2506.13585, section
    3.2)."""
    head: Any = model.get_output_embeddings()
    is_linear = type(head) is torch.nn.Linear
    if not is_linear:
        raise ConfigError(
            f"generator.lm_head_dtype: was 'float32', and {model.config.model_type} has no linear "
            "LM head to compute in it; leave it out"
        )

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        bias = None if head.bias is None else head.bias.float()
        return torch.nn.functional.linear(hidden.float(), head.weight.float(), bias)

    head.forward = forward


log = logging.getLogger(__name__)
Future = asyncio.Future[Completion]
CLOSE_S = 4.0


class HfEngine(UpdatableEngine):
    """Implements `streamrl.interfaces.Engine`; made in the event loop that uses it."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        eos_token_ids: frozenset[int],
        max_num_seqs: int,
        max_model_len: int,
        seed: int = 0,
        reader: PatchReader | None = None,
        recompute_kv: bool = False,
        watches_experts: bool = False,
    ) -> None:
        super().__init__({name: tuple(p.shape) for name, p in model.named_parameters()})
        self._loop = asyncio.get_running_loop()
        self._max_model_len = max_model_len
        self._vocab_size: int = model.config.get_text_config().vocab_size
        self._tower = vision_tower(model, reader)
        self._recompute_kv = recompute_kv
        if recompute_kv and self._tower is not None:
            raise ConfigError("generator.hf.recompute_kv: was true, and the model sees images")
        self._batch = RunningBatch(
            model,
            num_slots=max_num_seqs,
            max_model_len=max_model_len,
            eos_token_ids=eos_token_ids,
            seed=seed,
            tower=self._tower,
            watches_experts=watches_experts,
        )
        self._weights = SpareWeights(model)
        self._transfer = TransferReceiver(next(model.parameters()).device)
        self._arrived: list[tuple[HfRequest, Future]] = []
        self._waiting: deque[tuple[HfRequest, Future]] = deque()
        self._running: dict[HfRequest, Future] = {}
        self._commands: list[Callable[[], None]] = []
        self._swapped: asyncio.Future[float] | None = None
        self._wake = threading.Condition()
        self._is_closed = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="hf-engine", daemon=True)
        self._thread.start()

    @classmethod
    def from_config(cls, config: RunConfig, *, seed: int, is_shared: bool = False) -> Self:
        """With the weights of `model.path`; raises as `load_model` does."""
        generator = config.generator
        path, trust = config.model.path, config.model.trust_remote_code
        model: Any = load_model(config)
        return cls(
            model.to(device_of(generator.device)).eval(),
            eos_token_ids=eos_token_ids(config.model),
            max_num_seqs=generator.max_num_seqs,
            max_model_len=config.max_model_len,
            seed=seed,
            reader=PatchReader.of(path, trust_remote_code=trust),
            recompute_kv=generator.hf.recompute_kv,
            watches_experts=config.algorithm.records_experts,
        )

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        handle: CompletionHandle | None = None,
        media: Sequence[Media] = (),
    ) -> Completion:
        """One completion, cut at `max_new_tokens`, at the longest length or by the handle."""
        sampling = fitted(sampling, prompt_token_ids, self._max_model_len, self._vocab_size)
        request = HfRequest(
            tuple(prompt_token_ids), sampling, handle or CompletionHandle(), media=tuple(media)
        )
        if media:
            if self._tower is None:
                raise RolloutError("a prompt has images, and the model of model.path sees none")
            # This decodes the media, before the prefill that needs them.
            offset_of = self._tower.offset
            request.offset = await asyncio.to_thread(offset_of, request.prompt, request.media)
        request.handle.num_tokens = 0
        future: Future = self._loop.create_future()
        self._raise_if_dead()
        if not self._arrived:
            self._loop.call_soon(self._submit)
        self._arrived.append((request, future))
        try:
            return await future
        finally:
            request.is_canceled = True

    def _submit(self) -> None:
        """Hand over together what arrived in one turn of the event loop, so that it shares a
        prefill."""
        arrived, self._arrived = self._arrived, []
        with self._wake:
            if self._failure is None and not self._is_closed:
                self._waiting.extend(arrived)
                self._wake.notify()
                return
        error = self._failure or RolloutError("the engine is closed")
        _reject([future for _, future in arrived], error)

    def gauges(self) -> Mapping[str, float]:
        return {
            "num_active": len(self._running),
            "num_waiting": len(self._arrived) + len(self._waiting),
            "num_tokens": self._batch.num_tokens,
            "pause_s": self._pause_s,
        }

    async def close(self) -> None:
        """Waits at most CLOSE_S for the decoding thread's current step; a thread that hangs ends
        with the process."""
        with self._wake:
            self._is_closed = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join, CLOSE_S)
        if self._thread.is_alive():
            log.warning("the decoding thread is still in one step after %g s: left alone", CLOSE_S)
        self._transfer.close()

    async def _receive(self, update: WeightUpdate) -> None:
        await asyncio.to_thread(self._stage, update)

    def _stage(self, update: WeightUpdate) -> None:
        landing = self._weights.landing(update.manifest)
        self._weights.stage(self._transfer.tensors(update, landing))

    async def _apply(self, update: WeightUpdate, on_loaded: Callable[[], None]) -> float:
        """Waits until the decoding thread has swapped between two steps, or has ended."""
        swapped: asyncio.Future[float] = self._loop.create_future()

        def swap() -> None:
            start = perf_counter()
            self._weights.swap()
            on_loaded()
            if self._recompute_kv:
                self._batch.recompute()
            pause_s = perf_counter() - start
            self._loop.call_soon_threadsafe(_resolve, [(swapped, pause_s)])

        with self._wake:
            self._raise_if_dead()
            self._commands.append(swap)
            self._swapped = swapped
            self._wake.notify()
        return await swapped

    def _raise_if_dead(self) -> None:
        if self._failure is not None:
            raise RuntimeError("the engine's thread has ended with an error") from self._failure
        if self._is_closed:
            raise RolloutError("the engine is closed")

    # The decoding thread.

    def _run(self) -> None:
        try:
            self._decode()
            self._fail_all(RolloutError("the engine is closed"))
        except BaseException as error:
            self._failure = error
            self._fail_all(error)
            raise

    def _decode(self) -> None:
        """Decode, one step per turn. Without requests it waits for one, or for a swap."""
        while True:
            with self._wake:
                self._wake.wait_for(self._has_work)
                commands, self._commands = self._commands, []
                joining = self._admit()
            if self._is_closed:
                return
            for command in commands:
                command()
            if joining:
                self._batch.join(joining, self.policy_version)
            elif len(self._batch):
                self._batch.step(self.policy_version)
            self._answer(self._batch.leave())

    def _has_work(self) -> bool:
        return bool(self._is_closed or self._commands or self._waiting or len(self._batch))

    def _admit(self) -> list[HfRequest]:
        """Admit all waiting requests if there are slots for all; otherwise fill slots once enough
        are free: a prefill delays running requests by about one step, so many share one."""
        self._answer_stopped()
        free = self._batch.num_slots - len(self._batch)
        if free < min(len(self._waiting), max(1, self._batch.num_slots // 8)):
            return []
        joining: list[HfRequest] = []
        while self._waiting and len(joining) < free:
            request, future = self._waiting.popleft()
            if not request.is_canceled:
                self._running[request] = future
                joining.append(request)
        return joining

    def _answer_stopped(self) -> None:
        stopped = [entry for entry in self._waiting if entry[0].is_stopped]
        for entry in stopped:
            self._waiting.remove(entry)
        if stopped:
            answers = [(future, nothing_sampled()) for _, future in stopped]
            self._loop.call_soon_threadsafe(_resolve, answers)

    def _answer(self, done: list[tuple[HfRequest, Completion]]) -> None:
        answers = [(self._running.pop(request), completion) for request, completion in done]
        if answers:
            self._loop.call_soon_threadsafe(_resolve, answers)

    def _fail_all(self, error: BaseException) -> None:
        with self._wake:
            futures: list[asyncio.Future[Any]] = [future for _, future in self._waiting]
            futures.extend(self._running.values())
            if self._swapped is not None:
                futures.append(self._swapped)
            self._waiting.clear()
            self._running.clear()
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_reject, futures, error)


def _resolve(answers: Sequence[tuple[asyncio.Future[Any], object]]) -> None:
    for future, answer in answers:
        if not future.done():
            future.set_result(answer)


def _reject(futures: Sequence[asyncio.Future[Any]], error: BaseException) -> None:
    for future in futures:
        if not future.done():
            future.set_exception(error)
