"""The seams: what a generator, a learner and the buffer ask of each other's plug-ins.

Protocols only, each of a handful of methods, so that a backend, an engine or an environment can be
written without reading the daemons. Whoever implements one of these keeps the promises written
here; `tests/contract` holds every implementation to them.

The buffer is two seams, because no caller needs both: `GeneratorBuffer` for those who fill it and
`LearnerBuffer` for the one who empties it. A backend implements both as `TrajectoryBuffer`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from streamrl.types import (
    Books,
    BufferStats,
    Completion,
    DropReason,
    FinishReason,
    GeneratorStatus,
    HeartbeatReply,
    Lease,
    LoadReport,
    Loan,
    SamplingParams,
    SchedulingState,
    TrajectoryGroup,
    WeightUpdate,
)


class GeneratorBuffer(Protocol):
    """The generators' side of the buffer. Every call may be repeated after a lost answer."""

    async def lease(
        self, lease_ids: Sequence[str], generator_id: str, wait_s: float
    ) -> tuple[Lease, ...]:
        """The right to generate one group for each of the first ids, as many as are admitted.

        Waits for one at least; () if admission stayed closed for `wait_s`. The caller chooses the
        ids; asking again with the same ones returns the same leases, and may add some. Where
        several generators report, one call grants at most this one's share of what is admitted.
        For a generator that is not active admission is closed.
        """
        ...

    async def put(self, lease_id: str, group: TrajectoryGroup) -> None:
        """Hand over the finished group; the lease is over.

        Raises:
            UnknownLeaseError: expired or never granted; the group is not taken in.
            DuplicateGroupError: another group was put under this lease.
            CorruptMessageError: the group breaks a rule of its type; it is quarantined.
        """
        ...

    async def release(self, lease_id: str, reason: DropReason) -> None:
        """Give the lease up. Whether its prompt is granted again depends on the reason."""
        ...

    async def heartbeat(self, status: GeneratorStatus) -> HeartbeatReply:
        """Report, and renew the leases named; a new session ends those of the old one, fenced then.

        Leaving fulfils an order to drain: the id is active when it comes back.
        """
        ...


class LearnerBuffer(Protocol):
    """The learner's side of the buffer; calls of a learner that another one replaced are fenced."""

    async def attach(self, policy_version: int, books: Books | None) -> BufferStats:
        """Become the learner, at this version. Groups its history does not contain come back.

        `books` restores the position in the prompt stream in a buffer that has lost it. Later calls
        raise FencedError once another learner has attached.
        """
        ...

    async def take(
        self,
        num_groups: int,
        policy_version: int,
        wait_s: float,
        *,
        with_payloads: bool = False,
    ) -> Loan:
        """The oldest groups, to be trained at `policy_version`; empty if too few in `wait_s`.

        Taking again for the same version returns the same loan.
        """
        ...

    async def fetch(self, prompt_indices: Sequence[int]) -> tuple[TrajectoryGroup, ...]:
        """The payloads of taken groups, in the order asked for; for one rank of several."""
        ...

    async def advance(self, policy_version: int) -> BufferStats:
        """The optimizer step that made this version has used the taken groups; what holds now."""
        ...

    async def acknowledge(self, policy_version: int) -> None:
        """A checkpoint of this version is durable; the groups it contains are freed."""
        ...

    async def finish(self) -> None:
        """The run has reached its end: no lease is granted any more, generators may go."""
        ...


class TrajectoryBuffer(GeneratorBuffer, LearnerBuffer, Protocol):
    """What every backend implements."""

    async def stats(self) -> BufferStats:
        """A reading of the books, the generator registry and the sizes."""
        ...

    async def drain(self) -> None:
        """No lease is granted but those that complete the last batch, so that the line empties.

        Lasts until a learner attaches or the buffer loses its memory; may be repeated.
        """
        ...

    async def set_scheduling_state(
        self, generator_id: str, scheduling_state: SchedulingState
    ) -> None:
        """Cordon a generator, have it drain, or make it active; lasts beyond its process.

        Raises:
            UnknownGeneratorError: nobody of this id reports.
        """
        ...

    async def close(self) -> None:
        """Let go of sockets and tasks; held leases stay held until they are released or expire."""
        ...


class Engine(Protocol):
    """Token ids in, token ids out. Every method may be called from the event loop at any time."""

    @property
    def policy_version(self) -> int:
        """The version that samples the next token."""
        ...

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: SamplingParams
    ) -> Completion:
        """One completion. Cancelling the call gives its slot back at the next token.

        Raises:
            RolloutError: this request cannot be served; others are not touched.
        """
        ...

    async def load_weights(self, update: WeightUpdate) -> LoadReport:
        """Receive and load an announced update between two tokens; requests in flight go on."""
        ...

    def gauges(self) -> Mapping[str, float]:
        """Readings: `num_active`, `num_waiting`; running totals: `num_tokens`, `pause_s`."""
        ...

    async def close(self) -> None:
        """Stop; requests in flight fail with RolloutError."""
        ...


@dataclass(frozen=True)
class Prompt:
    """One row of the prompt stream: a string or chat messages, and what its reward may need."""

    content: str | tuple[Mapping[str, str], ...]
    answer: str
    row: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Transition:
    """What an environment answers to a completion: tokens to read before the next turn, or the end.

    `num_tool_calls` are those the completion made.
    """

    observation: tuple[int, ...] = ()
    done: bool = True
    num_tool_calls: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Episode:
    """One finished run of an environment, as a reward sees it; `response` is the decoded text."""

    prompt: Prompt
    response: str
    num_response_tokens: int
    finish_reason: FinishReason
    metrics: Mapping[str, float] = field(default_factory=dict)


class PromptSource(Protocol):
    """The prompt stream: a pure function of the prompt, so no position need be stored."""

    def __getitem__(self, prompt_index: int) -> Prompt: ...


class Reward(Protocol):
    """Scores the siblings of one prompt together, so that it may compare them."""

    async def score(self, episodes: Sequence[Episode]) -> Sequence[float]:
        """One finite number per episode, in order.

        Raises:
            RolloutError: the group cannot be scored; it is dropped and counted.
        """
        ...


class TextCodec(Protocol):
    """From text to token ids and back, as the run's tokenizer does it."""

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Token ids of the text as it stands, without a chat template or special tokens."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a completion, without special tokens."""
        ...


@dataclass(frozen=True)
class EnvironmentContext:
    """What an episode starts from."""

    prompt: Prompt
    prompt_token_ids: tuple[int, ...]
    """The prompt as the chat template renders it."""
    codec: TextCodec


class Environment(Protocol):
    """One episode; used once."""

    async def start(self, context: EnvironmentContext) -> tuple[int, ...]:
        """The first observation, as token ids; usually `context.prompt_token_ids`."""
        ...

    async def step(self, completion: Completion) -> Transition:
        """The world's answer to one completion."""
        ...


class Tracker(Protocol):
    """A place where metrics go."""

    def log(self, metrics: Mapping[str, Any], step: int) -> None: ...

    def close(self) -> None: ...
