"""The interfaces between the daemons and their backends, engines and other plug-ins.

Protocols only, each of a few methods, so that a backend, an engine or an environment can be written
without reading the daemons. An implementation keeps the promises stated here; `tests/contract`
tests every implementation for them.

The buffer has two interfaces, because no caller needs both: `GeneratorBuffer` for the generators,
`LearnerBuffer` for the learner. A backend implements both as `TrajectoryBuffer`.
"""

import asyncio
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
    """The generators' side of the buffer. Every call may be repeated after a lost reply."""

    async def lease(
        self, lease_ids: Sequence[str], generator_id: str, wait_s: float
    ) -> tuple[Lease, ...]:
        """Leases with these ids, each the right to generate one group: as many as are admitted.

        Waits until one is admitted; () if none is within `wait_s`. The caller chooses the ids; a
        repeated call with the same ids returns the same leases, and may add some. Where several
        generators report, a call grants at most this one's share of what is admitted, rounded up.
        A generator that is not active is granted no new lease.
        """
        ...

    async def put(self, lease_id: str, group: TrajectoryGroup) -> None:
        """Store the finished group, which ends the lease.

        Raises:
            UnknownLeaseError: expired or never granted; the group is not stored.
            DuplicateGroupError: another group was put under this lease.
            CorruptMessageError: the group breaks a rule of its type; it is quarantined.
        """
        ...

    async def release(self, lease_id: str, reason: DropReason) -> None:
        """End the lease without a group; the reason decides if its prompt is granted again."""
        ...

    async def heartbeat(self, status: GeneratorStatus) -> HeartbeatReply:
        """Report a status, and renew the leases in it.

        The first report of a new session ends the leases of the old one, which is fenced from then
        on. A draining generator that leaves is active when it returns.
        """
        ...


class LearnerBuffer(Protocol):
    """The learner's side of the buffer; calls of a learner that was replaced are fenced."""

    async def attach(self, policy_version: int, books: Books | None) -> BufferStats:
        """Become the learner, at this version; groups trained later are buffered again.

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
        num_held: int | None = None,
    ) -> Loan:
        """A loan of the oldest groups, to be trained at `policy_version`.

        Waits until there are `num_groups` and, under `buffer.overdue: wait`, those that are due are
        among them; empty if that is not so after `wait_s`. A repeated call for the same version
        returns the same loan.

        A caller that holds the first `num_held` groups of the loan gets a part of it as soon as it
        is longer: those that can be lent while groups that are due are still sampled. The payloads
        are those of the new groups.
        """
        ...

    async def fetch(self, prompt_indices: Sequence[int]) -> tuple[TrajectoryGroup, ...]:
        """The payloads of taken groups, in this order; for a learner with several ranks.

        Raises:
            LedgerError: a group is not held.
        """
        ...

    async def advance(self, policy_version: int) -> BufferStats:
        """The optimizer step that made this version has used the loan; returns the new stats."""
        ...

    async def acknowledge(self, policy_version: int) -> None:
        """A checkpoint of this version is durable; the groups it contains are deleted."""
        ...

    async def finish(self) -> None:
        """The run has ended: no lease is granted any more, and generators leave."""
        ...


class TrajectoryBuffer(GeneratorBuffer, LearnerBuffer, Protocol):
    """The whole buffer, which every backend implements."""

    async def stats(self) -> BufferStats:
        """The books, the generator registry and the sizes."""
        ...

    async def drain(self) -> None:
        """Grant only the leases that complete the last batch, so that the groups in flight end.

        Lasts until a learner attaches or the buffer loses its memory; may be repeated.
        """
        ...

    async def set_scheduling_state(
        self, generator_id: str, scheduling_state: SchedulingState
    ) -> None:
        """Set the scheduling state of a generator id; it outlasts the generator's process.

        Raises:
            UnknownGeneratorError: no generator of this id reports.
        """
        ...

    async def close(self) -> None:
        """Close sockets and tasks; leases stay valid until they are released or expire."""
        ...


@dataclass(eq=False)
class CompletionHandle:
    """What the caller of `Engine.generate` and the engine share while a completion is sampled."""

    stop: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by the caller: the completion ends with the tokens that it has."""
    num_tokens: int = -1
    """Set by the engine: tokens sampled so far; stays -1 if it does not report them."""


class Engine(Protocol):
    """Token ids in, token ids out. Every method may be called from the event loop at any time."""

    @property
    def policy_version(self) -> int:
        """The version that samples the next token."""
        ...

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        handle: CompletionHandle | None = None,
    ) -> Completion:
        """One completion. Cancelling the call gives its slot back at the next token.

        Once `handle.stop` is set it ends at the next token, as `FinishReason.DEADLINE`, with what
        was sampled, which may be nothing. Requests that wait for a slot are stopped as well.

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
    """One row of the prompt stream: a string or chat messages, and what its reward may need.

    `origin` is for messages: where the row is found, such as "row 17 of train.jsonl".
    """

    content: str | tuple[Mapping[str, str], ...]
    answer: str
    row: Mapping[str, Any] = field(default_factory=dict)
    origin: str = ""


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
