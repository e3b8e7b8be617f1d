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
    """Fields that are no arguments of the engine."""
    told: ClassVar[frozenset[str]]
    """Arguments that are told here of a server elsewhere, too."""

    url: str | tuple[str, ...] | None = None
    """http://host:port of a server that is up, or a list of several; null: this generator starts
    its own."""
    api_key_env: str | None = None
    """Environment variable with the key of `url`."""
    start_timeout_s: Seconds = 600.0
    """Longest start of a server."""
    retry_timeout_s: Seconds = 30.0
    """Without a connection for so long the generator ends; a busy server fails the request."""

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
    """Engine hf; `engine_kwargs` are the arguments of `from_pretrained`."""

    recompute_kv: bool = False
    """Compute the cache of requests in flight again at an update."""


class SglangSettings(ServerSettings):
    """Engine sglang: most names are its own, and null is its default."""

    section: ClassVar[str] = "generator.sglang"
    ours: ClassVar[frozenset[str]] = frozenset(
        {*ServerSettings.model_fields, "pause_mode", "recompute_kv", "reach_host"}
    )
    told: ClassVar[frozenset[str]] = frozenset({"tp_size", "enable_deterministic_inference"})

    mem_fraction_static: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Part of a GPU's memory for weights and KV cache; null: as the plan divides a shared GPU."""
    tp_size: Positive = 1
    """GPUs of one server."""
    attention_backend: str | None = None
    """Attention kernels."""
    chunked_prefill_size: Annotated[int, Field(ge=-1)] | None = None
    """Tokens of a chunk of a long prompt; -1 cuts none."""
    load_format: str | None = None
    """dummy starts from random weights."""
    disable_cuda_graph: bool = False
    """Slower, less memory."""
    disable_radix_cache: bool = False
    """Share no prefixes."""
    enable_deterministic_inference: bool = False
    """Batch-invariant kernels; else SGLang ignores seeds."""
    pause_mode: Literal["keep", "abort"] = "keep"
    """Requests in flight at an update go on, or begin anew."""
    recompute_kv: bool = True
    """With keep: compute their KV cache again; else a server elsewhere needs
    --disable-overlap-schedule."""
    reach_host: str | None = None
    """This machine's address as SGLang reaches it; null: found by the route."""

    @property
    def keeps_old_kv(self) -> bool:
        """Whether what old weights have computed is there after an update."""
        return self.pause_mode == "keep" and not self.recompute_kv


class VllmSettings(ServerSettings):
    """Engine vllm: most names are its own, and null is its default."""

    section: ClassVar[str] = "generator.vllm"
    ours: ClassVar[frozenset[str]] = frozenset(
        {*ServerSettings.model_fields, "pause_mode", "recompute_kv"}
    )
    told: ClassVar[frozenset[str]] = frozenset({"tensor_parallel_size"})

    gpu_memory_utilization: Share | None = None
    """Part of a GPU's memory for weights and KV cache; null: as the plan divides a shared GPU."""
    tensor_parallel_size: Positive = 1
    """GPUs of one engine."""
    max_num_batched_tokens: Positive | None = None
    """Tokens of a step, prefill and decode."""
    enable_chunked_prefill: bool | None = None
    """Cut long prompts so that decoding goes on."""
    enable_prefix_caching: bool = True
    """Compute what prompts share once a version."""
    enforce_eager: bool | None = None
    """Neither CUDA graphs nor compilation; null: on CPUs alone."""
    load_format: str = "auto"
    """dummy starts from random weights."""
    kv_cache_memory_bytes: Positive | None = None
    """Null: from gpu_memory_utilization, or 512 MiB on CPUs."""
    pause_mode: Literal["keep", "wait", "abort"] = "keep"
    """Requests in flight at an update go on, end first, or begin anew."""
    recompute_kv: bool = False
    """With keep: compute their KV cache again."""

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
    """Agents of environment agent, which call the policy by API."""

    function: Annotated[str, AfterValidator(check_user_code)] | None = None
    """PATH.py:FUNCTION(task, base_url, api_key), called once an episode in the generator; returns
    the reward, or nothing."""
    command: Annotated[tuple[str, ...] | None, BeforeValidator(_split)] = None
    """Command line, started once an episode, with the row's columns in braces. Without it and
    `function`, agents ask for tasks."""
    max_agents: Positive = 64
    """Functions or commands at a time."""
    host: Annotated[str, _is_address] = "127.0.0.1"
    """Where the API listens; off loopback it needs a token."""
    port: Annotated[int, Field(ge=0, le=LARGEST_PORT)] = 0
    """Of a machine's first generator; others take the next ones. 0: any free one."""
    token_env: str | None = None
    """Environment variable with the token that agents show."""
    silence_s: Seconds = 600.0
    """An agent that asks for nothing for so long fails its group."""
    request_sampling: Literal["override", "refuse"] = "override"
    """A request with another temperature, top_p or top_k is sampled with the run's, or refused."""
    max_request_bytes: Positive = 16 * 2**20
    """Largest body of a request."""

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
    """Limits of an episode, beside `group_deadline_s`."""

    max_turns: Positive | None = None
    """Completions, after which it ends as truncated."""
    turn_deadline_s: Seconds | None = None
    """A longer turn ends it as truncated; null: `group_deadline_s`."""
    truncated: Literal["keep", "drop"] = "keep"
    """Truncated siblings: keep them for `algorithm.reward.truncated`, or leave them out."""
    max_in_flight: Positive | None = None
    """Episodes of a generator at a time; null: as many as fill the engine."""


class OversampleSettings(Section):
    """Siblings beyond `group_size`, and which of all are kept."""

    num_siblings: NotNegative = 0
    """How many."""
    keep: Literal["each_reward", "first_finished"] = "each_reward"
    """`each_reward` waits for all and keeps as many rewards as it can; `first_finished` cancels the
    late ones."""


class CallLimits(Section):
    """Limits of the calls of a tool, or of all tools of a server."""

    time_limit_s: Seconds = 30.0
    """A longer call is answered with an error."""
    max_concurrent: Positive = 8
    """Calls of one generator at a time."""
    max_result_length: Positive = 4096
    """In characters; a longer result is cut."""


class ToolSettings(CallLimits):
    """A tool; a string is its `tool` alone."""

    short_for = "tool"

    tool: str
    """calculator, python (code in a sandbox), or PATH.py:NAME, a function or a class."""
    function_schema: dict[str, Any] | Path | None = None
    """OpenAI schema, or a file with one; null: made of signature and docstring."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the class, or limits and isolation of python."""


class McpServerSettings(CallLimits):
    """An MCP server: a command that speaks over stdio, or a URL."""

    command: tuple[str, ...] = ()
    """Program and arguments; started by each generator."""
    url: str | None = None
    """Of a server with streamable HTTP."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Variables of the command, beside PATH and HOME."""
    headers: dict[str, str] = Field(default_factory=dict)
    """Of every request to the URL."""
    tools: tuple[str, ...] = ()
    """Tools that the policy may call; empty: all."""
    session: Literal["generator", "episode"] = "generator"
    """One session of all episodes, or one each."""

    def contradictions(self) -> Iterator[str]:
        if bool(self.command) == bool(self.url):
            yield "command, url: an MCP server has one of the two"


_HEAD_FLAGS = {
    "vllm": """--hf-overrides '{"head_dtype": "float32"}'""",
    "sglang": "--enable-fp32-lm-head",
}


class GeneratorSettings(Section):
    """What one generator samples, and the engine that samples it."""

    count: int | str = 1
    """Generators of a launch; more may join at any time. A range, such as 2..8, is for Ray: the
    least that the run needs, and the most."""
    engine: str = "hf"
    """hf, sglang or vllm."""
    environment: str = "single_turn"
    """What answers the policy: single_turn, tools, frozen_lake, gymnasium:ID, textarena:ID,
    PATH.py:CLASS; or what calls it: agent."""
    environment_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Its arguments."""
    agent: AgentSettings = AgentSettings()
    tools: tuple[ToolSettings, ...] = ()
    """What the policy may call in environment `tools`."""
    mcp_servers: tuple[McpServerSettings, ...] = ()
    """Servers whose tools it may call as well."""
    group_size: Positive = 8
    """Trajectories per prompt."""
    oversample: OversampleSettings = OversampleSettings()
    max_new_tokens: Positive = 256
    """Longest completion, in tokens."""
    min_new_tokens: NotNegative = 0
    """Tokens before a completion may end."""
    temperature: NotNegativeNumber = 1.0
    """Sampling temperature; 0 is greedy, which training refuses."""
    top_p: Share = 1.0
    """Nucleus mass; 1 is unrestricted."""
    top_k: NotNegative = 0
    """Likeliest tokens to sample among; 0 is unrestricted."""
    keep_sampling_mask: bool = False
    """Record which tokens top_k (needed), top_p and min_new_tokens left, for the learner."""
    stop_token_ids: tuple[NotNegative, ...] = ()
    """Tokens that end a completion, too."""
    ignore_eos: bool = False
    """Go on past the end-of-sequence token."""
    max_num_seqs: Positive = 64
    """Sequences that one engine decodes at a time."""
    max_model_len: Positive | None = None
    """Longest prompt plus completion, in tokens; null: max_prompt_length + max_new_tokens."""
    dtype: Dtype = "float32"
    """Of the engine's weights."""
    lm_head_dtype: Literal["float32"] | None = None
    """float32: compute logits in it beside a narrower `dtype`; null: as the engine does."""
    device: Device = "auto"
    """cpu, cuda, cuda:0, ...; auto: a GPU if there is one."""
    num_threads: NotNegative = 0
    """CPU threads; 0 is torch's choice."""
    group_deadline_s: Seconds = 3600.0
    """A longer episode ends as truncated; a group's reward has the same time again."""
    episode: EpisodeSettings = EpisodeSettings()
    drain_s: Seconds = 5.0
    """After SIGTERM, time for unfinished groups."""
    engine_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the engine, as it names them."""
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
