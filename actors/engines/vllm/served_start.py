"""Before the first request to a vLLM elsewhere: it is up, it fits, it has its first weights.

Invariant: a server that was not started as `serve_command` says is refused, with that command.
"""

import shlex

from actors.engines.model import ModelFacts
from actors.engines.served.engine import ServedEngine
from actors.engines.served.http import Http, RefusedError
from actors.engines.served.server import UNLABELED, Labels, Request
from actors.engines.served.start import host_of, probe, require_length, wait_until_up
from actors.engines.vllm.messages import GenerateTokensResponse, completion_of, wire_request
from actors.engines.vllm.served import GENERATE, HttpVerbs, VllmServer
from actors.engines.vllm.weights import WeightLoader
from streamrl.config import RunConfig
from streamrl.errors import ConfigError
from streamrl.types import Completion
from streamrl.weights.transports.groups import address_towards


def open_served(config: RunConfig) -> ServedEngine:
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
        probe(lambda request: _ask_now(http, request, labels))
    except RefusedError as error:
        raise _not_as_needed(config, str(error)) from error
    loader = WeightLoader(
        HttpVerbs(http, settings.request_timeout_s),
        settings,
        address=address_towards(host_of(settings.url)),
        deadline_s=config.weights.deadline_s,
    )
    return ServedEngine(
        VllmServer(http, loader, labels, settings.request_timeout_s),
        ModelFacts.of(config.model),
        max_num_seqs=config.generator.max_num_seqs,
        max_model_len=config.max_model_len,
        retry_timeout_s=settings.retry_timeout_s,
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


def _ask_now(http: Http, request: Request, labels: Labels) -> Completion | None:
    body = wire_request(request)
    answer = http.now("POST", GENERATE, body, GenerateTokensResponse)
    return completion_of(answer.choices[0], labels)


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
    if http.now("GET", "/weight_info")["weight_version"] != UNLABELED:
        http.now("POST", "/collective_rpc", {"method": "reload_weights"}, timeout_s=600.0)
    http.now("POST", "/update_weight_version", {"new_version": labels.label(0)})
    http.now("POST", "/resume", {})


def _not_as_needed(config: RunConfig, words: str) -> ConfigError:
    return ConfigError(
        f"generator.vllm.url: the server at {config.generator.vllm.url} was not started as it has "
        f"to be ({words}); start it with\n  {serve_command(config)}"
    )
