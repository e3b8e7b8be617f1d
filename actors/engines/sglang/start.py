"""How an SGLang server, elsewhere or started here, is checked."""

import contextlib
import socket
from typing import Any

from actors.engines.served.http import Http, RefusedError
from actors.engines.served.open import open_served, open_urls
from actors.engines.served.process import ServerProcess
from actors.engines.served.server import UNLABELED, Labels, Request
from actors.engines.served.start import host_of, request_timeout_s, require_length
from actors.engines.sglang.arguments import (
    NUM_RESERVED,
    launch_command,
    launch_environment,
    wire_request,
)
from actors.engines.sglang.messages import (
    ContinueGenerationReqInput,
    EndWeightUpdateReqInput,
    GenerateResponse,
    ModelInfo,
    PauseGenerationReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightVersionReqInput,
)
from actors.engines.sglang.relay import Relay
from actors.engines.sglang.server import SglangServer, completion_of
from actors.engines.staging import WholeModel
from streamrl.config import RunConfig
from streamrl.errors import ConfigError
from streamrl.interfaces import Engine
from streamrl.types import Completion
from streamrl.weights.transports.groups import address_towards

_LOAD_FOLDER_S = 600.0


def open_sglang(config: RunConfig, *, seed: int, is_shared: bool = False) -> Engine:
    """An engine on the servers of `generator.sglang.url`, or on one started here; raises as
    `open_urls` does."""
    settings = config.generator.sglang
    kind = SglangKind(config, seed=seed)
    if settings.urls:
        return open_urls(kind, config, settings.api_key, is_shared=is_shared)
    port = _free_port()
    command = launch_command(config, host="127.0.0.1", port=port, seed=seed)
    process = ServerProcess(
        command, config.run.path / "logs" / f"sglang-{port}.log", launch_environment(config)
    )
    return open_served(kind, config, Http(f"http://127.0.0.1:{port}"), process)


class SglangKind:
    """Implements `actors.engines.served.start.ServerKind`."""

    def __init__(self, config: RunConfig, *, seed: int) -> None:
        self._config = config
        self._seed = seed
        self.settings = config.generator.sglang
        self.keeps_old_kv = self.settings.keeps_old_kv

    def require_up(self, http: Http) -> None:
        # SGLang's /health fails on a server that an earlier generator has left paused.
        info = http.request_sync("GET", "/model_info", answer=ModelInfo)
        if info.weight_version == UNLABELED:
            http.request_sync("GET", "/health")

    def require_settings(self, http: Http) -> None:
        require_length(http, self._config, NUM_RESERVED)
        info = http.request_sync("GET", "/server_info", answer=dict[str, Any])
        for name in ("tp_size", "enable_deterministic_inference"):
            if info.get(name) != getattr(self.settings, name):
                raise ConfigError(
                    f"generator.sglang.{name}: was {getattr(self.settings, name)}, but the server "
                    f"at {http.url} was started with {info.get(name)}"
                )
        if self.keeps_old_kv and not info.get("disable_overlap_schedule"):
            raise ConfigError(
                "generator.sglang.recompute_kv: was false, for which the server at "
                f"{http.url} has to be started with --disable-overlap-schedule: else it labels one "
                "token of each request in flight with the next version"
            )
        min_new_tokens = self._config.generator.min_new_tokens
        if min_new_tokens and info.get("skip_tokenizer_init"):
            raise ConfigError(
                f"generator.min_new_tokens: was {min_new_tokens}, for which SGLang needs a "
                f"tokenizer, and the server at {http.url} has skip_tokenizer_init"
            )
        if not info.get("enable_metrics"):
            raise ConfigError(f"start the server at {http.url} with --enable-metrics")

    looks = ("sglang:http_requests_total", 'endpoint="/model_info"')

    def label(self, http: Http) -> str:
        info: ModelInfo = http.request_sync("GET", "/model_info", answer=ModelInfo)
        return info.weight_version

    def take(self, http: Http, labels: Labels) -> None:
        http.request_sync("POST", "/pause_generation", PauseGenerationReqInput(mode="abort"))
        self._name(http, labels.taken)

    def restore(self, http: Http, labels: Labels) -> None:
        http.request_sync("POST", "/pause_generation", PauseGenerationReqInput(mode="abort"))
        info = http.request_sync("GET", "/model_info", answer=ModelInfo)
        if info.weight_version != UNLABELED:
            # SGLang refuses it unless an update was left unfinished.
            with contextlib.suppress(RefusedError):
                http.request_sync("POST", "/end_weight_update", EndWeightUpdateReqInput())
            body = UpdateWeightFromDiskReqInput(model_path=info.model_path, abort_all_requests=True)
            http.request_sync("POST", "/update_weights_from_disk", body, timeout_s=_LOAD_FOLDER_S)
        self._name(http, labels.label(0))

    def _name(self, http: Http, label: str) -> None:
        """Before sampling goes on."""
        body = UpdateWeightVersionReqInput(new_version=label, abort_all_requests=True)
        http.request_sync("POST", "/update_weight_version", body)
        http.request_sync("POST", "/continue_generation", ContinueGenerationReqInput())

    def sample(self, http: Http, labels: Labels, request: Request) -> Completion:
        body = wire_request(request, 0)
        answer = http.request_sync("POST", "/generate", body, GenerateResponse)
        return completion_of(answer, request, labels)

    def refusal(self, http: Http, error: RefusedError) -> ConfigError:
        return ConfigError(f"generator.engine sglang: {http.url} refuses: {error}")

    def server(self, http: Http, labels: Labels) -> SglangServer:
        model = self._config.model
        relay = Relay(
            http,
            self.settings,
            WholeModel(model.path, trust_remote_code=model.trust_remote_code),
            host=self.settings.reach_host or address_towards(host_of(http.url)),
            bucket_bytes=self._config.weights.bucket_bytes,
            timeout_s=self._config.weights.deadline_s / 4,
        )
        return SglangServer(
            http,
            relay,
            labels,
            seed=self._seed,
            is_deterministic=self.settings.enable_deterministic_inference,
            request_timeout_s=request_timeout_s(self._config),
        )


def _free_port() -> int:
    with socket.socket() as probing:
        probing.bind(("127.0.0.1", 0))
        return int(probing.getsockname()[1])
