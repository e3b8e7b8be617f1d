"""A vLLM that runs elsewhere (`generator.vllm.url`): tokens in, tokens out, weights by our plug-in.

Its workers receive from the learner themselves, so StreamRL has to be installed beside that vLLM:
its entry point brings the weight-transfer backend `streamrl`. What a recorded version means and
what becomes of requests in flight is as in `actors.engines.vllm.engine`: the same vLLM, by HTTP.

Invariant: a server that is not started as `serve_command` says is refused at the start.
"""

import shlex
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from actors.engines.model import ModelFacts
from actors.engines.remote.engine import RemoteEngine
from actors.engines.remote.http import ConnectionLostError, Http, RefusedError, SlowAnswerError
from actors.engines.remote.metrics import Names, readings
from actors.engines.remote.server import (
    Labels,
    Request,
    VersionSpan,
    completion,
    versions_of,
)
from actors.engines.remote.start import host_of, probe, require_length, wait_until_up
from actors.engines.vllm.weights import WeightLoader
from streamrl.config import RunConfig
from streamrl.errors import ConfigError, RolloutError, TransportError, WeightTransferError
from streamrl.types import Completion, WeightUpdate
from streamrl.weights.groups import address_towards

GAUGES: Names = {
    "num_active": ("vllm:num_requests_running", ""),
    "num_waiting": ("vllm:num_requests_waiting", ""),
    "num_tokens": ("vllm:generation_tokens_total", ""),
    "kv_usage": ("vllm:kv_cache_usage_perc", ""),
    "num_preemptions": ("vllm:num_preemptions_total", ""),
}


class SamplingParams(Struct, frozen=True, kw_only=True):
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
    sampling_params: SamplingParams
    cache_salt: str


class GenerateLogProb(Struct, frozen=True):
    logprob: float


class GenerateLogProbs(Struct, frozen=True):
    content: list[GenerateLogProb]


class GenerateTokensChoice(Struct, frozen=True):
    token_ids: list[int]
    logprobs: GenerateLogProbs
    finish_reason: str
    weight_versions: list[VersionSpan]


class GenerateTokensResponse(Struct, frozen=True):
    choices: list[GenerateTokensChoice]


class VllmServer:
    """Implements `actors.engines.remote.server.Server`."""

    def __init__(self, http: Http, loader: WeightLoader, labels: Labels, request_s: float) -> None:
        self._http = http
        self._loader = loader
        self._labels = labels
        self._request_s = request_s

    async def sample(self, request: Request) -> Completion | None:
        try:
            answer = await self._http.post(
                "/inference/v1/generate",
                wire_request(request),
                GenerateTokensResponse,
                timeout_s=self._request_s,
            )
        except (RefusedError, SlowAnswerError) as error:
            raise RolloutError(f"vLLM refused a request: {error}") from error
        return _completion(answer.choices[0], self._labels)

    async def abort(self, request_id: str) -> None:
        ids = {"request_ids": [f"generate-tokens-{request_id}"]}
        await self._http.tell("/inference/v1/abort_requests", ids)

    async def receive(self, update: WeightUpdate) -> None:
        try:
            await self._loader.receive(update)
        except (RefusedError, ConnectionLostError) as error:
            raise WeightTransferError(f"vLLM did not take an update: {error}") from error

    async def load(self, policy_version: int, on_loaded: Callable[[], None]) -> float:
        try:
            return await self._loader.load(self._labels.label(policy_version), on_loaded)
        except RefusedError as error:
            raise TransportError(f"vLLM did not load an update: {error}") from error

    async def readings(self) -> Mapping[str, float]:
        return readings(await self._http.get("/metrics"), GAUGES)

    async def close(self) -> None:
        self._loader.close()
        await self._http.close()


class HttpVerbs:
    """Implements `actors.engines.vllm.weights.WeightVerbs` by vLLM's routes for training."""

    def __init__(self, http: Http, longest_s: float) -> None:
        self._http = http
        self._longest_s = longest_s

    async def start(self) -> None:
        await self._http.tell("/start_weight_update", {})

    async def update(self, info: dict[str, Any]) -> None:
        await self._http.tell("/update_weights", {"update_info": info})

    async def finish(self, label: str | None) -> None:
        await self._http.tell("/finish_weight_update", {"weight_version": label})

    async def pause(self, mode: str, *, clear_cache: bool) -> None:
        path = f"/pause?mode={mode}&clear_cache={str(clear_cache).lower()}"
        # With wait, every request in flight ends first.
        await self._http.tell(path, {}, timeout_s=self._longest_s)

    async def resume(self) -> None:
        await self._http.tell("/resume", {})

    async def require_alive(self) -> None:
        await self._http.get("/health")


def open_remote(config: RunConfig) -> RemoteEngine:
    """An engine on the server of `generator.vllm.url`, checked and with its first weights.

    Raises:
        ConfigError: it is not up in time, or was not started as it has to be.
    """
    settings = config.generator.vllm
    assert settings.url is not None, "make_engine has looked"
    http = Http(settings.url, api_key=settings.api_key)
    labels = Labels.new()
    wait_until_up(http, "/health", settings)
    try:
        _require_settings(http, config)
        _restore(http, labels)
        probe(
            lambda request: _completion(
                http.now("POST", "/inference/v1/generate", wire_request(request), _ANSWER).choices[
                    0
                ],
                labels,
            )
        )
    except RefusedError as error:
        raise _not_as_needed(config, str(error)) from error
    loader = WeightLoader(
        HttpVerbs(http, settings.request_timeout_s),
        settings,
        address=address_towards(host_of(settings.url)),
        deadline_s=config.weights.deadline_s,
    )
    return RemoteEngine(
        VllmServer(http, loader, labels, settings.request_timeout_s),
        ModelFacts.of(config.model),
        max_num_seqs=config.generator.max_num_seqs,
        max_model_len=config.max_model_len,
        patience_s=settings.patience_s,
    )


def serve_command(config: RunConfig) -> str:
    """What starts a vLLM that this configuration can use, on the machine of `vllm.url`."""
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
    words = [str(word) for option in options.items() for word in option]
    return [*words, "--skip-tokenizer-init", "--enable-scale-out"]


_ANSWER = GenerateTokensResponse


def wire_request(request: Request) -> GenerateRequest:
    sampling = request.sampling
    return GenerateRequest(
        request_id=request.id,
        token_ids=list(request.prompt_token_ids),
        sampling_params=SamplingParams(
            max_tokens=request.max_new_tokens,
            min_tokens=request.min_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            stop_token_ids=sorted(request.stops),
            seed=sampling.seed,
        ),
        cache_salt=request.cache_salt,
    )


def _completion(choice: GenerateTokensChoice, labels: Labels) -> Completion | None:
    if choice.finish_reason == "abort":
        return None
    return completion(
        choice.token_ids,
        [token.logprob for token in choice.logprobs.content],
        versions_of(choice.weight_versions, len(choice.token_ids), labels),
        choice.finish_reason,
    )


def _require_settings(http: Http, config: RunConfig) -> None:
    http.now("POST", "/init_weight_transfer_engine", {"init_info": {}})
    require_length(http, config)
    ranks = http.now("GET", "/get_world_size")["world_size"]
    if ranks != config.generator.vllm.tensor_parallel_size:
        raise ConfigError(
            "generator.vllm.tensor_parallel_size: was "
            f"{config.generator.vllm.tensor_parallel_size}, but {http.url} has {ranks} workers"
        )


def _restore(http: Http, labels: Labels) -> None:
    """The model folder's weights, whatever an earlier generator has left, under our label."""
    http.now("POST", "/pause?mode=abort", {})
    if http.now("GET", "/weight_info")["weight_version"] != "default":
        http.now("POST", "/collective_rpc", {"method": "reload_weights"}, timeout_s=600.0)
    http.now("POST", "/update_weight_version", {"new_version": labels.label(0)})
    http.now("POST", "/resume", {})


def _not_as_needed(config: RunConfig, words: str) -> ConfigError:
    return ConfigError(
        f"generator.vllm.url: the server at {config.generator.vllm.url} was not started as it has "
        f"to be ({words}); start it with\n  {serve_command(config)}"
    )
