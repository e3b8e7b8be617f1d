"""A vLLM that runs elsewhere (`generator.vllm.url`): tokens in, tokens out, weights by our plug-in.

Its workers receive from the learner themselves, so StreamRL has to be installed beside that vLLM:
its entry point brings the weight-transfer backend `streamrl`. What a recorded version means and
what becomes of requests in flight is as in `actors.engines.vllm.engine`: the same vLLM, by HTTP.
Opened by `actors.engines.vllm.served_start`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from actors.engines.served.http import (
    ConnectionLostError,
    Http,
    RefusedError,
    SlowAnswerError,
)
from actors.engines.served.metrics import Names, readings
from actors.engines.served.server import Labels, Request
from actors.engines.vllm.messages import GenerateTokensResponse, completion_of, wire_request
from actors.engines.vllm.weights import WeightLoader
from streamrl.errors import RolloutError, TransportError, WeightTransferError
from streamrl.types import Completion, WeightUpdate

GENERATE = "/inference/v1/generate"
GAUGES: Names = {
    "num_active": ("vllm:num_requests_running", ""),
    "num_waiting": ("vllm:num_requests_waiting", ""),
    "num_tokens": ("vllm:generation_tokens_total", ""),
    "kv_usage": ("vllm:kv_cache_usage_perc", ""),
    "num_preemptions": ("vllm:num_preemptions_total", ""),
}


class VllmServer:
    """Implements `actors.engines.served.server.Server`."""

    def __init__(self, http: Http, loader: WeightLoader, labels: Labels, request_s: float) -> None:
        self._http = http
        self._loader = loader
        self._labels = labels
        self._request_s = request_s

    async def sample(self, request: Request) -> Completion | None:
        try:
            answer = await self._http.post(
                GENERATE,
                wire_request(request),
                GenerateTokensResponse,
                timeout_s=self._request_s,
            )
        except (RefusedError, SlowAnswerError) as error:
            raise RolloutError(f"vLLM refused a request: {error}") from error
        return completion_of(answer.choices[0], self._labels)

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
