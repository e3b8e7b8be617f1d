"""The interface of an inference server to `actors.engines.served.engine`, and its records.

A new kind implements `Server` in a folder of its own; see `actors.engines.sglang`.
"""

import hashlib
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Annotated, ClassVar, Protocol, TypeAlias

import numpy as np
from msgspec import Meta, Struct

from actors.engines.served.http import Http, Names, RefusedError, readings
from streamrl.config import RunConfig
from streamrl.errors import ConfigError, RolloutError
from streamrl.types import Completion, Int32Array, SamplingParams, WeightUpdate

ABORT_S = 10.0
"""How long a server may take to confirm an abort."""
UNLABELED = "default"
"""The label that both vLLM and SGLang give to the weights they started with."""
LOAD_FOLDER_S = 600.0
"""How long reloading the model's folder may take."""
_ANSWER_S = 60.0
_VERSION = re.compile("[0-9]{1,9}")
_RUN = "run-"


class ForeignWeightsError(RolloutError):
    """A reply carries a label of weights that this engine did not load."""


Check: TypeAlias = Callable[[], None]
# The most tokens in a sequence; numbers are 32 bits wide.
Position = Annotated[int, Meta(ge=0, lt=2**31)]
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]


class Labels(Struct, frozen=True):
    """The server's labels of its weights: OWNER/LEARNER/VERSION, where the owner is a run, whose
    generators share the server, or one engine object; OWNER/ labels a server that the owner has
    taken and not yet loaded weights into."""

    owner: str

    @classmethod
    def new(cls) -> "Labels":
        """Labels of one engine object."""
        return cls(uuid.uuid4().hex[:12])

    @classmethod
    def of_run(cls, facts: str) -> "Labels":
        """Labels of the run with these facts, which differ between runs."""
        return cls(_RUN + hashlib.sha256(facts.encode()).hexdigest()[:12])

    @property
    def is_shared(self) -> bool:
        """Whether other generators may also load weights under these labels."""
        return self.owner.startswith(_RUN)

    @property
    def taken(self) -> str:
        return f"{self.owner}/"

    def label(self, policy_version: int, learner_id: str = "") -> str:
        return f"{self.owner}/{learner_id}/{policy_version}"

    def label_of(self, update: WeightUpdate) -> str:
        return self.label(update.policy_version, update.learner_id)

    def is_own(self, label: str) -> bool:
        """Whether the owner has loaded the weights, or taken the server."""
        return label == self.taken or self._version(label) is not None

    def version(self, label: str) -> int:
        """The version in a label.

        Raises:
            ForeignWeightsError: the owner did not load the weights.
        """
        version = self._version(label)
        if version is None:
            raise ForeignWeightsError(
                f"the inference server samples with weights called {label[:100]!r}, which this "
                "generator did not give it"
            )
        return version

    def _version(self, label: str) -> int | None:
        owner, _, rest = label.partition("/")
        version = rest.partition("/")[2]
        return int(version) if owner == self.owner and _VERSION.fullmatch(version) else None


class AnyLabels(Labels, frozen=True):
    """Accepts any label: for a first token, sampled before the weights have their owner's label."""

    def version(self, label: str) -> int:
        return 0


def is_of_a_run(label: str) -> bool:
    """Whether generators of some run have given the server this label."""
    return label.startswith(_RUN)


class ServedRequest(Struct, frozen=True, kw_only=True):
    """A request for one completion.

    `id` is not a prefix of another request's (SGLang aborts by prefix). `stops` end the completion
    and contain the end-of-sequence tokens unless those are ignored. Only requests with the same
    `cache_salt` share prompt prefixes. `expert_shape` is the number of decoder layers and of a
    token's experts in each; (0, 0) if not asked for.
    """

    id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    stops: frozenset[int]
    cache_salt: str
    expert_shape: tuple[int, int] = (0, 0)

    def answer_bytes(self, candidate_bytes: int) -> int:
        """The longest possible answer, with room to spare, if each token's candidates take this
        many bytes."""
        num_new = self.sampling.max_new_tokens
        # Base64 of numbers of four bytes.
        of_experts = 8 * prod(self.expert_shape) * (len(self.prompt_token_ids) + num_new)
        return 2**20 + (2**10 + candidate_bytes) * num_new + of_experts


class VersionSpan(Struct, frozen=True):
    """Output tokens [start, end) were sampled under the label `version`."""

    version: str
    start: Position
    end: Position


class ServerUpdates(Protocol):
    """Changes the weights of a server, one update at a time."""

    async def receive(self, update: WeightUpdate) -> None:
        """Bring the update to where `load_in_pause` finds it, while sampling goes on.

        Raises:
            WeightTransferError, RefusedError, ConnectionLostError: it did not arrive; the server's
                weights are unchanged.
        """
        ...

    async def load_in_pause(
        self, label: str, on_loaded: Callable[[], None], require_current: Check
    ) -> float:
        """Load what was received, under this label; returns the seconds in which nothing was
        sampled.

        `on_loaded` is called before sampling resumes, `require_current` before each step that
        changes the server; it raises if another generator may be loading there. After an error
        other than WeightTransferError the server stays paused, since its weights may be partly old
        and partly new.
        """
        ...

    async def close(self) -> None:
        """Close whatever receives updates."""
        ...


class Labeled(Struct, frozen=True):
    weight_version: str


class Server(ABC):
    """One server, for a run with `config`. Once `actors.engines.served.open` has attached it, it
    has the model folder's weights or, with `labels.is_shared`, weights from this or another
    generator of the run.
    """

    library: ClassVar[str]
    label_path: ClassVar[str]
    """The path at which it answers with its label."""
    gauges: ClassVar[Names]
    looks: ClassVar[tuple[str, str]]
    """The gauge, as in `Names`, that counts requests for the label."""

    def __init__(self, config: RunConfig, url: str, labels: Labels) -> None:
        self.http = Http(url, api_key=config.generator.served.api_key)
        self.name = f"{self.library} at {self.http.url}"
        self.labels = labels
        self._config = config
        # An episode's deadline ends its request earlier, unless the server does not answer.
        self._request_timeout_s = config.generator.group_deadline_s + _ANSWER_S

    # Starting. All of these may raise RefusedError or TransportError, if a request fails.

    @abstractmethod
    async def require_up(self) -> None:
        """Return if the server takes requests; raise if not."""

    @abstractmethod
    async def require_settings(self) -> None:
        """
        Raises:
            ConfigError: the server was not started as the configuration needs it.
        """

    @abstractmethod
    async def take(self) -> None:
        """Label the server as taken; it samples afterwards, whatever state it was left in."""

    @abstractmethod
    async def restore(self) -> None:
        """Load the model folder's weights, whatever an earlier generator loaded, and label them as
        version 0."""

    @abstractmethod
    def refusal(self, error: RefusedError) -> ConfigError:
        """The error to raise if a server refuses one of these requests."""

    async def num_looks(self) -> float:
        """How often its label has been asked for."""
        return readings(await self.http.text("/metrics"), {"looks": self.looks})["looks"]

    # For an attached server.

    @property
    @abstractmethod
    def updates(self) -> ServerUpdates:
        """The object that brings the learner's updates into the server; made for the calling
        engine, in its event loop."""

    @abstractmethod
    async def sample(self, request: ServedRequest) -> Completion:
        """Sample a completion; if an update or `abort` ends it, it has `FinishReason.ABORT` and
        what was sampled.

        Raises:
            RolloutError, RefusedError, SlowAnswerError: only this request fails.
            BusyError, ConnectionLostError: the request may be sent again, under another id.
            ForeignWeightsError: the reply comes from weights that this engine did not load.
        """

    @abstractmethod
    async def abort(self, request_id: str) -> None:
        """End the request, if the server has it; `sample` gets the answer."""

    async def label(self) -> str:
        """The server's label of its weights."""
        return (await self.http.get(self.label_path, Labeled)).weight_version

    async def readings(self) -> Mapping[str, float]:
        """`num_active`, `num_waiting`, `num_tokens` and further gauges of the server."""
        return readings(await self.http.text("/metrics"), self.gauges)

    async def close(self) -> None:
        """Closes the connections to the server."""
        if "updates" in vars(self):
            await self.updates.close()
        await self.http.close()


def versions_of(spans: Iterable[VersionSpan], num_tokens: int, labels: Labels) -> Int32Array:
    """The version that sampled each token [num_tokens].

    Raises:
        RolloutError: the spans leave a token out, or contain it twice.
        ForeignWeightsError: a token was sampled by weights that this engine did not load.
    """
    versions, done = np.full(num_tokens, -1, dtype=np.int32), 0
    for span in spans:
        if not done <= span.start <= span.end:
            raise RolloutError(
                f"the answer's spans of weights overlap: [{span.start}, {span.end}) after {done}"
            )
        versions[span.start : span.end] = labels.version(span.version)
        done = span.end
    if (versions < 0).any():
        raise RolloutError("the answer leaves out which weights sampled a token")
    return versions


def require_sound(
    answer: Completion, request: ServedRequest, *, vocab_size: int, newest_version: int
) -> None:
    """
    Raises:
        RolloutError: it is not an answer to this request.
    """
    num_tokens, most = len(answer.token_ids), request.sampling.max_new_tokens
    if num_tokens > most:
        raise RolloutError(f"the answer has {num_tokens} tokens, and at most {most} were asked for")
    sets = [one for one in (answer.sampling_mask, answer.top_logprobs) if one is not None]
    named = [("token id", answer.token_ids), *(("candidate", one.token_ids) for one in sets)]
    for name, ids in named:
        if len(ids) and (highest := ids.max()) >= vocab_size:
            raise RolloutError(
                f"the answer has {name} {highest}; the model's vocabulary has {vocab_size}"
            )
    newest = int(answer.policy_versions.max(initial=-1))
    if newest > newest_version:
        raise RolloutError(
            f"the answer names version {newest}, and {newest_version} is the newest that was sent"
        )
