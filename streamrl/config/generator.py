"""`generator`: what one generator samples, with which engine, and how much of it at a time.

`generator.hf`, `.vllm` and `.sglang` are the settings of one inference engine each.
"""

import ipaddress
import math
import shlex
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator

from streamrl.config.addresses import LARGEST_PORT
from streamrl.config.secrets import key_of
from streamrl.config.section import (
    Device,
    Dtype,
    NotNegative,
    NotNegativeNumber,
    Positive,
    Seconds,
    Section,
    Share,
    refuse_unless,
    twice,
)
from streamrl.user_code import check_user_code


class ServerSettings(Section):
    section: ClassVar[str]
    ours: ClassVar[frozenset[str]]
    """Fields that are not arguments of the engine."""
    told: ClassVar[frozenset[str]]
    """Arguments that also describe a server elsewhere."""

    url: str | tuple[str, ...] | None = None
    """http://host:port of a running server, or several; null: the generator starts its own."""
    api_key_env: str | None = None
    """Environment variable that holds the API key of `url`."""
    start_timeout_s: Seconds = 600.0
    """Longest time that a server may take to start, in seconds."""
    retry_timeout_s: Seconds = 30.0
    """Seconds without a connection after which the generator ends."""

    @field_validator("url")
    @classmethod
    def _is_http(cls, url: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        for one in _urls(url):
            if not one.startswith(("http://", "https://")) or "," in one:
                raise ValueError(f"was {one!r}; it must be http://host:port, or a list of such")
            if "@" in one.partition("//")[2].partition("/")[0]:
                raise ValueError("holds a password; the server's key belongs into api_key_env")
        if url == ():
            raise ValueError("was an empty list; name a server, or leave it out")
        if place := twice(one.rstrip("/") for one in _urls(url)):
            raise ValueError(f"{place} stands there twice")
        return url

    @property
    def urls(self) -> tuple[str, ...]:
        """Of the servers elsewhere."""
        return _urls(self.url)

    def contradictions(self) -> Iterator[str]:
        if self.api_key_env is not None and self.url is None:
            yield "api_key_env: is of a server elsewhere; set url, or leave it out"
        # A server elsewhere does not get to see what is set here.
        arguments = sorted(type(self).model_fields.keys() - self.ours - self.told)
        if self.url and (changed := self.not_default(arguments)):
            engine = self.section.removeprefix("generator.")
            yield f"""{changed[0]}: is chosen where the server of {engine}.url is started; leave it
                out here"""

    @property
    def api_key(self) -> str | None:
        """
        Raises:
            ConfigError: there is none in the environment.
        """
        return key_of(f"{self.section}.api_key_env", self.api_key_env)


def _urls(url: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (url,) if isinstance(url, str) else url or ()


class HfSettings(Section):
    """Engine hf; `engine_kwargs` are passed to `from_pretrained`."""

    recompute_kv: bool = False
    """Recompute the KV cache of running requests after a weight update."""


class SglangSettings(ServerSettings):
    """Engine sglang: most names are SGLang's own, and null is its default."""

    section: ClassVar[str] = "generator.sglang"
    ours: ClassVar[frozenset[str]] = frozenset(
        {*ServerSettings.model_fields, "pause_mode", "recompute_kv", "reach_host"}
    )
    told: ClassVar[frozenset[str]] = frozenset({"tp_size", "enable_deterministic_inference"})

    mem_fraction_static: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Fraction of GPU memory for weights and KV cache; null: as planned on a shared GPU."""
    tp_size: Positive = 1
    """GPUs per server."""
    attention_backend: str | None = None
    """Attention backend."""
    chunked_prefill_size: Annotated[int, Field(ge=-1)] | None = None
    """Tokens per chunk of a long prompt; -1: no chunks."""
    load_format: str | None = None
    """How weights are loaded at start; dummy: random weights."""
    disable_cuda_graph: bool = False
    """No CUDA graphs: slower, less memory."""
    disable_radix_cache: bool = False
    """Do not share prefixes between requests."""
    enable_deterministic_inference: bool = False
    """Batch-invariant kernels; without them SGLang ignores seeds."""
    pause_mode: Literal["keep", "abort"] = "keep"
    """At a weight update, running requests continue (keep) or start again."""
    recompute_kv: bool = True
    """With keep: recompute their KV cache; without it a server elsewhere needs
    --disable-overlap-schedule."""
    reach_host: str | None = None
    """Address at which SGLang reaches this machine; null: found from the route."""

    @property
    def keeps_old_kv(self) -> bool:
        """Whether what old weights have computed is there after an update."""
        return self.pause_mode == "keep" and not self.recompute_kv


class VllmSettings(ServerSettings):
    """Engine vllm: most names are vLLM's own, and null is its default."""

    section: ClassVar[str] = "generator.vllm"
    ours: ClassVar[frozenset[str]] = frozenset(
        {*ServerSettings.model_fields, "pause_mode", "recompute_kv"}
    )
    told: ClassVar[frozenset[str]] = frozenset({"tensor_parallel_size"})

    gpu_memory_utilization: Share | None = None
    """Fraction of GPU memory for weights and KV cache; null: as planned on a shared GPU."""
    tensor_parallel_size: Positive = 1
    """GPUs per engine."""
    max_num_batched_tokens: Positive | None = None
    """Most tokens per engine step, prefill and decode together."""
    enable_chunked_prefill: bool | None = None
    """Split long prompts into chunks so that decoding continues."""
    enable_prefix_caching: bool = True
    """Compute shared prefixes of prompts once per weight version."""
    enforce_eager: bool | None = None
    """No CUDA graphs and no compilation; null: only on CPUs."""
    load_format: str = "auto"
    """How weights are loaded at start; dummy: random weights."""
    kv_cache_memory_bytes: Positive | None = None
    """Size of the KV cache; null: by gpu_memory_utilization, or 512 MiB on CPUs."""
    pause_mode: Literal["keep", "wait", "abort"] = "keep"
    """At a weight update, running requests continue (keep), finish first, or start again."""
    recompute_kv: bool = False
    """With keep: recompute their KV cache."""

    @property
    def keeps_old_kv(self) -> bool:
        """Whether what old weights have computed is there after an update."""
        return self.pause_mode == "keep" and not self.recompute_kv


def _split(command: Any) -> Any:
    return shlex.split(command) if isinstance(command, str) else command


def _names_an_address(host: str) -> bool:
    with suppress(ValueError):
        return host == "localhost" or bool(ipaddress.ip_address(host))
    return False


_is_address = refuse_unless(_names_an_address, "it must be an IP address or localhost")


class AgentSettings(Section):
    """Agents of environment `agent`, which call the policy through an HTTP API."""

    function: Annotated[str, AfterValidator(check_user_code)] | None = None
    """PATH.py:FUNCTION(task, base_url, api_key), called once per episode; returns the reward or
    None."""
    command: Annotated[tuple[str, ...] | None, BeforeValidator(_split)] = None
    """Command line started once per episode, with columns of the row in braces. Without it and
    `function`, agents request tasks."""
    max_agents: Positive = 64
    """Functions or commands that run at a time."""
    host: Annotated[str, _is_address] = "127.0.0.1"
    """Address the API listens on; other than loopback, it needs a token."""
    port: Annotated[int, Field(ge=0, le=LARGEST_PORT)] = 0
    """Port of the first generator of a machine; others take the following ones. 0: free ports."""
    token_env: str | None = None
    """Environment variable that holds the token of the agents."""
    silence_s: Seconds = 600.0
    """Seconds without a request after which an agent fails its group."""
    request_sampling: Literal["override", "refuse"] = "override"
    """For requests with another temperature, top_p or top_k: sample with the run's values, or
    refuse."""
    max_request_bytes: Positive = 16 * 2**20
    """Largest request body, in bytes."""

    def contradictions(self) -> Iterator[str]:
        if self.function is not None and self.command is not None:
            yield "function: is an agent, and command another; leave one of them out"
        if self.command is not None and not self.command:
            yield "command: is empty; it must name a program"
        is_local = self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        if not is_local and self.token_env is None:
            yield f"""host: was {self.host!r}, which other machines can reach; that needs a token:
                put one into an environment variable and name it in token_env"""

    @property
    def token(self) -> str | None:
        """
        Raises:
            ConfigError: there is none in the environment.
        """
        return key_of("generator.agent.token_env", self.token_env)


class EpisodeSettings(Section):
    """Limits of an episode, in addition to `group_deadline_s`."""

    max_turns: Positive | None = None
    """Most completions; the episode then ends as truncated."""
    turn_deadline_s: Seconds | None = None
    """Longest turn in seconds; the episode then ends as truncated. Null: `group_deadline_s`."""
    truncated: Literal["keep", "drop"] = "keep"
    """Truncated siblings: keep them for `algorithm.reward.truncated`, or leave them out."""
    max_in_flight: Positive | None = None
    """Most episodes of a generator at a time; null: as many as fill the engine."""


class OversampleSettings(Section):
    """Extra siblings beyond `group_size`, and which of them all are kept."""

    num_siblings: NotNegative = 0
    """Number of extra siblings."""
    keep: Literal["each_reward", "first_finished"] = "each_reward"
    """each_reward waits for all and keeps as many different rewards as possible; first_finished
    cancels the late ones."""


class CallLimits(Section):
    """Limits on the calls of a tool, or of all tools of a server."""

    time_limit_s: Seconds = 30.0
    """Longest call in seconds; the policy then gets an error as the result."""
    max_concurrent: Positive = 8
    """Most calls of one generator at a time."""
    max_result_length: Positive = 4096
    """Longest result in characters; the rest is cut."""


class ToolSettings(CallLimits):
    """A tool; a plain string sets `tool`."""

    short_for = "tool"

    tool: str
    """calculator, python (runs code in a sandbox), or a function or class PATH.py:NAME."""
    function_schema: dict[str, Any] | Path | None = None
    """OpenAI schema, or a file that holds one; null: derived from signature and docstring."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the class; for python its limits and isolation."""


class McpServerSettings(CallLimits):
    """An MCP server: a command that uses stdio, or a URL."""

    command: tuple[str, ...] = ()
    """Program and arguments; each generator starts its own."""
    url: str | None = None
    """URL of a server with streamable HTTP."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the command, in addition to PATH and HOME."""
    headers: dict[str, str] = Field(default_factory=dict)
    """HTTP headers of every request to the URL."""
    tools: tuple[str, ...] = ()
    """Names of the tools that the policy may call; empty: all."""
    session: Literal["generator", "episode"] = "generator"
    """One session for all episodes, or one per episode."""

    def contradictions(self) -> Iterator[str]:
        if bool(self.command) == bool(self.url):
            yield "command, url: an MCP server has one of the two"


_HEAD_FLAGS = {
    "vllm": """--hf-overrides '{"head_dtype": "float32"}'""",
    "sglang": "--enable-fp32-lm-head",
}


class GeneratorSettings(Section):
    """What a generator samples, and with which engine."""

    count: int | str = 1
    """Number of generators that a launch starts; for Ray also a range from the fewest to the most,
    such as 2..8."""
    engine: str = "hf"
    """Inference engine: hf, sglang or vllm."""
    environment: str = "single_turn"
    """What the policy interacts with: single_turn, tools, frozen_lake, gymnasium:ID, textarena:ID,
    PATH.py:CLASS; or agent, which calls the policy."""
    environment_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the environment."""
    agent: AgentSettings = AgentSettings()
    tools: tuple[ToolSettings, ...] = ()
    """Tools that the policy may call in environment `tools`."""
    mcp_servers: tuple[McpServerSettings, ...] = ()
    """MCP servers whose tools the policy may also call."""
    group_size: Positive = 8
    """Trajectories per prompt."""
    oversample: OversampleSettings = OversampleSettings()
    max_new_tokens: Positive = 256
    """Longest completion, in tokens."""
    min_new_tokens: NotNegative = 0
    """Fewest tokens of a completion."""
    temperature: NotNegativeNumber = 1.0
    """Sampling temperature; 0 is greedy, which training refuses."""
    top_p: Share = 1.0
    """Nucleus sampling mass; 1: unrestricted."""
    top_k: NotNegative = 0
    """Number of likeliest tokens to sample from; 0: unrestricted."""
    keep_sampling_mask: bool = False
    """Record for the learner which tokens top_k (required), top_p and min_new_tokens left."""
    stop_token_ids: tuple[NotNegative, ...] = ()
    """Further tokens that end a completion."""
    ignore_eos: bool = False
    """Continue past the end-of-sequence token."""
    max_num_seqs: Positive = 64
    """Most sequences that one engine decodes at a time."""
    max_model_len: Positive | None = None
    """Longest prompt plus completion, in tokens; null: max_prompt_length + max_new_tokens."""
    dtype: Dtype = "float32"
    """Dtype of the engine's weights."""
    lm_head_dtype: Literal["float32"] | None = None
    """float32: compute logits in float32 although `dtype` is narrower; null: the engine's
    default."""
    device: Device = "auto"
    """cpu, cuda, cuda:0, ...; auto: a GPU if there is one."""
    num_threads: NotNegative = 0
    """CPU threads; 0 is torch's choice."""
    group_deadline_s: Seconds = 3600.0
    """Longest episode in seconds, then truncated; the reward of a group has the same time again."""
    episode: EpisodeSettings = EpisodeSettings()
    drain_s: Seconds = 5.0
    """Seconds for unfinished groups after SIGTERM."""
    engine_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the engine, by its own names."""
    hf: HfSettings = HfSettings()
    vllm: VllmSettings = VllmSettings()
    sglang: SglangSettings = SglangSettings()

    def contradictions(self) -> Iterator[str]:
        unseen = f"which the server of {self.engine}.url does not get to see"
        if self.lm_head_dtype is not None and self.url:
            flag = _HEAD_FLAGS[self.engine]
            yield f"""lm_head_dtype: was {self.lm_head_dtype!r}, {unseen}; give that server's
                command line {flag}"""
        if self.dtype == self.lm_head_dtype:
            yield f"""lm_head_dtype: was {self.lm_head_dtype!r}, which dtype is for all layers, so
                it cannot act; set dtype to bfloat16, or leave it out"""
        if self.engine_kwargs and self.url:
            yield f"""engine_kwargs: was {self.engine_kwargs!r}, {unseen}; give it to that server's
                command line"""
        if name := twice(tool.tool for tool in self.tools):
            yield f"tools: {name} stands there twice"

    @property
    def num_siblings(self) -> int:
        """Trajectories that are sampled per prompt."""
        return self.group_size + self.oversample.num_siblings

    @field_validator("count")
    @classmethod
    def _is_count_or_range(cls, count: int | str) -> int | str:
        numbers = str(count).split("..")
        if not all(n.isascii() and n.isdigit() and int(n) > 0 for n in numbers) or len(numbers) > 2:
            raise ValueError(f"was {count!r}; it must be 1 or more, or a range such as 2..8")
        if int(numbers[0]) > int(numbers[-1]):
            raise ValueError(f"was {count!r}; the first number of a range is the smaller one")
        return int(count) if len(numbers) == 1 else count

    @property
    def min_count(self) -> int:
        """Of a range the first number; of a number that of a run that can begin, 1."""
        return int(self.count.split("..")[0]) if isinstance(self.count, str) else 1

    @property
    def max_count(self) -> int:
        return int(str(self.count).split("..")[-1])

    @property
    def truncations(self) -> tuple[str, ...]:
        """The settings that cut off the distribution that is sampled from, with their values;
        none where the learner takes its log-probabilities over what they left."""
        if self.keep_sampling_mask:
            return ()
        cuts = {"top_p": self.top_p < 1, "top_k": self.top_k > 0}
        cuts |= {"min_new_tokens": self.min_new_tokens > 0}
        return tuple(f"generator.{n} {getattr(self, n):g}" for n, is_cut in cuts.items() if is_cut)

    @property
    def url(self) -> str | None:
        """Of the engine's server, if it runs elsewhere; the first of several."""
        return next(iter(self.urls), None)

    @property
    def urls(self) -> tuple[str, ...]:
        """Of the engine's servers, if they run elsewhere."""
        served = {"vllm": self.vllm, "sglang": self.sglang}.get(self.engine)
        return served.urls if served else ()

    @property
    def served(self) -> VllmSettings | SglangSettings:
        """Of an engine that servers may run."""
        return self.vllm if self.engine == "vllm" else self.sglang

    @property
    def starts_server(self) -> bool:
        """Whether the generator starts one of its own."""
        return self.engine in ("vllm", "sglang") and self.url is None

    @property
    def lacks_weights(self) -> bool:
        """Whether the engine may start with other weights than those of `model.path`: random ones,
        or what a server elsewhere has."""
        formats = {"vllm": self.vllm.load_format, "sglang": self.sglang.load_format}
        return self.url is not None or formats.get(self.engine) == "dummy"

    def reading_weights(self) -> "GeneratorSettings":
        """These settings for an engine that starts with the weights of `model.path`, unless it runs
        elsewhere."""
        if self.url is not None or not self.lacks_weights:
            return self
        return self.with_values(**{self.engine: {"load_format": "auto"}})

    @property
    def num_ranks(self) -> int:
        """Processes of one generator that receive weights."""
        if self.engine != "vllm":
            return 1
        names = ("pipeline_parallel_size", "data_parallel_size", "prefill_context_parallel_size")
        return self.vllm.tensor_parallel_size * self.product_of(names)

    def product_of(self, names: Iterable[str]) -> int:
        """Of these keywords of the engine, where they are set."""
        sizes = (self.engine_kwargs.get(name) for name in names)
        return math.prod(size for size in sizes if isinstance(size, int) and size > 0)
