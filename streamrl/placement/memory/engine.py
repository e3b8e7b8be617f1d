"""What an engine needs on each of its GPUs.

    weights      in `generator.dtype`, divided by the GPUs that share each matrix, or the layers
    KV cache     2 x layers x heads x width x bytes a token (PagedAttention, arXiv 2309.06180),
                 divided alike: one sequence of `generator.max_model_len` in any case,
                 `max_num_seqs` of them at most

vLLM and SGLang take a fraction of the GPU, whatever they need of it; the HF engine takes what it
needs, and a second copy of the weights for updates. Invariant: pure. Called by fit.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from streamrl.config import RunConfig
from streamrl.config.generator import GeneratorSettings
from streamrl.placement.memory.learner import DRIVER_BYTES
from streamrl.placement.memory.need import Need, Part
from streamrl.placement.memory.shape import ModelShape
from streamrl.placement.seats.engines import pipeline_parallel_size, tensor_parallel_size

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class EngineMemory:
    """Of the engine of a generator, or of the validator with its own settings."""

    config: RunConfig
    generator: GeneratorSettings
    shape: ModelShape

    def need(self) -> Need:
        return Need.of(self._parts(), self._remedies())

    def _parts(self) -> Iterator[Part]:
        weights = self.shape.num_parameters * self._bytes // (self._tensor * self._pipeline)
        if self.generator.engine == "hf":
            yield Part("weights, twice", 2 * weights)
        else:
            yield Part("weights", weights)
        one = self._sequence_bytes
        given = self.generator.vllm.kv_cache_memory_bytes
        if self.generator.engine == "vllm" and given is not None:
            yield Part("KV cache", given)
        else:
            yield Part("KV cache of one sequence", one)
            more = self.generator.max_num_seqs - 1
            yield Part(f"KV cache of {more} more", more * one, is_certain=False)
        yield Part("CUDA and libraries", DRIVER_BYTES, is_certain=False)

    @property
    def _tensor(self) -> int:
        return tensor_parallel_size(self.generator)

    @property
    def _pipeline(self) -> int:
        return pipeline_parallel_size(self.generator)

    @property
    def _bytes(self) -> int:
        return _DTYPE_BYTES[self.generator.dtype]

    @property
    def _sequence_bytes(self) -> int:
        per_token = self.shape.kv_bytes_per_token(self._bytes, self._tensor) // self._pipeline
        return per_token * (self.generator.max_model_len or self.config.max_model_len)

    def _remedies(self) -> Iterator[str]:
        if self._bytes == 4:
            yield "generator.dtype bfloat16"
        if self.generator.engine == "vllm":
            yield "more generator.vllm.tensor_parallel_size"
        if self.generator.engine == "sglang":
            yield "more generator.sglang.tp_size"
        yield "a smaller generator.max_model_len"


def fraction_setting(generator: GeneratorSettings) -> str:
    """The setting that says how much of a GPU an engine takes; "" for one that has none."""
    match generator.engine:
        case "vllm":
            return "generator.vllm.gpu_memory_utilization"
        case "sglang":
            return "generator.sglang.mem_fraction_static"
        case _:
            return ""


def given_fraction(generator: GeneratorSettings) -> float | None:
    """What a person has set it to."""
    if name := fraction_setting(generator).rpartition(".")[2]:
        kwargs = generator.engine_kwargs
        chosen: float | None = kwargs.get(name, getattr(getattr(generator, generator.engine), name))
        return chosen
    return None
