"""The interface of the inference library behind a generator; weights reach it by
`Engine.load_weights`.

An engine is made by `actors.engines.make_engine`; `actors.episodes` and `actors.gateway` call it.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from streamrl.types import Completion, LoadReport, Media, SamplingParams, WeightUpdate


@dataclass(eq=False)
class CompletionHandle:
    """Shared by the caller of `Engine.generate` and the engine while a completion is sampled."""

    stop: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by the caller: end the completion with the tokens it has."""
    num_tokens: int = -1
    """Set by the engine: tokens sampled so far; stays -1 if it does not report them."""
    is_asked: bool = False
    """Set by the caller to ask for `sampled`; reset by the engine."""
    sampled: Completion | None = None
    """Set by the engine, if asked, at the next token: the unfinished completion, as
    `FinishReason.ABORT`. A request with the prompt and these tokens continues it."""


class Sampler(Protocol):
    """Token ids in, token ids out: the part of an engine that an episode needs."""

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        handle: CompletionHandle | None = None,
        media: Sequence[Media] = (),
    ) -> Completion:
        """One completion. Cancelling the call gives its slot back at the next token.

        `media` are the images and videos of the prompt, in the order of their places in it; the
        prompt holds a placeholder token for each token that the model reads of them.

        Once `handle.stop` is set, it ends at the next token, as `FinishReason.DEADLINE`, with what
        was sampled, which may be nothing. That holds for requests waiting for a slot, too.

        Raises:
            RolloutError: this request cannot be served; others are not affected.
        """
        ...


class Engine(Sampler, Protocol):
    """Every method may be called from the event loop at any time."""

    @property
    def policy_version(self) -> int:
        """The version that samples the next token."""
        ...

    @property
    def learner_id(self) -> str:
        """The learner that made this version, "" for the weights of the model's folder. Another
        learner may make a different version with the same number."""
        ...

    async def load_weights(self, update: WeightUpdate) -> LoadReport:
        """Receive and load an announced update between two tokens; requests in flight go on."""
        ...

    def gauges(self) -> Mapping[str, float]:
        """Readings: `num_active`, `num_waiting`; running totals: `num_tokens`, `pause_s`. Engines
        that know it add `kv_usage`, the share of the KV cache in use."""
        ...

    async def close(self) -> None:
        """Stop; requests in flight fail with RolloutError."""
        ...
