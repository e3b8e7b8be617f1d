"""`generator.vllm`: the vLLM engine."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from streamrl.config.engines.server import ServerSettings
from streamrl.config.section import Positive


class VllmSettings(ServerSettings):
    """Engine arguments under vLLM's own names, where null leaves its default; the last two and
    those of the connection are ours. With `url`, vLLM runs elsewhere (`vllm serve`)."""

    section: ClassVar[str] = "generator.vllm"

    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    """Fraction of a GPU's memory for weights and KV cache; null: as the plan of `streamrl launch`
    divides a shared GPU, else the default of vLLM."""
    tensor_parallel_size: Positive = 1
    """GPUs that share one engine."""
    max_num_batched_tokens: Positive | None = None
    """Tokens of one step, prefill and decode together."""
    enable_chunked_prefill: bool | None = None
    """Cut long prompts so that decoding goes on beside them."""
    enable_prefix_caching: bool = True
    """Compute what prompts share once per version."""
    enforce_eager: bool | None = None
    """Neither CUDA graphs nor compilation; null: true on CPUs, false on GPUs."""
    load_format: str = "auto"
    """How the model folder is read; dummy starts from random weights."""
    kv_cache_memory_bytes: Positive | None = None
    """KV cache; null: from gpu_memory_utilization on GPUs, 512 MiB on CPUs."""
    pause_mode: Literal["keep", "wait", "abort"] = "keep"
    """Requests in flight at an update: go on with the new weights, end first, or begin anew."""
    recompute_kv: bool = False
    """With keep: compute the KV cache of requests in flight again with the new weights."""

    @property
    def keeps_old_kv(self) -> bool:
        """Whether what old weights have computed is there after an update."""
        return self.pause_mode == "keep" and not self.recompute_kv

    @model_validator(mode="after")
    def _leaves_the_server_alone(self) -> "VllmSettings":
        return self.leaving_server_alone("vllm", *OURS, "tensor_parallel_size")


OURS = frozenset({*ServerSettings.model_fields, "pause_mode", "recompute_kv"})
"""Fields that are no arguments of vLLM's engine."""
