"""What `actors.engines.served.engine` asks of a kind of inference server, and the words it uses.

A new kind implements `Server` in its own folder; see `actors.engines.sglang.server`.
"""

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np
from msgspec import Struct

from streamrl.errors import RolloutError, TransportError
from streamrl.types import (
    Completion,
    FinishReason,
    Int32Array,
    SamplingParams,
    WeightUpdate,
)

UNLABELED = "default"
"""What both vLLM and SGLang call the weights they started with."""


class Labels(Struct, frozen=True):
    """What the server's weights are called: OWNER/VERSION, where the owner is one engine's life.

    So weights that a server started with, or got from another generator, never pass for ours.
    """

    owner: str

    @classmethod
    def new(cls) -> "Labels":
        return cls(uuid.uuid4().hex[:12])

    def label(self, policy_version: int) -> str:
        return f"{self.owner}/{policy_version}"

    def version(self, label: str) -> int:
        """The version of a label.

        Raises:
            TransportError: the weights are not ours.
        """
        owner, _, version = label.partition("/")
        if owner != self.owner or not version.isdigit():
            raise TransportError(
                f"the inference server samples with weights called {label!r}, which this generator "
                "did not give it: the server was started again, or serves two generators"
            )
        return int(version)


class Request(Struct, frozen=True, kw_only=True):
    """One completion to ask for, with what the engine has decided already.

    `id` is not a prefix of any other (SGLang aborts by prefix). `stops` end the completion,
    end-of-sequence tokens among them unless they are to be ignored. Prefixes of the prompt are
    shared among requests of one `cache_salt` only.
    """

    id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    max_new_tokens: int
    stops: frozenset[int]
    cache_salt: str

    @property
    def min_new_tokens(self) -> int:
        return min(self.sampling.min_new_tokens, self.max_new_tokens)


class VersionSpan(Struct, frozen=True):
    """Output tokens [start, end) were sampled under the label `version`."""

    version: str
    start: int
    end: int


class Server(Protocol):
    """A server that is up, checked, and holds the weights of the model's folder."""

    async def sample(self, request: Request) -> Completion | None:
        """The completion, or None if the server gave the request up (an update, an abort).

        Raises:
            RolloutError: the server refuses this request.
            ConnectionLostError: it may be asked again, under another id.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """Give the request's slot back. Nobody waits for its answer any more."""
        ...

    async def receive(self, update: WeightUpdate) -> None:
        """Get the update to where `load` finds it, while sampling goes on.

        Raises:
            WeightTransferError: it did not arrive; the server's weights are as they were.
        """
        ...

    async def load(self, policy_version: int, on_loaded: Callable[[], None]) -> float:
        """Load what was received; the seconds in which nothing was sampled.

        `on_loaded` is called before sampling goes on. An error in here leaves the server paused:
        its weights may be half old, half new.
        """
        ...

    async def readings(self) -> Mapping[str, float]:
        """`num_active`, `num_waiting`, `num_tokens` and what else the server counts.

        Raises:
            TransportError: the server is gone.
        """
        ...

    async def close(self) -> None:
        """Let go of the server; one that was started for this engine ends."""
        ...


def completion(
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    policy_versions: Int32Array,
    finish_reason: str,
) -> Completion:
    """The record of an answer.

    Raises:
        RolloutError: its parts don't fit together.
    """
    try:
        return Completion(
            token_ids=np.array(token_ids, dtype=np.int32),
            logprobs=np.array(logprobs, dtype=np.float32),
            policy_versions=policy_versions,
            finish_reason=FinishReason(finish_reason),
        )
    except (TypeError, ValueError) as error:
        raise RolloutError(f"the inference server's answer makes no sense: {error}") from error


def versions_of(spans: Iterable[VersionSpan], num_tokens: int, labels: Labels) -> Int32Array:
    """The version that sampled each token [num_tokens].

    Raises:
        RolloutError: the spans leave a token out.
        TransportError: a token was sampled by weights that are not ours.
    """
    versions = np.full(num_tokens, -1, dtype=np.int32)
    for span in spans:
        versions[span.start : span.end] = labels.version(span.version)
    if (versions < 0).any():
        raise RolloutError("the server's answer does not say which weights sampled every token")
    return versions
