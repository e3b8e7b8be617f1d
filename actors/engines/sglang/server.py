"""An SGLang server, elsewhere (`generator.sglang.url`) or started for this engine.

A token's recorded version is that of the weights whose forward pass sampled it, by SGLang's own
spans of labels. Which version the KV cache belongs to depends on `generator.sglang.pause_mode`:

    keep    requests in flight continue; the KV cache of their earlier tokens remains that of the
            version that computed it or, with recompute_kv, is computed again
    abort   requests in flight start over, so a completion has a single version

SGLang reports log-probabilities after temperature. With top-k or top-p, those of the truncated
distribution come with its sampling mask, which has at most sampling_mask_max_tokens (4096)
candidates. So top-p alone samples from the 4096 likeliest, and a request with a larger top-k fails.
With both, top-p counts the probabilities of all tokens; HF and vLLM count only those that top-k has
kept.
"""

import contextlib
import math
import os
import sys
from collections.abc import Iterator, Mapping
from functools import cached_property, partial
from typing import Any

import numpy as np

from actors.engines.completions import (
    candidates,
    completion,
    from_int32,
    keeps_mask,
    recorded,
    top_of,
)
from actors.engines.model import ModelFacts, require_all_sent
from actors.engines.served.http import Names, RefusedError
from actors.engines.served.open import open_served, open_urls, require_length
from actors.engines.served.process import ServerProcess, has_gpu
from actors.engines.served.server import (
    ABORT_S,
    LOAD_FOLDER_S,
    UNLABELED,
    Labels,
    ServedRequest,
    Server,
    versions_of,
)
from actors.engines.sglang.messages import (
    AbortReq,
    GenerateMetaInfo,
    GenerateReqInput,
    GenerateResponse,
    ModelInfo,
    PauseGenerationReqInput,
    SglangSampling,
    UpdateWeightFromDiskReqInput,
    UpdateWeightVersionReqInput,
)
from actors.engines.sglang.relay import Relay
from actors.engines.updates import StagedWeights
from streamrl.config import RunConfig
from streamrl.config.addresses import address_towards, bound_socket, host_of
from streamrl.config.generator import SglangSettings
from streamrl.errors import ConfigError, RolloutError
from streamrl.interfaces import Engine
from streamrl.placement.hosts import visible_alone
from streamrl.types import Completion, SamplingParams, TokenSets, TopLogprobs


def is_truncated(request: ServedRequest) -> bool:
    """Whether top-k or top-p excludes candidates; greedy sampling reports the full distribution."""
    sampling = request.sampling
    return sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1)


def sets_of(
    meta: GenerateMetaInfo, request: ServedRequest, num_tokens: int
) -> tuple[TokenSets | None, TopLogprobs | None]:
    """The sampling mask and the likeliest tokens of the first `num_tokens`, each if it was asked
    for.

    SGLang's sampling mask has only ids, and its top log-probabilities are those before truncation.
    They are corrected by the sampled token's difference between the two distributions, which its
    candidates share.

    Raises:
        RolloutError: the answer lacks them.
    """
    sampling = request.sampling
    masks = (meta.output_token_sampling_mask or [])[:num_tokens]
    found = (meta.output_top_logprobs or [])[:num_tokens]
    for name, parts, is_asked in (
        ("sampling mask", masks, is_truncated(request)),
        ("top log-probabilities", found, sampling.num_top_logprobs > 0),
    ):
        if is_asked and len(parts) != num_tokens:
            missing = num_tokens - len(parts)
            raise RolloutError(f"the answer has no {name} for {missing} of its tokens")
    mask = None
    if keeps_mask(sampling):
        mask = TokenSets.of([candidates(ids, [0.0] * len(ids))[0] for ids in masks])
    if not sampling.num_top_logprobs:
        return mask, None
    return mask, _top(meta, sampling, masks if is_truncated(request) else None, num_tokens)


def _top(
    meta: GenerateMetaInfo, sampling: SamplingParams, masks: list[list[int]] | None, num_tokens: int
) -> TopLogprobs:
    each = []
    for i, entries in enumerate((meta.output_top_logprobs or [])[:num_tokens]):
        rise, kept = 0.0, None
        if masks is not None and meta.output_token_sampling_logprobs is not None:
            plain = meta.output_token_logprobs[i][0]
            rise = meta.output_token_sampling_logprobs[i] - (math.nan if plain is None else plain)
            kept = frozenset(masks[i])
        pairs = [(e[1], e[0]) for e in entries or [] if kept is None or e[1] in kept]
        logprobs = [math.nan if logprob is None else logprob + rise for _, logprob in pairs]
        if not all(map(math.isfinite, logprobs)):
            raise RolloutError("the answer is inconsistent: a log-probability is not finite")
        each.append(candidates([token_id for token_id, _ in pairs], logprobs))
    return top_of(each, sampling.num_top_logprobs)


# SGLang leaves two positions of its context unused, and accepts no prompt within six of its end.
NUM_RESERVED = 6
_INFO_S = 30.0
# The most candidates in a token's sampling mask (--sampling-mask-max-tokens).
MASK_TOKENS = 4096


def launch_environment(config: RunConfig) -> dict[str, str]:
    """Environment variables that the process of `launch_command` needs in addition."""
    num_threads = config.generator.num_threads
    threads = {"OMP_NUM_THREADS": str(num_threads)} if num_threads else {}
    if not has_gpu():
        return {**threads, "SGLANG_USE_CPU_ENGINE": "1"}
    return {**threads, **visible_alone(config.generator.device, os.environ)}


def launch_command(config: RunConfig, *, host: str, port: int, seed: int) -> list[str]:
    """The command that starts the server of a run's configuration. `generator.engine_kwargs`
    overrides every argument; the configuration refuses overrides that would break correctness."""
    generator = config.generator
    settings = generator.sglang.model_dump(exclude=set(SglangSettings.ours))
    given = {name: value for name, value in settings.items() if value is not None}
    arguments = {
        "model_path": config.model.path,
        "host": host,
        "port": port,
        "random_seed": seed,
        "dtype": generator.dtype,
        "max_running_requests": generator.max_num_seqs,
        "context_length": config.max_model_len + NUM_RESERVED,
        "trust_remote_code": config.model.trust_remote_code,
        "enable_metrics": True,
        # Only SGLang's minimum length needs a tokenizer.
        "skip_tokenizer_init": generator.min_new_tokens == 0,
        **({} if has_gpu() else _on_cpu(generator.max_num_seqs, config.max_model_len)),
        **({"enable_return_routed_experts": True} if config.algorithm.records_experts else {}),
        **({"enable_fp32_lm_head": True} if generator.lm_head_dtype else {}),
        **({"disable_overlap_schedule": True} if generator.sglang.keeps_old_kv else {}),
        **given,
        **generator.engine_kwargs,
    }
    return [sys.executable, "-m", "sglang.launch_server", *flags(arguments)]


def _on_cpu(max_num_seqs: int, max_model_len: int) -> dict[str, Any]:
    """Arguments for a plain CPU: kernels without special instructions, a KV cache just for the
    concurrent requests (by default it takes half of the machine's memory), and no polling while
    idle.
    """
    num_tokens = max_num_seqs * (max_model_len + NUM_RESERVED)
    return {
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "max_total_tokens": num_tokens,
        "sleep_on_idle": True,
    }


def flags(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Arguments as flags: true gives a bare flag, false no flag, a list a flag with several values.

    >>> list(flags({"tp_size": 2, "disable_cuda_graph": True, "enable_metrics": False}))
    ['--tp-size', '2', '--disable-cuda-graph']
    """
    for name, value in arguments.items():
        if value is False:
            continue
        yield "--" + name.replace("_", "-")
        if isinstance(value, list | tuple):
            yield from map(str, value)
        elif value is not True:
            yield str(value)


def wire_request(request: ServedRequest, seed: int) -> GenerateReqInput:
    """SGLang's form of the request. `seed` is used if the request has none.

    SGLang reports no log-probabilities of a distribution that only top-p truncates, so top-k is
    added. It can ignore all stops, but not only the end-of-sequence tokens; with `ignore_eos` the
    answer is therefore cut at the first stop in `completion_of`.
    """
    sampling = request.sampling
    return GenerateReqInput(
        rid=request.id,
        input_ids=list(request.prompt_token_ids),
        sampling_params=SglangSampling(
            max_new_tokens=sampling.max_new_tokens,
            min_new_tokens=sampling.min_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k or (MASK_TOKENS if is_truncated(request) else -1),
            stop_token_ids=sorted(request.stops),
            ignore_eos=sampling.ignore_eos,
            sampling_seed=seed if sampling.seed is None else sampling.seed,
        ),
        cache_salt=request.cache_salt,
        return_routed_experts=math.prod(request.expert_shape) > 0,
        return_logprob=True,
        return_sampling_mask=is_truncated(request),
        top_logprobs_num=sampling.num_top_logprobs or None,
    )


GAUGES: Names = {
    "num_active": ("sglang:num_running_reqs", ""),
    "num_waiting": ("sglang:num_queue_reqs", ""),
    "num_tokens": ("sglang:realtime_tokens_total", 'mode="decode"'),
    "kv_usage": ("sglang:token_usage", ""),
}


def completion_of(answer: GenerateResponse, request: ServedRequest, labels: Labels) -> Completion:
    meta, reason = answer.meta_info, answer.meta_info.finish_reason.type
    token_ids, repeated = answer.output_ids, [entry[1] for entry in meta.output_token_logprobs]
    if repeated != token_ids[: len(repeated)]:
        raise RolloutError("the answer is inconsistent: its log-probabilities are of other tokens")
    logprobs = [math.nan if entry[0] is None else entry[0] for entry in meta.output_token_logprobs]
    if is_truncated(request):
        logprobs = meta.output_token_sampling_logprobs or []
    if reason == "abort":
        # A request that is aborted in SGLang's queue after a retraction may lack some
        # log-probabilities.
        token_ids = token_ids[: len(logprobs)]
    if not np.isfinite(logprobs).all():
        raise RolloutError("the answer is inconsistent: a log-probability is not finite")
    versions = versions_of(meta.weight_versions, len(token_ids), labels)
    if request.sampling.ignore_eos:
        positions = range(request.sampling.min_new_tokens, len(token_ids))
        end = next((i + 1 for i in positions if token_ids[i] in request.stops), None)
        if end is not None:
            token_ids, logprobs, versions = token_ids[:end], logprobs[:end], versions[:end]
            reason = "stop"
    mask = top = None
    if request.sampling.keep_sampling_mask or request.sampling.num_top_logprobs:
        mask, top = sets_of(meta, request, len(token_ids))
    experts = None
    if math.prod(request.expert_shape):
        prompt, rows = request.prompt_token_ids, None
        if meta.routed_experts is not None:
            rows = from_int32(meta.routed_experts, *request.expert_shape)
            # Rows after a stop are removed with their tokens.
            rows = rows[: len(prompt) + len(token_ids) - 1]
        experts = recorded(rows, prompt, token_ids, "SGLang", meta.finish_reason.type)
    return completion(
        token_ids,
        logprobs,
        versions,
        reason,
        sampling_mask=mask,
        top_logprobs=top,
        routed_experts=experts,
    )


def open_sglang(config: RunConfig, *, seed: int, is_shared: bool = False) -> Engine:
    """Make an engine on the servers of `generator.sglang.url`, or on one started here; raises as
    `open_urls` does."""
    make = partial(SglangServer, config, seed=seed)
    if config.generator.sglang.urls:
        return open_urls(config, make, is_shared=is_shared)
    if config.generator.lacks_weights:
        require_all_sent(config.generator, ModelFacts.of(config.model))
    with bound_socket("127.0.0.1") as bound:
        port: int = bound.getsockname()[1]
    command = launch_command(config, host="127.0.0.1", port=port, seed=seed)
    process = ServerProcess(
        command, config.run.path / "logs" / f"sglang-{port}.log", launch_environment(config)
    )
    return open_served(config, make, f"http://127.0.0.1:{port}", process)


class SglangServer(Server):
    """A server with SGLang's own routes."""

    library, label_path, gauges = "SGLang", "/model_info", GAUGES
    looks = ("sglang:http_requests_total", 'endpoint="/model_info"')

    def __init__(self, config: RunConfig, url: str, labels: Labels, *, seed: int) -> None:
        super().__init__(config, url, labels)
        self._settings = config.generator.sglang
        # Each request without a seed gets a different one.
        self._seeds = np.random.default_rng(seed)

    async def require_up(self) -> None:
        # SGLang's /health fails if an earlier generator has left the server paused.
        if await self.label() == UNLABELED:
            await self.http.text("/health")

    async def require_settings(self) -> None:
        await require_length(self.http, self._config.max_model_len, NUM_RESERVED)
        # The scheduler answers this between two steps, which may take long.
        info = await self.http.get("/server_info", dict[str, Any], timeout_s=_INFO_S)
        for name in ("tp_size", "enable_deterministic_inference"):
            if info.get(name) != getattr(self._settings, name):
                raise ConfigError(
                    f"generator.sglang.{name}: was {getattr(self._settings, name)}, but the server "
                    f"at {self.http.url} was started with {info.get(name)}"
                )
        if self._settings.keeps_old_kv and not info.get("disable_overlap_schedule"):
            raise ConfigError(
                "generator.sglang.recompute_kv: was false, for which the server at "
                f"{self.http.url} has to be started with --disable-overlap-schedule: else it "
                "labels one token of each request in flight with the next version"
            )
        min_new_tokens = self._config.generator.min_new_tokens
        if min_new_tokens and info.get("skip_tokenizer_init"):
            raise ConfigError(
                f"generator.min_new_tokens: was {min_new_tokens}, for which SGLang needs a "
                f"tokenizer, and the server at {self.http.url} has skip_tokenizer_init"
            )
        router_replay = self._config.algorithm.router_replay
        if self._config.algorithm.records_experts and not info.get("enable_return_routed_experts"):
            raise ConfigError(
                f"algorithm.router_replay: was {router_replay}, for which the server at "
                f"{self.http.url} has to be started with --enable-return-routed-experts"
            )
        if not info.get("enable_metrics"):
            raise ConfigError(f"start the server at {self.http.url} with --enable-metrics")

    async def take(self) -> None:
        await self.http.send("/pause_generation", PauseGenerationReqInput(mode="abort"))
        await self._name_weights(self.labels.taken)

    async def restore(self) -> None:
        await self.http.send("/pause_generation", PauseGenerationReqInput(mode="abort"))
        info = await self.http.get("/model_info", ModelInfo)
        if info.weight_version != UNLABELED:
            # SGLang refuses this unless an update was left unfinished.
            with contextlib.suppress(RefusedError):
                await self.http.send("/end_weight_update", {})
            body = UpdateWeightFromDiskReqInput(model_path=info.model_path, abort_all_requests=True)
            await self.http.send("/update_weights_from_disk", body, timeout_s=LOAD_FOLDER_S)
        await self._name_weights(self.labels.label(0))

    async def _name_weights(self, label: str) -> None:
        """Label the weights and let sampling continue."""
        body = UpdateWeightVersionReqInput(new_version=label, abort_all_requests=True)
        await self.http.send("/update_weight_version", body)
        await self.http.send("/continue_generation", {})

    def refusal(self, error: RefusedError) -> ConfigError:
        return ConfigError(f"generator.engine sglang: {self.http.url} refuses: {error}")

    @cached_property
    def updates(self) -> Relay:
        model, weights = self._config.model, self._config.weights
        return Relay(
            self.http,
            self._settings,
            StagedWeights(model.path, trust_remote_code=model.trust_remote_code),
            host=self._settings.reach_host or address_towards(host_of(self.http.url)),
            bucket_bytes=weights.bucket_bytes,
            timeout_s=weights.deadline_s / 4,
        )

    async def sample(self, request: ServedRequest) -> Completion:
        is_deterministic = self._settings.enable_deterministic_inference
        if request.sampling.seed is not None and not is_deterministic:
            raise RolloutError(
                "SGLang uses a seed only with generator.sglang.enable_deterministic_inference"
            )
        # The answer has the ids of each token's candidates, and the likeliest with
        # log-probabilities.
        num_ids = (request.sampling.top_k or MASK_TOKENS) if is_truncated(request) else 0
        answer = await self.http.post(
            "/generate",
            wire_request(request, int(self._seeds.integers(2**31))),
            GenerateResponse,
            timeout_s=self._request_timeout_s,
            max_bytes=request.answer_bytes(16 * num_ids + 64 * request.sampling.num_top_logprobs),
        )
        return completion_of(answer, request, self.labels)

    async def abort(self, request_id: str) -> None:
        await self.http.send("/abort_request", AbortReq(rid=request_id), timeout_s=ABORT_S)
