"""`generator.sglang`: the SGLang engine."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from streamrl.config.engines.server import ServerSettings
from streamrl.config.section import Positive


class SglangSettings(ServerSettings):
    """Server arguments under SGLang's own names, where null leaves its default; the last three and
    those of the connection are ours. With `url`, the server runs elsewhere."""

    section: ClassVar[str] = "generator.sglang"

    mem_fraction_static: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Fraction of a GPU's memory for weights and KV cache; null: as the plan of `streamrl launch`
    divides a shared GPU, else the default of SGLang."""
    tp_size: Positive = 1
    """GPUs that share one server."""
    attention_backend: str | None = None
    """Attention kernels."""
    chunked_prefill_size: Annotated[int, Field(ge=-1)] | None = None
    """Tokens of one chunk of a long prompt; -1 never cuts prompts."""
    load_format: str | None = None
    """How the model folder is read; dummy starts from random weights."""
    disable_cuda_graph: bool = False
    """Decode without CUDA graphs: slower, less memory."""
    disable_radix_cache: bool = False
    """Compute prompts anew instead of sharing prefixes."""
    enable_deterministic_inference: bool = False
    """Batch-invariant kernels; only with them does SGLang apply the seed of a request."""
    pause_mode: Literal["keep", "abort"] = "keep"
    """Requests in flight at an update: go on with the new weights, or begin anew."""
    recompute_kv: bool = True
    """With keep: compute the KV cache of requests in flight again with the new weights. Without,
    the pause is shorter, their later tokens are sampled from a mixture of versions, and a server
    elsewhere has to be started with --disable-overlap-schedule."""
    reach_host: str | None = None
    """This machine's address as SGLang's processes reach it for weights; null: the one on the route
    to the server."""

    @property
    def keeps_old_kv(self) -> bool:
        """Whether what old weights have computed is there after an update."""
        return self.pause_mode == "keep" and not self.recompute_kv

    @model_validator(mode="after")
    def _leaves_the_server_alone(self) -> "SglangSettings":
        ours = (*OURS, "tp_size", "enable_deterministic_inference")
        return self.leaving_server_alone("sglang", *ours)


OURS = frozenset({*ServerSettings.model_fields, "pause_mode", "recompute_kv", "reach_host"})
"""Fields that are no arguments of SGLang's server."""
