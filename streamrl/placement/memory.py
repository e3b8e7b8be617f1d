"""Estimates how much memory the processes of a plan need on their GPUs, before anything runs.

`ModelShape`: the sizes of a model that determine its memory. Parameters are counted in the headers
of its files. Their division into layers (and all of them if there are no files) follows from
config.json, read as transformers reads it for decoders like Llama's.

`LearnerMemory`: the memory of a learner's rank, as the learner allocates it.

    weights, gradients, AdamW   4 + 4 + 8 bytes a trained parameter, divided by the ranks that
                                shard (ZeRO, arXiv 1910.02054, section 3.1; here all is float32)
    gathered layers             two at a time and the embeddings, in `learner.dtype`
    activations                 what a layer keeps for the backward pass, operation by operation as
                                in arXiv 2205.05198, section 4.1, for RMS norms, a gated MLP, and
                                attention that keeps no scores

`engine_need`: the memory of an engine; HF's takes a second copy of the weights for updates.

    weights      in `generator.dtype`, divided by the GPUs that share each matrix, or the layers
    KV cache     2 x layers x heads x width x bytes a token (PagedAttention, arXiv 2309.06180,
                 section 3), divided alike, or layers x width x bytes where the heads share a
                 latent (MLA, arXiv 2405.04434): one sequence of `generator.max_model_len` in any
                 case, `max_num_seqs` of them at most

`Fit`: whether what is placed on a GPU fits there. vLLM and SGLang fill a fraction of a GPU, by
default nearly all; if they share it, the plan sets the fraction to what the others leave.

Invariant: pure; only what shapes and settings make certain is refused. Activations, blocks of
logits and the driver's own memory are rough estimates.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from streamrl.config import RunConfig
from streamrl.config.generator import GeneratorSettings
from streamrl.config.learner import LoraSettings
from streamrl.config.model import LLAMA, RecipeSettings
from streamrl.errors import ConfigError
from streamrl.findings import MEMORY, Finding
from streamrl.model_folder import local_folder
from streamrl.placement.limits import carries_state, num_experts
from streamrl.placement.plan import Device, Host, MemoryPart, Need, gib
from streamrl.placement.seats import (
    DEVICE_SETTINGS,
    Seat,
    pipeline_parallel_size,
    size_setting,
    tensor_parallel_size,
)

_NUM_SPECIAL_TOKENS = 4


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model; widths are those of all heads together."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    """The MLP width that a token passes: the sum over its active experts, if there are some."""
    query_width: int
    key_value_width: int
    num_key_value_heads: int
    vocab_size: int
    num_embeddings: int
    """Parameters of the embedding and of an untied LM head."""
    num_parameters: int
    num_growing_layers: int
    """Layers whose keys and values grow with the sequence: not those with a sliding window or a
    state."""
    latent_width: int
    """The values that multi-head latent attention keeps per token, whole on each device; 0 without
    it."""

    def kv_bytes_per_token(self, dtype_bytes: int, tensor_parallel: int = 1) -> int:
        """The least bytes for keys and values of one token on one of the devices that share the
        heads; a device has at least one head."""
        heads = -(-self.num_key_value_heads // tensor_parallel)
        width = self.key_value_width // self.num_key_value_heads
        return self.num_growing_layers * (self.latent_width or 2 * heads * width) * dtype_bytes

    @classmethod
    def of(cls, config: RunConfig) -> "ModelShape | None":
        """The shape of the run's model; None if it is not on this machine, or is of another
        kind."""
        model = config.model
        if model.missing is not None:
            return cls.of_facts(recipe_facts(model.missing))
        return cls._of_folder("model.path", model.path)

    @classmethod
    def of_critic(cls, config: RunConfig) -> "ModelShape | None":
        """The shape of the model that the critic starts from."""
        own = config.algorithm.value.model_path
        return cls._of_folder("algorithm.value.model_path", own) if own else cls.of(config)

    @classmethod
    def of_teachers(cls, config: RunConfig) -> "tuple[ModelShape | None, ...]":
        """The shapes of the teachers in the learner."""
        settings = config.algorithm.distillation
        paths = [teacher.path for teacher in settings.in_learner] if settings else []
        return tuple(
            cls._of_folder("algorithm.distillation.teachers", path) for path in paths if path
        )

    @classmethod
    def _of_folder(cls, setting: str, path: str) -> "ModelShape | None":
        folder = local_folder(setting, path)
        try:
            return cls.of_facts(folder.config, folder.num_parameters) if folder else None
        except (ConfigError, KeyError, TypeError, ValueError):
            return None

    @classmethod
    def of_facts(cls, facts: Mapping[str, Any], num_parameters: int = 0) -> "ModelShape":
        """The shape from the content of config.json, which also gives the number of parameters if
        that is 0. Raises KeyError if a size is missing."""
        hidden = _size(facts, "hidden_size", "n_embd")
        heads = _size(facts, "num_attention_heads", "n_head")
        key_value_heads = facts.get("num_key_value_heads") or heads
        width = facts.get("head_dim") or hidden // heads
        vocab_size = _size(facts, "vocab_size")
        inner = facts.get("intermediate_size") or facts.get("n_inner") or 4 * hidden
        if num_experts(facts) > 1:
            inner = _num_active(facts) * int(facts.get("moe_intermediate_size") or inner)
        is_tied = facts.get("tie_word_embeddings", True)
        num_layers = _size(facts, "num_hidden_layers", "n_layer")
        kinds = facts.get("layer_types") or num_layers * ["attention"]
        if not facts.get("layer_types") and carries_state(facts):
            kinds = []  # Which layers carry the state is unknown.
        latent = facts.get("kv_lora_rank") or 0
        shape = cls(
            num_layers=num_layers,
            hidden_size=hidden,
            intermediate_size=inner,
            query_width=heads * width,
            key_value_width=key_value_heads * width,
            num_key_value_heads=key_value_heads,
            vocab_size=vocab_size,
            num_embeddings=vocab_size * hidden * (1 if is_tied else 2),
            num_parameters=num_parameters,
            num_growing_layers=sum(kind in ("attention", "full_attention") for kind in kinds),
            latent_width=latent and latent + (facts.get("qk_rope_head_dim") or 0),
        )
        return shape if num_parameters else shape._counted(facts)

    def _counted(self, facts: Mapping[str, Any]) -> "ModelShape":
        """The shape with its parameters counted: gated MLPs (three matrices), attention and two
        norms per layer."""
        attention = 2 * self.hidden_size * (self.query_width + self.key_value_width)
        width = self.intermediate_size * num_experts(facts) // _num_active(facts)
        layer = attention + 3 * self.hidden_size * width + 2 * self.hidden_size
        total = self.num_layers * layer + self.num_embeddings + self.hidden_size
        return ModelShape(**{**vars(self), "num_parameters": total})


def _size(facts: Mapping[str, Any], *names: str) -> int:
    value = next((facts[name] for name in names if facts.get(name)), None)
    if not isinstance(value, int):
        raise KeyError(names[0])
    return value


def _num_active(facts: Mapping[str, Any]) -> int:
    return min(num_experts(facts), facts.get("num_experts_per_tok") or 1)


def recipe_facts(recipe: RecipeSettings) -> Mapping[str, Any]:
    return {
        # The type of a user's own architecture is unknown before the model is made.
        "model_type": LLAMA if recipe.architecture == LLAMA else None,
        "hidden_size": recipe.hidden_size,
        "intermediate_size": recipe.intermediate_size,
        "num_hidden_layers": recipe.num_layers,
        "num_attention_heads": recipe.num_heads,
        "vocab_size": len(recipe.alphabet) + _NUM_SPECIAL_TOKENS,
        "tie_word_embeddings": False,
    }


_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
_FLOAT32, _MOMENTS = 4, 8
_SEND_BUFFERS = 2
_LOGIT_BLOCK_BYTES = 3 * 4 * 2**26
"""Memory of token_logprobs on a GPU: 2^26 logits in float32, and as much for each of two
intermediate results."""
_DRIVER = MemoryPart("CUDA and libraries", 2**30, is_certain=False)
"""Roughly what CUDA, cuBLAS and NCCL take in one process."""


@dataclass(frozen=True)
class LearnerMemory:
    """The memory of one rank among `num_ranks`; the first one (`sends`) has the buffers for sending
    weights."""

    config: RunConfig
    shape: ModelShape
    num_ranks: int
    sends: bool = True
    critic: ModelShape | None = None
    """None if it is the policy's shape."""

    def need(self) -> Need:
        """The need at the peak of a step; loading takes less."""
        return Need.of((*self._held(), *self._step(), _DRIVER), self._remedies())

    @property
    def num_trained(self) -> int:
        """Parameters with a gradient."""
        lora = self.config.learner.lora
        return self.shape.num_parameters if lora is None else adapter_size(self.shape, lora)

    @property
    def _parameters(self) -> tuple[int, int]:
        """The numbers of parameters that are float32 masters, and that exist only in the compute
        dtype. The latter are the frozen weights beside an adapter; that the model itself is in
        bfloat16 cannot be seen here, so `learner.dtype` decides."""
        learner, total = self.config.learner, self.shape.num_parameters
        if learner.lora is None or learner.dtype != "bfloat16":
            return total, 0
        return self.num_trained, total

    @property
    def _is_sharded(self) -> bool:
        offload = self.config.learner.offload
        return self.num_ranks > 1 or offload.parameters or offload.reference

    @property
    def _compute_bytes(self) -> int:
        return _SIZES[self.config.learner.dtype]

    def _held(self) -> Iterator[MemoryPart]:
        """The memory held between steps."""
        learner, algorithm = self.config.learner, self.config.algorithm
        total = self.shape.num_parameters
        critic = (self.critic or self.shape).num_parameters if algorithm.needs_values else 0
        if not learner.offload.parameters:
            masters, narrow = self._parameters
            weights = _FLOAT32 * masters + self._compute_bytes * narrow
            yield MemoryPart("weights", self._shard(weights))
            yield MemoryPart("gradients", self._shard(_FLOAT32 * self.num_trained))
            if algorithm.needs_values:
                yield MemoryPart("critic", self._shard((2 * _FLOAT32 + _MOMENTS) * critic))
            has_reference = algorithm.needs_reference and learner.lora is None
            if has_reference and not learner.offload.reference:
                reference = _FLOAT32 if self._is_sharded else self._compute_bytes
                yield MemoryPart("reference", self._shard(reference * total))
            if not learner.offload.reference:
                yield from self._teachers()
            if not learner.offload.optimizer:
                yield MemoryPart("optimizer", self._shard(_MOMENTS * self.num_trained))
            if not self._is_sharded and self._compute_bytes < _FLOAT32:
                copies = self._compute_bytes * (masters + critic)
                yield MemoryPart(f"copies in {learner.dtype}", copies)
        if self._is_sharded and not learner.sum_each_micro_batch:
            yield MemoryPart("unsummed gradients", _FLOAT32 * self.num_trained)
        if self.sends:
            is_adapter = learner.lora is not None and learner.lora.publish == "adapter"
            size = _SIZES[self.config.weights.dtype or "float32"]
            sent = size * (self.num_trained if is_adapter else total)
            yield MemoryPart("weights to send", _SEND_BUFFERS * sent)

    def _teachers(self) -> Iterator[MemoryPart]:
        if teachers := ModelShape.of_teachers(self.config):
            counts = [(teacher or self.shape).num_parameters for teacher in teachers]
            size = _FLOAT32 if self._is_sharded else self._compute_bytes
            yield MemoryPart("teachers", self._shard(size * sum(counts)))

    def on_host(self, *, on_cpu: bool) -> tuple[MemoryPart, ...]:
        """The host memory that `algorithm.rescore_share` and teachers take; `on_cpu`: the learner
        has no GPU."""
        parts: tuple[MemoryPart, ...] = ()
        num_versions = self.config.buffer.largest_staleness
        if self.config.algorithm.rescore_share and num_versions:
            # The newest weights are copied, too, while an older version scores.
            copies = (num_versions + 1) * self._shard(_FLOAT32 * self.num_trained)
            parts = (MemoryPart("copies for rescore_share", copies),)
        is_there = on_cpu or self.config.learner.offload.reference
        return (*parts, *self._teachers()) if is_there else parts

    def _step(self) -> tuple[MemoryPart, ...]:
        """The memory of the larger pass, or of the update if its moments then come from the host
        and are larger."""
        passing = max(map(tuple, self._passes()), key=lambda parts: sum(p.num_bytes for p in parts))
        offload = self.config.learner.offload
        moments = self._shard(_MOMENTS * self.num_trained) if offload.optimizer else 0
        if moments > sum(part.num_bytes for part in passing):
            return (MemoryPart("optimizer, for the update", moments),)
        return passing

    def _passes(self) -> Iterator[Iterator[MemoryPart]]:
        """The memory of the policy's pass and of the critic's, which follow each other."""
        tokens = self.config.learner.max_tokens_per_micro_batch
        yield self._pass(self.shape, tokens)
        if self.config.algorithm.needs_values:
            own = self.config.algorithm.value.max_tokens_per_micro_batch
            yield self._pass(self.critic or self.shape, own or tokens)

    def _pass(self, shape: ModelShape, max_tokens: int) -> Iterator[MemoryPart]:
        learner = self.config.learner
        size, tensor = self._compute_bytes, learner.mesh.tensor
        if self._is_sharded:
            layer = max(0, shape.num_parameters - shape.num_embeddings) // shape.num_layers
            layers = 2 * layer // tensor
            yield MemoryPart("gathered layers", size * (layers + shape.num_embeddings))
        tokens = -(-max_tokens // learner.mesh.sequence)
        layer = activation_bytes(shape, size, tensor) * tokens
        every = int(learner.gradient_checkpointing)
        recomputed = -(-shape.num_layers // every) if every else 0
        kept = shape.num_layers - recomputed + bool(recomputed)
        inputs = 0 if learner.offload.activations else recomputed * shape.hidden_size
        yield MemoryPart("activations", layer * kept + inputs * size * tokens, is_certain=False)
        logits = min(_LOGIT_BLOCK_BYTES, 3 * _FLOAT32 * tokens * shape.vocab_size)
        yield MemoryPart("logits", logits, is_certain=False)

    def _shard(self, num_bytes: int) -> int:
        _, shard, sequence, tensor = self.config.learner.mesh.sizes(self.num_ranks)
        return -(-num_bytes // (shard * sequence * tensor))

    def _remedies(self) -> Iterator[str]:
        learner = self.config.learner
        yield "more learner.num_ranks"
        if self.sends and self.config.weights.dtype in (None, "float32"):
            yield "weights.dtype bfloat16"
        if learner.lora is None:
            yield "learner.lora"
        if not learner.offload.parameters:
            yield "learner.offload.parameters"
        if learner.gradient_checkpointing is not True:
            yield "learner.gradient_checkpointing"
        yield "a smaller learner.max_tokens_per_micro_batch"


def activation_bytes(shape: ModelShape, dtype_bytes: int, tensor: int = 1) -> int:
    """Bytes that one token keeps in one decoder layer, with `tensor` ranks that share its matrices.

    Kept are the input, the normalized input (both float32) and the result of two norms; queries,
    keys, values and the output of attention; four times the width of the MLP.
    """
    norms = 2 * shape.hidden_size * (2 * _FLOAT32 + dtype_bytes)
    attention = 2 * shape.query_width + 2 * shape.key_value_width
    return norms + (attention + 4 * shape.intermediate_size) * dtype_bytes // tensor


def adapter_size(shape: ModelShape, lora: LoraSettings) -> int:
    """Parameters of an adapter: the two factors of each matrix that has one."""
    h, q = shape.hidden_size, shape.query_width
    kv, i = shape.key_value_width, shape.intermediate_size
    widths = {"q_proj": h + q, "k_proj": h + kv, "v_proj": h + kv, "o_proj": q + h}
    widths |= {"gate_proj": h + i, "up_proj": h + i, "down_proj": i + h}
    chosen = widths if lora.targets == "all-linear" else lora.targets
    return lora.rank * shape.num_layers * sum(widths.get(name, h + h) for name in chosen)


def engine_need(generator: GeneratorSettings, shape: ModelShape, max_model_len: int) -> Need:
    """The need of a generator's engine, or of the validator's with its own settings;
    `max_model_len` is the run's."""
    engine, size = generator.engine, _SIZES[generator.dtype]
    tensor, layers = tensor_parallel_size(generator), pipeline_parallel_size(generator)
    weights = shape.num_parameters * size // (tensor * layers)
    parts = [MemoryPart("weights", weights)]
    if engine == "hf":
        parts = [MemoryPart("weights, twice", 2 * weights)]
    if engine == "vllm" and (given := generator.vllm.kv_cache_memory_bytes):
        parts.append(MemoryPart("KV cache", given))
    else:
        longest, more = generator.max_model_len or max_model_len, generator.max_num_seqs - 1
        one = shape.kv_bytes_per_token(size, tensor) // layers * longest
        parts.append(MemoryPart("KV cache of one sequence", one))
        parts.append(MemoryPart(f"KV cache of {more} more", more * one, is_certain=False))
    remedies = ["generator.dtype bfloat16"] if generator.dtype == "float32" else []
    if engine in ("vllm", "sglang"):
        remedies.append(f"more {size_setting(generator)}")
    return Need.of((*parts, _DRIVER), (*remedies, "a smaller generator.max_model_len"))


def fraction_of(generator: GeneratorSettings) -> tuple[str, float | None]:
    """The setting for the fraction of a GPU that an engine takes ("" if it has none), and the value
    that a person has set."""
    match generator.engine:
        case "vllm":
            name, given = "gpu_memory_utilization", generator.vllm.gpu_memory_utilization
        case "sglang":
            name, given = "mem_fraction_static", generator.sglang.mem_fraction_static
        case _:
            return "", None
    return f"generator.{generator.engine}.{name}", generator.engine_kwargs.get(name, given)


_USABLE = 0.9
_STATIC = 0.85
"""The share of SGLang's memory that its setting covers: activations and CUDA graphs come on top."""


class DoesNotFitError(ConfigError):
    """A GPU certainly has less memory than the processes on it need."""


class _Use(NamedTuple):
    """The bytes of a GPU that a seat takes in any case (`least`) and by the estimate (`likely`). An
    engine that `is_open` gets the fraction that the others leave."""

    seat: Seat
    need: Need | None
    least: float
    likely: float
    is_open: bool

    def described(self, words: str, num_bytes: float) -> str:
        parts = f" ({self.need.describe()})" if self.need else ""
        return f"{self.seat.name} needs {words} {gib(num_bytes)}{parts}"


@dataclass(frozen=True)
class _Gpu:
    """A GPU that is used, and its uses."""

    host: Host
    device: Device
    uses: list[_Use]

    @property
    def setting(self) -> str:
        return DEVICE_SETTINGS[self.uses[0].seat.role]

    def __str__(self) -> str:
        where = "here" if self.host.name == "here" else f"of {self.host.name}"
        return f"GPU {self.device.index} {where}"

    @property
    def open_fraction(self) -> float:
        """The fraction for each engine whose fraction is not set."""
        memory_bytes = self.device.memory_bytes
        if not memory_bytes or self.uses[0].need is None:
            return _USABLE / len(self.uses)
        least = [use.least for use in self.uses if use.is_open]
        taken = sum(use.likely for use in self.uses if not use.is_open)
        left = _USABLE - taken / memory_bytes
        return max(left / len(least), max(least) / memory_bytes + 0.01)


@dataclass(frozen=True)
class Fit:
    """Whether the seats of a run fit on the GPUs of its hosts. `shape` is None if the model is not
    here, so nothing is known; `critic` is None if it is like the policy's."""

    config: RunConfig
    seats: Sequence[Seat]
    shape: ModelShape | None
    critic: ModelShape | None = None

    def need(self, seat: Seat, position: int = 0) -> Need | None:
        """The need of a seat's rank at this position, which is on its GPU at this position if it
        has GPUs; None if nothing is known."""
        if self.shape is None or seat.role == "buffer":
            return None
        if seat.role == "learner":
            sends = seat == self._learners[0] and position == 0
            num_ranks = sum(other.num_ranks for other in self._learners)
            return LearnerMemory(self.config, self.shape, num_ranks, sends, self.critic).need()
        return engine_need(self.generator(seat), self.shape, self.config.max_model_len)

    def generator(self, seat: Seat) -> GeneratorSettings:
        """The settings of the engine of a generator or validator."""
        is_validator = seat.role == "validator"
        return (self.config.for_validator() if is_validator else self.config).generator

    def overrides(self, seat: Seat) -> Mapping[str, str]:
        """The setting for the fraction of a GPU that a seat's engine takes, if it shares one and no
        person has set it."""
        name, given = self._fraction(seat)
        if not name or given is not None or not seat.host.is_counted:
            return {}
        used = [self._gpus[seat.host.name, position] for position in seat.devices]
        shared = [gpu.open_fraction for gpu in used if len(gpu.uses) > 1]
        if not shared:
            return {}
        part = min(shared) * (_STATIC if self.generator(seat).engine == "sglang" else 1.0)
        return {name: f"{max(0.01, math.floor(100 * part) / 100):.2f}"}

    def require(self) -> None:
        """Raise DoesNotFitError if the certain needs on a GPU exceed its memory."""
        for gpu in self._gpus.values():
            memory_bytes = gpu.device.memory_bytes
            if not memory_bytes or sum(use.least for use in gpu.uses) <= memory_bytes:
                continue
            who = "; ".join(use.described("at least", use.least) for use in gpu.uses)
            has_validator = any(use.seat.role == "validator" for use in gpu.uses)
            names = ["validation.every 0"] if has_validator else []
            names += [name for use in gpu.uses if use.need for name in use.need.remedies]
            raise DoesNotFitError(
                f"{gpu.setting}: {gpu} has {gib(memory_bytes)}, which is too little: {who}; what "
                f"would help: {', '.join(dict.fromkeys(names))}"
            )

    def warnings(self) -> Iterator[Finding]:
        """Warn of GPUs whose memory may not suffice, by the estimate."""
        for gpu in self._gpus.values():
            memory_bytes, total = gpu.device.memory_bytes, sum(use.likely for use in gpu.uses)
            if total > memory_bytes > 0:
                needs = [(use, use.need.num_bytes if use.need else 0) for use in gpu.uses]
                who = "; ".join(use.described("about", num_bytes) for use, num_bytes in needs)
                yield MEMORY.warning(
                    f"{gpu.setting}: {gpu} may have too little memory, {gib(memory_bytes)} for "
                    f"about {gib(total)}: {who}"
                )

    @cached_property
    def _learners(self) -> tuple[Seat, ...]:
        return tuple(seat for seat in self.seats if seat.role == "learner")

    @cached_property
    def _gpus(self) -> Mapping[tuple[str, int], _Gpu]:
        """The used GPUs, by host name and position on the host."""
        found: dict[tuple[str, int], _Gpu] = {}
        for seat in self.seats:
            host = seat.host
            for index, position in enumerate(seat.devices if host.is_counted else ()):
                empty = _Gpu(host, host.devices[position], [])
                gpu = found.setdefault((host.name, position), empty)
                gpu.uses.append(self._use(seat, self.need(seat, index), gpu.device))
        return found

    def _use(self, seat: Seat, need: Need | None, device: Device) -> _Use:
        name, given = self._fraction(seat)
        least = max(need.certain_bytes if need else 0, (given or 0.0) * device.memory_bytes)
        likely = least if name or need is None else need.num_bytes
        return _Use(seat, need, least, likely, is_open=bool(name) and given is None)

    def _fraction(self, seat: Seat) -> tuple[str, float | None]:
        """Like `fraction_of`, for the engine of a seat."""
        return ("", None) if seat.role == "learner" else fraction_of(self.generator(seat))
