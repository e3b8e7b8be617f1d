"""An update's way through vLLM: received while sampling goes on, loaded in a short pause.

Invariant: vLLM's label of the weights changes in the same pause as the weights, so the label vLLM
gives each sampled token is the version whose forward pass produced it. Owned by
`actors.engines.vllm.engine`; the workers' end is `actors.engines.vllm.receiver`.
"""

import time
from collections.abc import Callable

import msgspec
import zmq
import zmq.asyncio
from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from actors.engines.vllm.receiver import Report, UpdateInfo
from streamrl.config.vllm import VllmSettings
from streamrl.errors import WeightTransferError
from streamrl.types import WeightUpdate

_CHECK_S = 1.0


class WeightLoader:
    """One update at a time, from announcement to resumed sampling."""

    def __init__(self, llm: AsyncLLM, settings: VllmSettings) -> None:
        self._llm = llm
        self.configure(settings)
        self._num_workers = settings.tensor_parallel_size
        self._attempt = 0
        self._reports = zmq.asyncio.Context.instance().socket(zmq.PULL)
        port = self._reports.bind_to_random_port("tcp://127.0.0.1")
        self._report_to = f"tcp://127.0.0.1:{port}"

    def configure(self, settings: VllmSettings) -> None:
        """How to pause."""
        self._mode = settings.pause_mode
        # What an engine without requests in flight holds is of no use to the new weights.
        self._clear_cache = settings.recompute_kv or settings.pause_mode != "keep"

    async def receive(self, update: WeightUpdate) -> None:
        """Into the workers' host memory. Waits for each worker's report, which the transfer's
        timeouts bring about.

        Raises:
            WeightTransferError: a worker did not get it all; the weights are as they were.
        """
        self._attempt += 1
        await self._llm.start_weight_update()
        encoded = msgspec.json.encode(update).decode()
        await self._tell(UpdateInfo(self._attempt, encoded, self._report_to))
        errors = [error for _ in range(self._num_workers) if (error := await self._report())]
        if errors:
            await self._tell(UpdateInfo(self._attempt))
            await self._llm.finish_weight_update()
            raise WeightTransferError(errors[0])

    async def load(self, policy_version: int, on_loaded: Callable[[], None]) -> float:
        """Load what was received; the seconds in which nothing was sampled.

        `on_loaded` is called while vLLM is still paused. An error in here leaves it paused: its
        weights may be half old, half new.
        """
        start = time.perf_counter()
        await self._llm.pause_generation(mode=self._mode, clear_cache=self._clear_cache)
        if self._mode == "wait":
            start = time.perf_counter()
        await self._llm.finish_weight_update(weight_version=str(policy_version))
        on_loaded()
        await self._llm.resume_generation()
        return time.perf_counter() - start

    def close(self) -> None:
        self._reports.close(linger=0)

    async def _tell(self, info: UpdateInfo) -> None:
        await self._llm.update_weights(WeightTransferUpdateRequest(update_info=vars(info)))

    async def _report(self) -> str:
        """The next worker's report on this attempt. Waits for it or for the engine's death."""
        while True:
            if not await self._reports.poll(_CHECK_S * 1000):
                if self._llm.errored:
                    raise EngineDeadError
                continue
            report = msgspec.json.decode(await self._reports.recv(), type=Report)
            if report.attempt == self._attempt:
                return report.error
