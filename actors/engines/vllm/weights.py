"""A weight update in vLLM: received while sampling goes on, loaded in a short pause.

Invariant: vLLM's label of the weights changes in the same pause as the weights, so each sampled
token gets the label of the version whose forward pass sampled it. The workers' side is
`actors.engines.vllm.worker_receiver`.
"""

import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Protocol

import msgspec
import zmq
import zmq.asyncio

from actors.engines.vllm.messages import WeightTransferUpdateRequest
from streamrl.config.generator import VllmSettings
from streamrl.curve import serve_with_new_key
from streamrl.errors import WeightTransferError
from streamrl.types import WeightUpdate

_CHECK_S = 1.0


class WorkerReport(msgspec.Struct, frozen=True):
    """The result of one attempt in one worker; `error` is empty if the update is complete."""

    attempt: int
    error: str = ""


class UpdateCalls(Protocol):
    """The calls that an update needs. vLLM's `AsyncLLM` has them; `VllmServer` makes them by
    HTTP."""

    async def start_weight_update(self) -> None: ...

    async def update_weights(self, request: Any) -> None: ...

    async def finish_weight_update(self, weight_version: str | None = None) -> None: ...

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None: ...

    async def resume_generation(self) -> None: ...


class WeightLoader:
    """Implements `actors.engines.served.server.ServerUpdates`.

    `require_alive` raises if vLLM has ended; `request` makes the argument of `update_weights` from
    an `update_info`; `address` is where vLLM's workers reach this machine with their reports.
    """

    def __init__(
        self,
        vllm: UpdateCalls,
        require_alive: Callable[[], Awaitable[object]],
        settings: VllmSettings,
        *,
        num_workers: int,
        request: Callable[[dict[str, Any]], object] = WeightTransferUpdateRequest,
        address: str = "127.0.0.1",
        deadline_s: float | None = None,
    ) -> None:
        self._vllm = vllm
        self._require_alive = require_alive
        self._num_workers = num_workers
        self._request = request
        self.settings = settings
        """Settings that say how to pause."""
        self._deadline_s = deadline_s
        self._attempt = 0
        self._reports = zmq.asyncio.Context.instance().socket(zmq.PULL)
        self._report_key = serve_with_new_key(self._reports)
        self._reports.bind(f"tcp://{address}:0")
        self._report_to = self._reports.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

    async def receive(self, update: WeightUpdate) -> None:
        """Receive an update into the workers' host memory. Waits for each worker's report, at most
        for the transfer's timeouts or the deadline."""
        self._attempt += 1
        await self._vllm.start_weight_update()
        encoded = msgspec.json.encode(update).decode()
        await self._update(update=encoded, report_to=self._report_to, report_key=self._report_key)
        until_s = time.monotonic() + self._deadline_s if self._deadline_s else None
        errors = [error for _ in range(self._num_workers) if (error := await self._report(until_s))]
        if errors:
            await self._update()
            await self._vllm.finish_weight_update()
            raise WeightTransferError(errors[0])

    async def load_in_pause(
        self,
        label: str,
        on_loaded: Callable[[], None],
        require_current: Callable[[], None] = lambda: None,
    ) -> float:
        start = time.perf_counter()
        mode = self.settings.pause_mode
        clear_cache = not self.settings.keeps_old_kv
        await self._vllm.pause_generation(mode=mode, clear_cache=clear_cache)
        if mode == "wait":
            start = time.perf_counter()
        require_current()
        await self._vllm.finish_weight_update(label)
        require_current()
        on_loaded()
        await self._vllm.resume_generation()
        return time.perf_counter() - start

    async def close(self) -> None:
        self._reports.close(linger=0)

    async def _update(self, **update: str) -> None:
        info = {"attempt": self._attempt, **update}
        await self._vllm.update_weights(self._request(info))

    async def _report(self, until_s: float | None) -> str:
        """The error in the next worker's report; "" for success. Waits for the report, vLLM's end
        or the deadline."""
        while True:
            if await self._reports.poll(_CHECK_S * 1000):
                # Others may also send to the port.
                with suppress(msgspec.MsgspecError, ValueError, RecursionError):
                    report = msgspec.json.decode(await self._reports.recv(), type=WorkerReport)
                    if report.attempt == self._attempt:
                        return report.error
                continue
            if until_s is not None and time.monotonic() > until_s:
                return (
                    f"no report from a vLLM worker in {self._deadline_s:g} s; it has to reach the "
                    f"learner, and this generator at {self._report_to}"
                )
            # A busy server answers late; the report may have come meanwhile.
            await self._require_alive()
