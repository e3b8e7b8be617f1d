"""A vLLM server that runs elsewhere (`generator.vllm.url`): token ids in and out, weights by our
plug-in.

Its workers receive from the learner themselves, so StreamRL must be installed beside that vLLM, for
`actors.engines.vllm.plugin`. `actors.engines.vllm.engine` says what a recorded version means and
what happens to requests in flight at an update.

Invariant: a server that was not started as `serve_command` says is refused, with that command.
"""

import shlex
from functools import cached_property, partial

from actors.engines.completions import (
    candidates,
    completion,
    from_npy,
    most_asked,
    num_asked,
    recorded,
    sets_of,
)
from actors.engines.model import ModelFacts
from actors.engines.served.http import Names, RefusedError, retry_lost
from actors.engines.served.open import open_urls, require_length
from actors.engines.served.process import has_gpu
from actors.engines.served.server import (
    ABORT_S,
    LOAD_FOLDER_S,
    UNLABELED,
    Labels,
    ServedRequest,
    Server,
    versions_of,
)
from actors.engines.vllm.cpu import require_servable
from actors.engines.vllm.messages import (
    GenerateRequest,
    GenerateTokensChoice,
    GenerateTokensResponse,
    VllmSampling,
    WeightTransferUpdateRequest,
    WorldSize,
)
from actors.engines.vllm.weights import WeightLoader
from streamrl.config import RunConfig
from streamrl.config.addresses import address_towards, host_of, is_loopback
from streamrl.errors import ConfigError
from streamrl.interfaces import Engine
from streamrl.types import Completion


def wire_request(request: ServedRequest) -> GenerateRequest:
    return GenerateRequest(
        request_id=request.id,
        token_ids=list(request.prompt_token_ids),
        sampling_params=VllmSampling.of(request.sampling, request.stops),
        cache_salt=request.cache_salt,
    )


def completion_of(
    choice: GenerateTokensChoice, labels: Labels, request: ServedRequest
) -> Completion:
    sampling, sampled = request.sampling, choice.logprobs.content
    mask, top = sets_of(
        (
            candidates([c.token_id for c in found], [c.logprob for c in found])
            for found in (token.top_logprobs for token in sampled)
        ),
        sampling,
    )
    experts = None
    if sampling.keep_routed_experts:
        rows = None if choice.routed_experts is None else from_npy(choice.routed_experts)
        prompt, reason = request.prompt_token_ids, choice.finish_reason
        experts = recorded(rows, prompt, choice.token_ids, "vLLM", reason)
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
_RETRY_S = 5.0
GAUGES: Names = {
    "num_active": ("vllm:num_requests_running", ""),
    "num_waiting": ("vllm:num_requests_waiting", ""),
    "num_tokens": ("vllm:generation_tokens_total", ""),
    "kv_usage": ("vllm:kv_cache_usage_perc", ""),
    "num_preemptions": ("vllm:num_preemptions_total", ""),
}


def open_vllm(config: RunConfig, *, seed: int = 0, is_shared: bool = False) -> Engine:
    """Make an engine on the servers of `generator.vllm.url`, which have their own seed; raises as
    `open_urls` does."""
    settings = config.generator.vllm
    # A vLLM on this machine runs on the CPU if there is no GPU; of other machines nothing is known.
    if any(is_loopback(url) for url in settings.urls) and not has_gpu():
        require_servable(config, ModelFacts.of(config.model))
    return open_urls(config, partial(VllmServer, config), is_shared=is_shared)


class VllmServer(Server):
    """A server with vLLM's routes for tokens in and out, and for training: the methods of
    `actors.engines.vllm.weights.UpdateCalls`."""

    library, label_path, gauges = "vLLM", "/weight_info", GAUGES
    looks = ("http_requests_total", 'handler="/weight_info"')

    async def require_up(self) -> None:
        await self.http.text("/health")

    async def require_settings(self) -> None:
        await self.http.send("/init_weight_transfer_engine", {"init_info": {}})
        await require_length(self.http, self._config.max_model_len)
        wanted = self._config.generator.vllm.tensor_parallel_size
        num_workers = (await self.http.get("/get_world_size", WorldSize)).world_size
        if num_workers != wanted:
            raise ConfigError(
                f"generator.vllm.tensor_parallel_size: was {wanted}, but {self.http.url} has "
                f"{num_workers} workers"
            )

    async def take(self) -> None:
        await self.http.send("/pause?mode=abort", {})
        await self._name_weights(self.labels.taken)

    async def restore(self) -> None:
        await self.http.send("/pause?mode=abort", {})
        if await self.label() != UNLABELED:
            body = {"method": "reload_weights"}
            await self.http.send("/collective_rpc", body, timeout_s=LOAD_FOLDER_S)
        await self._name_weights(self.labels.label(0))

    async def _name_weights(self, label: str) -> None:
        """Label the weights and let sampling continue."""
        await self.http.send("/update_weight_version", {"new_version": label})
        await self.resume_generation()

    def refusal(self, error: RefusedError) -> ConfigError:
        return ConfigError(
            f"generator.vllm.url: the server at {self.http.url} was not started as it has to be "
            f"({error}); start it with\n  {serve_command(self._config)}"
        )

    @cached_property
    def updates(self) -> WeightLoader:
        return WeightLoader(
            self,
            self.require_up,
            self._config.generator.vllm,
            num_workers=self._config.generator.num_ranks,
            address=address_towards(host_of(self.http.url)),
            deadline_s=self._config.weights.deadline_s,
        )

    async def start_weight_update(self) -> None:
        """Start an update; first discard an update that some generator has left unfinished, if
        any."""
        try:
            await self.http.send("/start_weight_update", {})
        except RefusedError:
            # vLLM may close the connection after such an answer.
            discard = WeightTransferUpdateRequest({"attempt": 0})
            await retry_lost(lambda: self.update_weights(discard), _RETRY_S)
            await self.finish_weight_update()
            await self.http.send("/start_weight_update", {})

    async def update_weights(self, request: WeightTransferUpdateRequest) -> None:
        await self.http.send("/update_weights", request)

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        await self.http.send("/finish_weight_update", {"weight_version": weight_version})

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        path = f"/pause?mode={mode}&clear_cache={str(clear_cache).lower()}"
        # With mode wait, every request in flight ends first.
        await self.http.send(path, {}, timeout_s=self._request_timeout_s)

    async def resume_generation(self) -> None:
        await self.http.send("/resume", {})

    async def sample(self, request: ServedRequest) -> Completion:
        answer = await self.http.post(
            GENERATE,
            wire_request(request),
            GenerateTokensResponse,
            timeout_s=self._request_timeout_s,
            max_bytes=request.answer_bytes(2**7 * num_asked(request.sampling)),
        )
        return completion_of(answer.choices[0], self.labels, request)

    async def abort(self, request_id: str) -> None:
        ids = {"request_ids": [f"generate-tokens-{request_id}"]}
        await self.http.send("/inference/v1/abort_requests", ids, timeout_s=ABORT_S)


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
