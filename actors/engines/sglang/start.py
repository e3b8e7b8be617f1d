"""Before the first request to an SGLang server: it is up, it fits, it has its first weights."""

import contextlib
import socket

from actors.engines.model import ModelFacts
from actors.engines.served.engine import ServedEngine
from actors.engines.served.http import Http, RefusedError
from actors.engines.served.process import ServerProcess
from actors.engines.served.server import UNLABELED, Labels, Request
from actors.engines.served.start import host_of, probe, require_length, wait_until_up
from actors.engines.sglang.arguments import NUM_RESERVED, launch_command, wire_request
from actors.engines.sglang.messages import (
    ContinueGenerationReqInput,
    EndWeightUpdateReqInput,
    GenerateResponse,
    PauseGenerationReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightVersionReqInput,
)
from actors.engines.sglang.relay import Relay
from actors.engines.sglang.server import SglangServer, completion_of
from streamrl.config import RunConfig
from streamrl.errors import ConfigError
from streamrl.types import Completion
from streamrl.weights.transports.groups import address_towards


def open_sglang(config: RunConfig, *, seed: int) -> ServedEngine:
    """An engine on the server of `generator.sglang.url`, or on one started here; checked, and with
    its first weights.

    Raises:
        ConfigError: it is not up in time, or does not serve what the configuration asks for.
    """
    settings = config.generator.sglang
    process = None
    if settings.url is None:
        port = _free_port()
        command = launch_command(config, host="127.0.0.1", port=port, seed=seed)
        process = ServerProcess(command, config.run.path / "logs" / f"sglang-{port}.log")
    http = Http(settings.url or f"http://127.0.0.1:{port}", api_key=settings.api_key)
    try:
        return _open(config, http, process, seed)
    except BaseException:
        if process is not None:
            process.close()
        raise


def _open(config: RunConfig, http: Http, process: ServerProcess | None, seed: int) -> ServedEngine:
    settings = config.generator.sglang
    labels = Labels.new()
    require_alive = process.require_alive if process else lambda: None
    wait_until_up(http, "/model_info", settings, require_alive)
    # One that an earlier generator has left paused is not healthy by SGLang's own account.
    if http.now("GET", "/model_info")["weight_version"] == UNLABELED:
        wait_until_up(http, "/health", settings, require_alive)
    try:
        _require_settings(http, config)
        _restore(http, labels)
        probe(lambda request: _ask_now(http, request, labels))
    except RefusedError as error:
        raise ConfigError(f"generator.engine sglang: {http.url} refuses: {error}") from error
    relay = Relay(
        http,
        settings,
        host=settings.reach_host or address_towards(host_of(http.url)),
        bucket_bytes=config.weights.bucket_bytes,
        timeout_s=config.weights.deadline_s / 4,
    )
    server = SglangServer(
        http,
        relay,
        labels,
        seed=seed,
        is_deterministic=settings.enable_deterministic_inference,
        request_s=settings.request_timeout_s,
        process=process,
    )
    return ServedEngine(
        server,
        ModelFacts.of(config.model),
        max_num_seqs=config.generator.max_num_seqs,
        max_model_len=config.max_model_len,
        retry_timeout_s=settings.retry_timeout_s,
    )


def _ask_now(http: Http, request: Request, labels: Labels) -> Completion | None:
    answer = http.now("POST", "/generate", wire_request(request, 0), GenerateResponse)
    return completion_of(answer, request, labels)


def _require_settings(http: Http, config: RunConfig) -> None:
    """What the server was started with has to be what this configuration says of it."""
    require_length(http, config, NUM_RESERVED)
    settings, info = config.generator.sglang, http.now("GET", "/server_info")
    for name in ("tp_size", "enable_deterministic_inference"):
        if info.get(name) != getattr(settings, name):
            raise ConfigError(
                f"generator.sglang.{name}: was {getattr(settings, name)}, but the server at "
                f"{http.url} was started with {info.get(name)}"
            )
    if config.generator.min_new_tokens and info.get("skip_tokenizer_init"):
        raise ConfigError(
            f"generator.min_new_tokens: was {config.generator.min_new_tokens}, for which SGLang "
            f"needs a tokenizer, and the server at {http.url} has skip_tokenizer_init"
        )
    if not info.get("enable_metrics"):
        raise ConfigError(f"start the server at {http.url} with --enable-metrics")


def _restore(http: Http, labels: Labels) -> None:
    """The model folder's weights, whatever an earlier generator has left, under our label."""
    http.now("POST", "/pause_generation", PauseGenerationReqInput(mode="abort"))
    info = http.now("GET", "/model_info")
    if info["weight_version"] != UNLABELED:
        # It is refused where no update was left half done.
        with contextlib.suppress(RefusedError):
            http.now("POST", "/end_weight_update", EndWeightUpdateReqInput())
        path = info["model_path"]
        body = UpdateWeightFromDiskReqInput(model_path=path, abort_all_requests=True)
        http.now("POST", "/update_weights_from_disk", body, timeout_s=600.0)
    label = UpdateWeightVersionReqInput(new_version=labels.label(0), abort_all_requests=True)
    http.now("POST", "/update_weight_version", label)
    http.now("POST", "/continue_generation", ContinueGenerationReqInput())


def _free_port() -> int:
    with socket.socket() as probing:
        probing.bind(("127.0.0.1", 0))
        return int(probing.getsockname()[1])
