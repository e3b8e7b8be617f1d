"""A vLLM that runs elsewhere (`generator.vllm.url`): token ids in and out, weights by our plug-in.

Its workers receive from the learner themselves, so StreamRL is installed beside that vLLM: its
entry point brings the weight-transfer backend `streamrl` (`actors.engines.vllm.plugin`). For what a
recorded version means, and for requests in flight at an update, see `actors.engines.vllm.engine`.

Invariant: a server that was not started as `serve_command` says is refused, with that command.

Bodies of vLLM's route for tokens in, tokens out: the fields that we set or read.

Invariant: every class and field has vLLM's own name; `tests/vllm/test_served_messages.py` compares
them with vLLM's classes.
"""

import shlex
from math import prod
from typing import Annotated, Any

from msgspec import Meta, Struct

from actors.engines.model import ModelFacts
from actors.engines.reported import candidates, from_npy, most_asked, num_asked, recorded, sets_of
from actors.engines.served.http import Http, Names, RefusedError, retry_lost
from actors.engines.served.open import host_of, open_urls, request_timeout_s, require_length
from actors.engines.served.process import has_gpu
from actors.engines.served.server import (
    ABORT_S,
    UNLABELED,
    Labeled,
    Labels,
    ServedRequest,
    Server,
    TokenId,
    VersionSpan,
    completion,
    versions_of,
)
from actors.engines.vllm.cpu import require_servable
from actors.engines.vllm.weights import WeightLoader
from streamrl.config import RunConfig
from streamrl.config.addresses import address_towards, is_loopback
from streamrl.errors import ConfigError
from streamrl.interfaces import Engine
from streamrl.types import Completion


class VllmSampling(Struct, frozen=True, kw_only=True):
    """The fields of vLLM's class of this name that we set."""

    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop_token_ids: list[int]
    seed: int | None
    # End-of-sequence tokens are among the stops: without a tokenizer vLLM knows none.
    ignore_eos: bool = True
    logprobs: int = 0
    detokenize: bool = False


class GenerateRequest(Struct, frozen=True, kw_only=True):
    """The fields of vLLM's class of this name that we set."""

    request_id: str
    token_ids: list[int]
    sampling_params: VllmSampling
    cache_salt: str


class GenerateLogProb(Struct, frozen=True):
    token_id: TokenId
    logprob: float


class GenerateLogProbsContent(Struct, frozen=True):
    """Of a sampled token, which is the first of `top_logprobs`."""

    logprob: float
    top_logprobs: list[GenerateLogProb] = []


class GenerateLogProbs(Struct, frozen=True):
    content: list[GenerateLogProbsContent]


class GenerateTokensChoice(Struct, frozen=True):
    token_ids: list[TokenId]
    logprobs: GenerateLogProbs
    finish_reason: str
    weight_versions: list[VersionSpan]
    routed_experts: str | None = None


class GenerateTokensResponse(Struct, frozen=True):
    choices: Annotated[list[GenerateTokensChoice], Meta(min_length=1)]


class WorldSize(Struct, frozen=True):
    """The answer to /get_world_size."""

    world_size: int


def wire_request(request: ServedRequest) -> GenerateRequest:
    sampling = request.sampling
    return GenerateRequest(
        request_id=request.id,
        token_ids=list(request.prompt_token_ids),
        sampling_params=VllmSampling(
            max_tokens=request.max_new_tokens,
            min_tokens=request.min_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            stop_token_ids=sorted(request.stops),
            seed=sampling.seed,
            logprobs=num_asked(sampling),
        ),
        cache_salt=request.cache_salt,
    )


def completion_of(
    choice: GenerateTokensChoice, labels: Labels, request: ServedRequest
) -> Completion:
    sampled, mask, top = choice.logprobs.content, None, None
    if num_asked(request.sampling):
        each = [
            candidates([c.token_id for c in found], [c.logprob for c in found])
            for found in (token.top_logprobs for token in sampled)
        ]
        mask, top = sets_of(each, request.sampling)
    experts = None
    if request.sampling.keep_routed_experts:
        rows = None if choice.routed_experts is None else from_npy(choice.routed_experts)
        experts = recorded(
            rows,
            request.prompt_token_ids,
            choice.token_ids,
            "vLLM",
            is_aborted=choice.finish_reason == "abort",
        )
    return completion(
        choice.token_ids,
        [token.logprob for token in sampled],
        versions_of(choice.weight_versions, len(choice.token_ids), labels),
        choice.finish_reason,
        sampling_mask=mask,
        top_logprobs=top,
        routed_experts=experts,
    )


GENERATE = "/inference/v1/generate"
# Of an answer, beside its tokens, for each of them, and for each of its candidates and its experts
# in a layer; with room to spare.
_ANSWER_BYTES, _TOKEN_BYTES, _CANDIDATE_BYTES, _EXPERT_BYTES = 2**20, 2**10, 2**7, 2**3
_RETRY_S = 5.0
GAUGES: Names = {
    "num_active": ("vllm:num_requests_running", ""),
    "num_waiting": ("vllm:num_requests_waiting", ""),
    "num_tokens": ("vllm:generation_tokens_total", ""),
    "kv_usage": ("vllm:kv_cache_usage_perc", ""),
    "num_preemptions": ("vllm:num_preemptions_total", ""),
}


class VllmServer(Server):
    """By vLLM's routes for tokens in, tokens out."""

    library, label_path, gauges = "vLLM", "/weight_info", GAUGES

    async def sample(self, request: ServedRequest) -> Completion:
        answer = await self._http.post(
            GENERATE,
            wire_request(request),
            GenerateTokensResponse,
            timeout_s=self._request_timeout_s,
            max_bytes=_answer_bytes(request),
        )
        return completion_of(answer.choices[0], self.labels, request)

    async def abort(self, request_id: str) -> None:
        ids = {"request_ids": [f"generate-tokens-{request_id}"]}
        await self._http.send("/inference/v1/abort_requests", ids, timeout_s=ABORT_S)


def _answer_bytes(request: ServedRequest) -> int:
    per_token = _TOKEN_BYTES + _CANDIDATE_BYTES * num_asked(request.sampling)
    num_tokens = len(request.prompt_token_ids) + request.max_new_tokens
    of_experts = _EXPERT_BYTES * prod(request.expert_shape) * num_tokens
    return _ANSWER_BYTES + per_token * request.max_new_tokens + of_experts


class HttpVerbs:
    """Implements `actors.engines.vllm.weights.WeightVerbs` by vLLM's routes for training."""

    def __init__(self, http: Http, request_timeout_s: float) -> None:
        self._http = http
        self._request_timeout_s = request_timeout_s

    async def start(self) -> None:
        """After discarding the update that a generator has left unfinished, if one has."""
        try:
            await self._http.send("/start_weight_update", {})
        except RefusedError:
            # vLLM may close the connection after such an answer.
            await retry_lost(lambda: self.update({"attempt": 0}), _RETRY_S)
            await self.finish(None)
            await self._http.send("/start_weight_update", {})

    async def update(self, info: dict[str, Any]) -> None:
        await self._http.send("/update_weights", {"update_info": info})

    async def finish(self, label: str | None) -> None:
        await self._http.send("/finish_weight_update", {"weight_version": label})

    async def pause(self, mode: str, *, clear_cache: bool) -> None:
        path = f"/pause?mode={mode}&clear_cache={str(clear_cache).lower()}"
        # With mode wait, every request in flight ends first.
        await self._http.send(path, {}, timeout_s=self._request_timeout_s)

    async def resume(self) -> None:
        await self._http.send("/resume", {})

    async def require_alive(self) -> None:
        await self._http.text("/health")


_LOAD_FOLDER_S = 600.0


def open_vllm(config: RunConfig, *, seed: int = 0, is_shared: bool = False) -> Engine:
    """An engine on the servers of `generator.vllm.url`, which have their own seed; raises as
    `open_urls` does.

    Raises:
        ConfigError: the server runs on this machine's CPU, which cannot serve the model.
    """
    settings = config.generator.vllm
    # A vLLM on this machine runs on its CPU if there is no GPU; of others nothing is known.
    if any(is_loopback(url) for url in settings.urls) and not has_gpu():
        require_servable(config, ModelFacts.of(config.model))
    return open_urls(VllmKind(config), is_shared=is_shared)


class VllmKind:
    """Implements `actors.engines.served.open.ServerKind`."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self._settings = config.generator.vllm

    def require_up(self, http: Http) -> None:
        http.request_sync("GET", "/health")

    def require_settings(self, http: Http) -> None:
        http.request_sync("POST", "/init_weight_transfer_engine", {"init_info": {}})
        require_length(http, self.config.max_model_len)
        num_workers = http.request_sync("GET", "/get_world_size", answer=WorldSize).world_size
        if num_workers != self._settings.tensor_parallel_size:
            raise ConfigError(
                "generator.vllm.tensor_parallel_size: was "
                f"{self._settings.tensor_parallel_size}, but {http.url} has {num_workers} workers"
            )

    looks = ("http_requests_total", 'handler="/weight_info"')

    def label(self, http: Http) -> str:
        info: Labeled = http.request_sync("GET", VllmServer.label_path, answer=Labeled)
        return info.weight_version

    def take(self, http: Http, labels: Labels) -> None:
        http.request_sync("POST", "/pause?mode=abort", {})
        http.request_sync("POST", "/update_weight_version", {"new_version": labels.taken})
        http.request_sync("POST", "/resume", {})

    def restore(self, http: Http, labels: Labels) -> None:
        http.request_sync("POST", "/pause?mode=abort", {})
        if self.label(http) != UNLABELED:
            body = {"method": "reload_weights"}
            http.request_sync("POST", "/collective_rpc", body, timeout_s=_LOAD_FOLDER_S)
        http.request_sync("POST", "/update_weight_version", {"new_version": labels.label(0)})
        http.request_sync("POST", "/resume", {})

    def sample(self, http: Http, labels: Labels, request: ServedRequest) -> Completion:
        body = wire_request(request)
        answer = http.request_sync("POST", GENERATE, body, GenerateTokensResponse)
        return completion_of(answer.choices[0], labels, request)

    def refusal(self, http: Http, error: RefusedError) -> ConfigError:
        return ConfigError(
            f"generator.vllm.url: the server at {http.url} was not started as it has to be "
            f"({error}); start it with\n  {serve_command(self.config)}"
        )

    def server(self, http: Http, labels: Labels) -> VllmServer:
        timeout_s = request_timeout_s(self.config.generator)
        loader = WeightLoader(
            HttpVerbs(http, timeout_s),
            self._settings,
            address=address_towards(host_of(http.url)),
            deadline_s=self.config.weights.deadline_s,
        )
        return VllmServer(http, loader, labels, request_timeout_s=timeout_s)


def serve_command(config: RunConfig) -> str:
    """The shell command that starts a vLLM for this configuration, on the host of `vllm.url`."""
    words = ["vllm", "serve", config.model.path, *serve_options(config)]
    return f"VLLM_SERVER_DEV_MODE=1 {shlex.join(words)}"


def serve_options(config: RunConfig) -> list[str]:
    generator = config.generator
    options = {
        "--dtype": generator.dtype,
        "--max-model-len": config.max_model_len,
        "--max-num-seqs": generator.max_num_seqs,
        "--tensor-parallel-size": generator.vllm.tensor_parallel_size,
        "--logprobs-mode": "processed_logprobs",
        "--generation-config": "vllm",
        "--weight-transfer-config": '{"backend": "streamrl"}',
    }
    if num_candidates := most_asked(config):
        options |= {"--max-logprobs": num_candidates}
    words = [str(word) for option in options.items() for word in option]
    if config.algorithm.records_experts:
        words.append("--enable-return-routed-experts")
    return [*words, "--skip-tokenizer-init", "--enable-scale-out"]
