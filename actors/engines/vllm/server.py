"""A vLLM that runs elsewhere (`generator.vllm.url`): token ids in and out, weights by our plug-in.

Its workers receive from the learner themselves, so StreamRL is installed beside that vLLM: its
entry point brings the weight-transfer backend `streamrl` (`actors.engines.vllm.plugin`). For what a
recorded version means, and for requests in flight at an update, see `actors.engines.vllm.engine`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from actors.engines.candidates import num_asked
from actors.engines.served.http import Http, RefusedError, retry_lost
from actors.engines.served.metrics import Names, readings
from actors.engines.served.server import ABORT_S, Check, Labels, Request
from actors.engines.vllm.messages import (
    GenerateTokensResponse,
    WeightInfo,
    completion_of,
    wire_request,
)
from actors.engines.vllm.weights import WeightLoader
from streamrl.types import Completion, WeightUpdate

GENERATE = "/inference/v1/generate"
# Of an answer, beside its tokens, for each of them and for each of its candidates; with room to
# spare.
_ANSWER_BYTES, _TOKEN_BYTES, _CANDIDATE_BYTES = 2**20, 2**10, 2**7
_RETRY_S = 5.0
GAUGES: Names = {
    "num_active": ("vllm:num_requests_running", ""),
    "num_waiting": ("vllm:num_requests_waiting", ""),
    "num_tokens": ("vllm:generation_tokens_total", ""),
    "kv_usage": ("vllm:kv_cache_usage_perc", ""),
    "num_preemptions": ("vllm:num_preemptions_total", ""),
}


class VllmServer:
    """Implements `actors.engines.served.server.Server`."""

    def __init__(
        self, http: Http, loader: WeightLoader, labels: Labels, *, request_timeout_s: float
    ) -> None:
        self.name = f"vLLM at {http.url}"
        self._http = http
        self._loader = loader
        self.labels = labels
        self._request_timeout_s = request_timeout_s

    async def sample(self, request: Request) -> Completion:
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

    async def label(self) -> str:
        return (await self._http.get("/weight_info", WeightInfo)).weight_version

    async def receive(self, update: WeightUpdate) -> None:
        await self._loader.receive(update)

    async def load(
        self, update: WeightUpdate, on_loaded: Callable[[], None], require_current: Check
    ) -> float:
        label = self.labels.label_of(update)
        return await self._loader.load(label, on_loaded, require_current)

    async def readings(self) -> Mapping[str, float]:
        return readings(await self._http.text("/metrics"), GAUGES)

    async def close(self) -> None:
        self._loader.close()
        await self._http.close()


def _answer_bytes(request: Request) -> int:
    per_token = _TOKEN_BYTES + _CANDIDATE_BYTES * num_asked(request.sampling)
    return _ANSWER_BYTES + per_token * request.max_new_tokens


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
