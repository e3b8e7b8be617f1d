"""An SGLang server, elsewhere (`generator.sglang.url`) or started for this engine.

A recorded version is that of the weights whose forward pass sampled the token, by SGLang's own
spans of labels (`actors.engines.sglang.relay` documents where they are one token off). Which
version the KV cache is of depends on `generator.sglang.pause_mode`:

    keep    requests in flight go on; the KV cache of their earlier tokens stays of the version that
            computed it, or, with recompute_kv, is computed again
    abort   requests in flight begin anew, so all of a completion is of one version

SGLang reports log-probabilities after temperature. With top-k or top-p, those of the truncated
distribution come with its sampling mask, which holds at most sampling_mask_max_tokens (4096)
candidates: top-p alone samples from the 4096 likeliest, and a larger top-k fails alone. With both,
top-p counts the probabilities of all tokens, where HF and vLLM count those that top-k has kept.
"""

import itertools
import math
from collections.abc import Callable, Mapping

import numpy as np

from actors.engines.served.http import Http
from actors.engines.served.metrics import Names, readings
from actors.engines.served.server import (
    ABORT_S,
    Check,
    Labels,
    Request,
    completion,
    versions_of,
)
from actors.engines.sglang.arguments import MASK_TOKENS, wire_request
from actors.engines.sglang.candidates import is_truncated, sets_of
from actors.engines.sglang.messages import AbortReq, GenerateResponse, ModelInfo
from actors.engines.sglang.relay import Relay
from streamrl.errors import RolloutError
from streamrl.types import Completion, WeightUpdate

GAUGES: Names = {
    "num_active": ("sglang:num_running_reqs", ""),
    "num_waiting": ("sglang:num_queue_reqs", ""),
    "num_tokens": ("sglang:realtime_tokens_total", 'mode="decode"'),
    "kv_usage": ("sglang:token_usage", ""),
}


class SglangServer:
    """Implements `actors.engines.served.server.Server`."""

    def __init__(
        self,
        http: Http,
        relay: Relay,
        labels: Labels,
        *,
        seed: int,
        is_deterministic: bool,
        request_timeout_s: float,
    ) -> None:
        self.name = f"SGLang at {http.url}"
        self._http = http
        self._relay = relay
        self.labels = labels
        self._is_deterministic = is_deterministic
        self._request_timeout_s = request_timeout_s
        self._seeds = (int(s) for s in _seeds(seed))

    async def sample(self, request: Request) -> Completion:
        if request.sampling.seed is not None and not self._is_deterministic:
            raise RolloutError(
                "SGLang uses a seed only with generator.sglang.enable_deterministic_inference"
            )
        body = wire_request(request, next(self._seeds))
        answer = await self._http.post(
            "/generate",
            body,
            GenerateResponse,
            timeout_s=self._request_timeout_s,
            max_bytes=_answer_bytes(request),
        )
        return completion_of(answer, request, self.labels)

    async def abort(self, request_id: str) -> None:
        await self._http.send("/abort_request", AbortReq(rid=request_id), timeout_s=ABORT_S)

    async def label(self) -> str:
        return (await self._http.get("/model_info", ModelInfo)).weight_version

    async def receive(self, update: WeightUpdate) -> None:
        await self._relay.receive(update)

    async def load(
        self, update: WeightUpdate, on_loaded: Callable[[], None], require_current: Check
    ) -> float:
        label = self.labels.label_of(update)
        return await self._relay.load(label, on_loaded, require_current)

    async def readings(self) -> Mapping[str, float]:
        return readings(await self._http.text("/metrics"), GAUGES)

    async def close(self) -> None:
        await self._relay.close()
        await self._http.close()


def completion_of(answer: GenerateResponse, request: Request, labels: Labels) -> Completion:
    meta, reason = answer.meta_info, answer.meta_info.finish_reason.type
    token_ids, repeated = answer.output_ids, [entry[1] for entry in meta.output_token_logprobs]
    if repeated != token_ids[: len(repeated)]:
        raise RolloutError("the answer is inconsistent: its log-probabilities are of other tokens")
    logprobs = [math.nan if entry[0] is None else entry[0] for entry in meta.output_token_logprobs]
    if is_truncated(request):
        logprobs = meta.output_token_sampling_logprobs or []
    if reason == "abort":
        # A request that is aborted in SGLang's queue, after a retraction, may come without some.
        token_ids = token_ids[: len(logprobs)]
    if not np.isfinite(logprobs).all():
        raise RolloutError("the answer is inconsistent: a log-probability is not finite")
    versions = versions_of(meta.weight_versions, len(token_ids), labels)
    first_stop = _first_stop(token_ids, request) if request.sampling.ignore_eos else None
    if first_stop is not None:
        end, reason = first_stop + 1, "stop"
        token_ids, logprobs, versions = token_ids[:end], logprobs[:end], versions[:end]
    mask = top = None
    if request.sampling.keep_sampling_mask or request.sampling.num_top_logprobs:
        mask, top = sets_of(meta, request, len(token_ids))
    return completion(token_ids, logprobs, versions, reason, sampling_mask=mask, top_logprobs=top)


def _answer_bytes(request: Request) -> int:
    """The longest answer, with room to spare: a truncated request's has the ids of all candidates
    of each token."""
    num_candidates = (request.sampling.top_k or MASK_TOKENS) if is_truncated(request) else 0
    num_candidates += 4 * request.sampling.num_top_logprobs
    return 2**20 + (2**10 + 16 * num_candidates) * request.max_new_tokens


def _first_stop(token_ids: list[int], request: Request) -> int | None:
    positions = range(request.min_new_tokens, len(token_ids))
    return next((i for i in positions if token_ids[i] in request.stops), None)


def _seeds(seed: int) -> "itertools.chain[int]":
    """Endless; requests without a seed of their own get different ones."""
    generator = np.random.default_rng(seed)
    draws = (generator.integers(0, 2**31, size=1024).tolist() for _ in itertools.count())
    return itertools.chain.from_iterable(draws)
