"""How a vLLM that runs elsewhere is checked, and what it has to be started with.

Invariant: a server that was not started as `serve_command` says is refused, with that command.
"""

import shlex

from actors.engines.candidates import most_asked
from actors.engines.devices import has_gpu
from actors.engines.model import ModelFacts
from actors.engines.served.http import Http, RefusedError
from actors.engines.served.open import open_urls
from actors.engines.served.server import UNLABELED, Labels, Request
from actors.engines.served.start import host_of, request_timeout_s, require_length
from actors.engines.vllm.cpu import require_servable
from actors.engines.vllm.messages import (
    GenerateTokensResponse,
    WeightInfo,
    WorldSize,
    completion_of,
    wire_request,
)
from actors.engines.vllm.server import GENERATE, HttpVerbs, VllmServer
from actors.engines.vllm.weights import WeightLoader
from streamrl.config import RunConfig
from streamrl.config.addresses import is_loopback
from streamrl.errors import ConfigError
from streamrl.interfaces import Engine
from streamrl.types import Completion
from streamrl.weights.transports.groups import address_towards

_LOAD_FOLDER_S = 600.0


def open_vllm(config: RunConfig, *, is_shared: bool = False) -> Engine:
    """An engine on the servers of `generator.vllm.url`; raises as `open_urls` does.

    Raises:
        ConfigError: the server runs on this machine's CPU, which cannot serve the model.
    """
    settings = config.generator.vllm
    # A vLLM on this machine runs on its CPU if there is no GPU; of others nothing is known.
    if any(is_loopback(url) for url in settings.urls) and not has_gpu():
        require_servable(config, ModelFacts.of(config.model))
    return open_urls(VllmKind(config), config, settings.api_key, is_shared=is_shared)


class VllmKind:
    """Implements `actors.engines.served.start.ServerKind`."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self.settings = config.generator.vllm
        self.keeps_old_kv = self.settings.keeps_old_kv

    def require_up(self, http: Http) -> None:
        http.request_sync("GET", "/health")

    def require_settings(self, http: Http) -> None:
        http.request_sync("POST", "/init_weight_transfer_engine", {"init_info": {}})
        require_length(http, self._config)
        num_workers = http.request_sync("GET", "/get_world_size", answer=WorldSize).world_size
        if num_workers != self.settings.tensor_parallel_size:
            raise ConfigError(
                "generator.vllm.tensor_parallel_size: was "
                f"{self.settings.tensor_parallel_size}, but {http.url} has {num_workers} workers"
            )

    looks = ("http_requests_total", 'handler="/weight_info"')

    def label(self, http: Http) -> str:
        info: WeightInfo = http.request_sync("GET", "/weight_info", answer=WeightInfo)
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

    def sample(self, http: Http, labels: Labels, request: Request) -> Completion:
        body = wire_request(request)
        answer = http.request_sync("POST", GENERATE, body, GenerateTokensResponse)
        return completion_of(answer.choices[0], labels, request)

    def refusal(self, http: Http, error: RefusedError) -> ConfigError:
        return ConfigError(
            f"generator.vllm.url: the server at {http.url} was not started as it has to be "
            f"({error}); start it with\n  {serve_command(self._config)}"
        )

    def server(self, http: Http, labels: Labels) -> VllmServer:
        timeout_s = request_timeout_s(self._config)
        loader = WeightLoader(
            HttpVerbs(http, timeout_s),
            self.settings,
            address=address_towards(host_of(http.url)),
            deadline_s=self._config.weights.deadline_s,
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
    return [*words, "--skip-tokenizer-init", "--enable-scale-out"]
