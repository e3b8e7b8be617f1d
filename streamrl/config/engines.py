"""`generator.hf`, `.vllm` and `.sglang`: the settings of one inference engine each."""

import os
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from streamrl.config.section import Positive, Seconds, Section
from streamrl.errors import ConfigError


class ServerSettings(Section):
    section: ClassVar[str]

    url: str | tuple[str, ...] | None = None
    """http://host:port of a server that is up already, or a list of servers of one model that share
    the generator's requests; null: this generator starts its own. Generators of one run may name
    the same server, by the same address."""
    api_key_variable: str | None = None
    """Environment variable that holds the key which the server at `url` asks for; keys don't belong
    into files."""
    start_timeout_s: Seconds = 600.0
    """How long a server may take to come up."""
    retry_timeout_s: Seconds = 30.0
    """A server that makes no connection is tried again for so long, then the generator ends; one
    that is busy for so long fails the request."""

    @field_validator("url")
    @classmethod
    def _is_http(cls, url: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        for one in _urls(url):
            if not one.startswith(("http://", "https://")):
                raise ValueError(f"was {one!r}; it must be http://host:port")
            if "@" in one.partition("//")[2].partition("/")[0]:
                raise ValueError("holds a password; the server's key belongs into api_key_variable")
        if url == ():
            raise ValueError("was an empty list; name a server, or leave it out")
        places = [one.rstrip("/") for one in _urls(url)]
        if twice := [place for place in places if places.count(place) > 1]:
            raise ValueError(f"{twice[0]} stands there twice")
        return url

    @property
    def urls(self) -> tuple[str, ...]:
        """Of the servers elsewhere."""
        return _urls(self.url)

    @model_validator(mode="after")
    def _has_a_server_for_its_key(self) -> Self:
        if self.api_key_variable is not None and self.url is None:
            raise ValueError("api_key_variable is for a server elsewhere; set url, or leave it out")
        return self

    @property
    def api_key(self) -> str | None:
        """
        Raises:
            ConfigError: the variable is not set.
        """
        if self.api_key_variable is None:
            return None
        if self.api_key_variable not in os.environ:
            raise ConfigError(
                f"{self.section}.api_key_variable: there is no {self.api_key_variable} in the "
                f"environment, and {self.urls[0]} asks for a key"
            )
        return os.environ[self.api_key_variable]

    def leaving_server_alone(self, engine: str, *apart_from: str) -> Self:
        """These settings; with `url`, all but the fields named must be as they are by default.

        Raises:
            ValueError: one of the others is set here, where the server does not get to see it.
        """
        fields = type(self).model_fields
        defaults: dict[str, Any] = {n: f.default for n, f in fields.items() if n not in apart_from}
        changed = sorted(name for name in defaults if getattr(self, name) != defaults[name])
        if self.url and changed:
            raise ValueError(
                f"{changed[0]} is chosen where the server of {engine}.url is started; leave it out "
                "here"
            )
        return self


def _urls(url: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (url,) if isinstance(url, str) else url or ()


class HfSettings(Section):
    """All else is `engine_kwargs`, the arguments of `from_pretrained`."""

    recompute_kv: bool = False
    """At an update, compute what requests in flight have cached again with the new weights. The
    pause is then as long as their prefill."""


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
        ours = (*SGLANG_OURS, "tp_size", "enable_deterministic_inference")
        return self.leaving_server_alone("sglang", *ours)


SGLANG_OURS = frozenset({*ServerSettings.model_fields, "pause_mode", "recompute_kv", "reach_host"})
"""Fields that are no arguments of SGLang's server."""


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
        return self.leaving_server_alone("vllm", *VLLM_OURS, "tensor_parallel_size")


VLLM_OURS = frozenset({*ServerSettings.model_fields, "pause_mode", "recompute_kv"})
"""Fields that are no arguments of vLLM's engine."""
