"""An SGLang server, elsewhere (`generator.sglang.url`) or started for this engine.

What a recorded version means: the weights whose forward pass sampled the token, by SGLang's own
spans of labels (`actors.engines.sglang.relay` says where they are one token off). What of its KV
cache is of the same version depends on `generator.sglang.pause_mode`:

    keep    requests in flight go on; their earlier tokens' KV stays of the version that made it,
            or, with recompute_kv, they are taken back and read anew
    abort   requests in flight begin anew, so all of a completion is of one version

Log-probabilities: SGLang reports those after temperature; where top-k or top-p cut, the ones of the
cut distribution come with its sampling mask, which holds at most sampling_mask_max_tokens (4096)
candidates: a request that keeps more fails alone.
"""

import contextlib
import itertools
import math
import socket
from collections.abc import Callable, Mapping

import numpy as np

from actors.engines.model import ModelFacts
from actors.engines.remote.engine import RemoteEngine
from actors.engines.remote.http import Http, RefusedError, SlowAnswerError
from actors.engines.remote.metrics import Names, readings
from actors.engines.remote.process import ServerProcess
from actors.engines.remote.server import Labels, Request, completion, versions_of
from actors.engines.remote.start import host_of, probe, require_length, wait_until_up
from actors.engines.sglang.arguments import is_truncated, launch_command, wire_request
from actors.engines.sglang.messages import (
    AbortReq,
    ContinueGenerationReqInput,
    EndWeightUpdateReqInput,
    GenerateResponse,
    PauseGenerationReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightVersionReqInput,
)
from actors.engines.sglang.relay import Relay
from streamrl.config import RunConfig
from streamrl.errors import ConfigError, RolloutError, TransportError
from streamrl.types import Completion, WeightUpdate
from streamrl.weights.groups import address_towards

GAUGES: Names = {
    "num_active": ("sglang:num_running_reqs", ""),
    "num_waiting": ("sglang:num_queue_reqs", ""),
    "num_tokens": ("sglang:realtime_tokens_total", 'mode="decode"'),
    "kv_usage": ("sglang:token_usage", ""),
}


class SglangServer:
    """Implements `actors.engines.remote.server.Server`."""

    def __init__(
        self,
        http: Http,
        relay: Relay,
        labels: Labels,
        *,
        seed: int,
        is_deterministic: bool,
        request_s: float,
        process: ServerProcess | None = None,
    ) -> None:
        self._http = http
        self._relay = relay
        self._labels = labels
        self._is_deterministic = is_deterministic
        self._request_s = request_s
        self._process = process
        self._seeds = (int(s) for s in _seeds(seed))

    async def sample(self, request: Request) -> Completion | None:
        if request.sampling.seed is not None and not self._is_deterministic:
            raise RolloutError(
                "SGLang heeds a seed only with generator.sglang.enable_deterministic_inference"
            )
        body = wire_request(request, next(self._seeds))
        try:
            answer = await self._http.post(
                "/generate", body, GenerateResponse, timeout_s=self._request_s
            )
        except (RefusedError, SlowAnswerError) as error:
            raise RolloutError(f"SGLang refused a request: {error}") from error
        return _completion(answer, request, self._labels)

    async def abort(self, request_id: str) -> None:
        await self._http.tell("/abort_request", AbortReq(rid=request_id))

    async def receive(self, update: WeightUpdate) -> None:
        await self._relay.receive(update)

    async def load(self, policy_version: int, on_loaded: Callable[[], None]) -> float:
        try:
            return await self._relay.load(self._labels.label(policy_version), on_loaded)
        except RefusedError as error:
            raise TransportError(f"SGLang did not load an update: {error}") from error

    async def readings(self) -> Mapping[str, float]:
        if self._process is not None:
            self._process.require_alive()
        return readings(await self._http.get("/metrics"), GAUGES)

    async def close(self) -> None:
        self._relay.close()
        await self._http.close()
        if self._process is not None:
            self._process.close()


def open_sglang(config: RunConfig, *, seed: int) -> RemoteEngine:
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


def _open(config: RunConfig, http: Http, process: ServerProcess | None, seed: int) -> RemoteEngine:
    settings = config.generator.sglang
    labels = Labels.new()
    require_alive = process.require_alive if process else lambda: None
    wait_until_up(http, "/model_info", settings, require_alive)
    # One that an earlier generator has left paused is not healthy by SGLang's own account.
    if http.now("GET", "/model_info")["weight_version"] == "default":
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
    return RemoteEngine(
        server,
        ModelFacts.of(config.model),
        max_num_seqs=config.generator.max_num_seqs,
        max_model_len=config.max_model_len,
        patience_s=settings.patience_s,
    )


def _completion(answer: GenerateResponse, request: Request, labels: Labels) -> Completion | None:
    meta, reason = answer.meta_info, answer.meta_info.finish_reason.type
    if reason == "abort":
        return None
    token_ids = answer.output_ids
    logprobs = [math.nan if entry[0] is None else entry[0] for entry in meta.output_token_logprobs]
    if is_truncated(request):
        logprobs = meta.output_token_sampling_logprobs or []
    if not np.isfinite(logprobs).all():
        raise RolloutError("SGLang sampled a token whose log-probability is not finite")
    versions = versions_of(meta.weight_versions, len(token_ids), labels)
    first_stop = _first_stop(token_ids, request) if request.sampling.ignore_eos else None
    if first_stop is not None:
        end, reason = first_stop + 1, "stop"
        token_ids, logprobs, versions = token_ids[:end], logprobs[:end], versions[:end]
    return completion(token_ids, logprobs, versions, reason)


def _first_stop(token_ids: list[int], request: Request) -> int | None:
    places = range(request.min_new_tokens, len(token_ids))
    return next((i for i in places if token_ids[i] in request.stops), None)


def _ask_now(http: Http, request: Request, labels: Labels) -> Completion | None:
    answer = http.now("POST", "/generate", wire_request(request, 0), GenerateResponse)
    return _completion(answer, request, labels)


def _require_settings(http: Http, config: RunConfig) -> None:
    """What the server was started with has to be what this configuration says of it."""
    require_length(http, config)
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
    if info["weight_version"] != "default":
        # It is refused where no update was left half done.
        with contextlib.suppress(RefusedError):
            http.now("POST", "/end_weight_update", EndWeightUpdateReqInput())
        path = info["model_path"]
        body = UpdateWeightFromDiskReqInput(model_path=path, abort_all_requests=True)
        http.now("POST", "/update_weights_from_disk", body, timeout_s=600.0)
    label = UpdateWeightVersionReqInput(new_version=labels.label(0), abort_all_requests=True)
    http.now("POST", "/update_weight_version", label)
    http.now("POST", "/continue_generation", ContinueGenerationReqInput())


def _seeds(seed: int) -> "itertools.chain[int]":
    """Endless; requests without a seed of their own must differ from each other."""
    generator = np.random.default_rng(seed)
    draws = (generator.integers(0, 2**31, size=1024).tolist() for _ in itertools.count())
    return itertools.chain.from_iterable(draws)


def _free_port() -> int:
    with socket.socket() as probing:
        probing.bind(("127.0.0.1", 0))
        return int(probing.getsockname()[1])
