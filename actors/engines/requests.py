"""Requests in flight: canceling, stopping one early, and why one ended."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

import numpy as np
from msgspec import structs

from actors.concurrency import end_all
from streamrl.errors import RolloutError
from streamrl.types import Completion, FinishReason, SamplingParams

T = TypeVar("T")
_ABORT_EVERY_S = 1.0
_REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    # The reason for vLLM's limit on repeated patterns, if a user sets it.
    "repetition": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
}


class InFlightRequests(Generic[T]):
    """Each is a task, so that closing an engine ends all of them. `run` returns the request's
    result, raises its error or, after `cancel_all`, that of `raise_if_over`."""

    def __init__(self, raise_if_over: Callable[[], None]) -> None:
        self._raise_if_over = raise_if_over
        self._tasks: set[asyncio.Task[T]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    async def run(self, request: Coroutine[Any, Any, T]) -> T:
        """Canceling the caller cancels the request."""
        task = asyncio.create_task(request)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            return await task
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if not (caller and caller.cancelling()):
                self._raise_if_over()
            raise

    async def cancel_all(self) -> None:
        """Cancels every request. Waits until all have ended."""
        await end_all(self._tasks)


@asynccontextmanager
async def slot_or_stop(slots: asyncio.Semaphore, stop: asyncio.Event) -> AsyncIterator[bool]:
    """Take a slot for the block; false if `stop` was set before one was free. Waits for either."""
    acquiring = asyncio.create_task(slots.acquire())
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([acquiring, stopping], return_when=asyncio.FIRST_COMPLETED)
        yield acquiring.done()
    finally:
        stopping.cancel()
        if acquiring.done():
            slots.release()
        else:
            acquiring.cancel()


@asynccontextmanager
async def aborted_on(
    stop: asyncio.Event, abort: Callable[[], Awaitable[None]]
) -> AsyncIterator[None]:
    """Call `abort` when `stop` is set, again and again until the block ends: an engine ignores an
    abort that arrives before its request."""

    async def repeat() -> None:
        await stop.wait()
        while True:
            await abort()
            await asyncio.sleep(_ABORT_EVERY_S)

    task = asyncio.create_task(repeat())
    try:
        yield
    finally:
        task.cancel()


def finish_reason(name: str | None) -> FinishReason:
    """Our finish reason for an engine's name of it.

    Raises:
        RolloutError: the engine failed, or gives an unknown reason.
    """
    reason = _REASONS.get(name or "")
    if reason is None:
        raise RolloutError(f"the engine ended a request for the reason {str(name)[:40]!r}")
    return reason


def stops_of(sampling: SamplingParams, eos: frozenset[int]) -> frozenset[int]:
    return frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else eos)


async def answered(
    send: Callable[[], Awaitable[Completion]], sampling: SamplingParams, stop: asyncio.Event
) -> Completion:
    """Send a request until it is answered: with pause_mode abort, an update makes requests in
    flight start again. A stopped request is answered with what was sampled."""
    while not stop.is_set():
        answer = await send()
        if answer.finish_reason is not FinishReason.ABORT:
            return answer
        # Tokens without their experts cannot be replayed.
        is_whole = answer.routed_experts is not None or not sampling.keep_routed_experts
        if stop.is_set() and is_whole:
            return structs.replace(answer, finish_reason=FinishReason.DEADLINE)
    return nothing_sampled()


def nothing_sampled(reason: FinishReason = FinishReason.DEADLINE) -> Completion:
    """The answer to a request stopped before its first token."""
    return Completion(
        token_ids=np.zeros(0, np.int32),
        logprobs=np.zeros(0, np.float32),
        policy_versions=np.zeros(0, np.int32),
        finish_reason=reason,
    )
