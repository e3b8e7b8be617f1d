"""The interface of an inference server to `actors.engines.served.engine`, and its records.

A new kind implements `Server`, and `actors.engines.served.start.ServerKind` for its start, in a
folder of its own; see `actors.engines.sglang`.
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
"""The label that both vLLM and SGLang give the weights they started with."""


class Labels(Struct, frozen=True):
    """The server's labels of its weights: OWNER/VERSION, where the owner is one engine object.

    Weights that a server started with, or got from another generator, have another owner.
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
            TransportError: this engine did not load the weights.
        """
        owner, _, version = label.partition("/")
        if owner != self.owner or not version.isdigit():
            raise TransportError(
                f"the inference server samples with weights called {label!r}, which this generator "
                "did not give it: the server was started again, or serves two generators"
            )
        return int(version)


class Request(Struct, frozen=True, kw_only=True):
    """A request for one completion.

    `id` is not a prefix of another one's (SGLang aborts by prefix). `stops` end the completion and
    contain the end-of-sequence tokens unless these are ignored. Only requests of one `cache_salt`
    share prefixes of their prompts.
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

    name: str
    """The library's name, for messages."""

    async def sample(self, request: Request) -> Completion:
        """The completion; `FinishReason.ABORT` with what was sampled, if an update or `abort` has
        ended it.

        Raises:
            RolloutError, RefusedError, SlowAnswerError: this request fails alone.
            ConnectionLostError: the request may be sent again, under another id.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """Ends the request, if the server has it; `sample` gets the answer."""
        ...

    async def receive(self, update: WeightUpdate) -> None:
        """Gets the update to where `load` finds it, while sampling goes on.

        Raises:
            WeightTransferError, RefusedError, ConnectionLostError: it did not arrive; the server's
                weights are unchanged.
        """
        ...

    async def load(self, policy_version: int, on_loaded: Callable[[], None]) -> float:
        """Loads what was received; returns the seconds in which nothing was sampled.

        `on_loaded` is called before sampling goes on. After an error other than
        WeightTransferError the server stays paused: its weights may be partly old, partly new.
        """
        ...

    async def readings(self) -> Mapping[str, float]:
        """`num_active`, `num_waiting`, `num_tokens` and further gauges of the server."""
        ...

    async def close(self) -> None:
        """Closes the connections to the server."""
        ...


def completion(
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    policy_versions: Int32Array,
    finish_reason: str,
) -> Completion:
    """The record of an answer.

    Raises:
        RolloutError: its fields are inconsistent.
    """
    try:
        return Completion(
            token_ids=np.array(token_ids, dtype=np.int32),
            logprobs=np.array(logprobs, dtype=np.float32),
            policy_versions=policy_versions,
            finish_reason=FinishReason(finish_reason),
        )
    except (TypeError, ValueError) as error:
        raise RolloutError(f"the inference server's answer is inconsistent: {error}") from error


def versions_of(spans: Iterable[VersionSpan], num_tokens: int, labels: Labels) -> Int32Array:
    """The version that sampled each token [num_tokens].

    Raises:
        RolloutError: the spans leave a token out.
        TransportError: a token was sampled by weights that this engine did not load.
    """
    versions = np.full(num_tokens, -1, dtype=np.int32)
    for span in spans:
        versions[span.start : span.end] = labels.version(span.version)
    if (versions < 0).any():
        raise RolloutError("the server's answer leaves out which weights sampled a token")
    return versions
