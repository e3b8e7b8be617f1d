"""`generator`: what one generator samples, with which engine, and how much of it at a time."""

from typing import Annotated, Any

from pydantic import Field, model_validator

from streamrl.config.engines.hf import HfSettings
from streamrl.config.engines.sglang import SglangSettings
from streamrl.config.engines.vllm import VllmSettings
from streamrl.config.generator.agent import AgentSettings
from streamrl.config.generator.episode import EpisodeSettings
from streamrl.config.generator.oversample import OversampleSettings
from streamrl.config.generator.tools import McpServerSettings, ToolSettings
from streamrl.config.numbers import Device, Dtype, NotNegative, Positive, Seconds
from streamrl.config.section import Section


class GeneratorSettings(Section):
    """What one generator samples, and the engine that samples it."""

    count: Positive = 1
    """Generators that `streamrl launch` starts; more may join at any time."""
    engine: str = "hf"
    """Inference library: hf, sglang or vllm; vllm.url or sglang.url names a server elsewhere."""
    environment: str = "single_turn"
    """What answers the policy, turn by turn: single_turn, tools (see `tools`), frozen_lake,
    sokoban, calculator, file_search, gymnasium:ID, textarena:ID, or PATH.py:CLASS; or what calls
    the policy: agent (see `agent`). Several environments stand in `environments`."""
    environment_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the environment."""
    agent: AgentSettings = AgentSettings()
    """Agents of environment agent."""
    tools: tuple[ToolSettings, ...] = ()
    """What the policy may call in the environment `tools`."""
    mcp_servers: tuple[McpServerSettings, ...] = ()
    """MCP servers whose tools it may call as well."""
    group_size: Positive = 8
    """Trajectories per prompt."""
    oversample: OversampleSettings = OversampleSettings()
    """Siblings that are sampled beyond these."""
    max_new_tokens: Positive = 256
    """Longest completion, in tokens."""
    min_new_tokens: NotNegative = 0
    """Tokens before an end-of-sequence token may be sampled."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Sampling temperature; 0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus mass; 1 is unrestricted."""
    top_k: NotNegative = 0
    """Sample among the k likeliest tokens; 0 is unrestricted."""
    keep_sampling_mask: bool = False
    """Record which tokens top_k, top_p and min_new_tokens left to sample from, and compute the
    learner's log-probabilities over the same ones. Needs top_k, which bounds the record."""
    stop_token_ids: tuple[NotNegative, ...] = ()
    """Ids of tokens that end a completion, in addition to the model's own."""
    ignore_eos: bool = False
    """Go on past the end-of-sequence token."""
    max_num_seqs: Positive = 64
    """Sequences one engine decodes at a time."""
    max_model_len: Positive | None = None
    """Longest prompt plus completion, in tokens; unset: max_prompt_length + max_new_tokens."""
    dtype: Dtype = "float32"
    """Precision of the engine's weights."""
    device: Device = "auto"
    """cpu, cuda, cuda:0, ...; auto takes a GPU if there is one."""
    num_threads: NotNegative = 0
    """CPU threads of one generator; 0 leaves torch's choice."""
    group_deadline_s: Seconds = 3600.0
    """An episode that takes longer ends as truncated, with the tokens that it has; the reward of
    a group has the same time again. The default is 32,768 tokens at 9 tokens/s."""
    episode: EpisodeSettings = EpisodeSettings()
    """Limits of an episode of several turns."""
    drain_s: Seconds = 5.0
    """After SIGTERM, time given to unfinished groups before their leases are released."""
    engine_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the engine, as its own documentation names them."""
    hf: HfSettings = HfSettings()
    """Settings of engine hf."""
    vllm: VllmSettings = VllmSettings()
    """Settings of engine vllm."""
    sglang: SglangSettings = SglangSettings()
    """Settings of engine sglang."""

    @model_validator(mode="after")
    def _has_no_arguments_for_a_server_elsewhere(self) -> "GeneratorSettings":
        if self.engine_kwargs and self.url:
            raise ValueError(
                f"engine_kwargs: was {self.engine_kwargs!r}, which the server of {self.engine}.url "
                "does not get to see; give it to that server's command line"
            )
        return self

    @property
    def num_siblings(self) -> int:
        """Trajectories that are sampled per prompt."""
        return self.group_size + self.oversample.num_siblings

    @model_validator(mode="after")
    def _has_each_tool_once(self) -> "GeneratorSettings":
        names = [tool.tool for tool in self.tools]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"tools: {twice[0]} stands there twice")
        return self

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
        section: VllmSettings | SglangSettings = getattr(self, self.engine)
        read = section.model_copy(update={"load_format": "auto"})
        return self.model_copy(update={self.engine: read})

    @property
    def num_ranks(self) -> int:
        """Processes of one generator that receive weights."""
        return self.vllm.tensor_parallel_size if self.engine == "vllm" else 1
