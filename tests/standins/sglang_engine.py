"""Stands in for SGLang's scheduler: the HF engine with pauses and labels.

As in SGLang, updates are loaded bucket by bucket into the weights in use, the prefix of a retracted
request is computed again, and a request that stays keeps its cache.
"""

import asyncio
import threading
from collections.abc import Iterable

import numpy as np
import torch

from actors.engines.hf.batch import HfRequest
from actors.engines.hf.engine import HfEngine
from streamrl.interfaces import CompletionHandle
from streamrl.types import Completion, FinishReason, SamplingParams, TokenSets, TopLogprobs


class StandInEngine(HfEngine):
    """`labels[i]` is the label of the weights at `policy_version` i."""

    def __init__(self, *arguments: object, **settings: object) -> None:
        super().__init__(*arguments, **settings)  # type: ignore[arg-type]
        self.labels = ["default"]
        self.is_paused = False
        self._go = threading.Event()
        self._retracts = False

    @property
    def has_requests(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def has_running(self) -> bool:
        running = any(not request.is_canceled for request in self._running)
        return running and not self._retracts

    def submit(
        self, prompt: list[int], sampling: SamplingParams, handle: CompletionHandle
    ) -> asyncio.Future[Completion]:
        request = HfRequest(tuple(prompt), sampling, handle)
        future: asyncio.Future[Completion] = self._loop.create_future()
        with self._wake:
            self._waiting.append((request, future))
            self._wake.notify()
        return future

    async def pause(self, *, retract: bool) -> None:
        """Waits until no token is being sampled."""
        if self.is_paused:
            return
        stopped, self._go, self._retracts = threading.Event(), threading.Event(), retract
        self.is_paused = True

        def hold() -> None:
            stopped.set()
            self._go.wait()
            if self._retracts:
                for request in self._running:
                    request.is_canceled = True
                self._answer(self._batch.leave())
                self._retracts = False

        with self._wake:
            self._commands.append(hold)
            self._wake.notify()
        await asyncio.to_thread(stopped.wait)

    def resume(self) -> None:
        self.is_paused = False
        self._go.set()

    def put(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            self._weights._active[name].data.copy_(tensor)

    def label(self, label: str) -> None:
        self.labels.append(label)
        self.policy_version = len(self.labels) - 1

    async def end(self) -> None:
        self.resume()
        await self.close()


def joined(first: Completion | None, rest: Completion) -> Completion:
    """One completion of two parts, the second one read after the first."""
    if first is None:
        return rest
    return Completion(
        token_ids=np.concatenate([first.token_ids, rest.token_ids]),
        logprobs=np.concatenate([first.logprobs, rest.logprobs]),
        policy_versions=np.concatenate([first.policy_versions, rest.policy_versions]),
        finish_reason=rest.finish_reason,
        sampling_mask=TokenSets.joined(
            [first.sampling_mask, rest.sampling_mask], [len(first.token_ids), len(rest.token_ids)]
        ),
        top_logprobs=TopLogprobs.joined(
            [first.top_logprobs, rest.top_logprobs], [len(first.token_ids), len(rest.token_ids)]
        ),
    )


def is_retracted(completion: Completion) -> bool:
    return completion.finish_reason == FinishReason.ABORT
