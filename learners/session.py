"""The learner's session with the buffer: attaching, the taken batch, advancing, and the books.

The session holds the version and the books of the last step. A checkpoint stores them, and a buffer
that lost its memory is restored from them. A learner that was replaced by another gets FencedError.

Invariant: a request that a buffer refuses because it lost its memory is repeated once the session
has attached again. Attaching returns taken groups that were not trained to the buffer, so it ends
the current batch.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from learners.status_reporter import StatusReporter
from streamrl.algorithms.parts import accepts_parts
from streamrl.config import RunConfig
from streamrl.errors import ConfigError, FencedError, LedgerError, LostMemoryError, TransportError
from streamrl.interfaces import TrajectoryBuffer
from streamrl.types import (
    Books,
    BufferStats,
    GroupHeader,
    LearnerActivity,
    TakenBatch,
    TrajectoryGroup,
    ranges_of,
    replace,
)

log = logging.getLogger(__name__)

TAKE_WAIT_S = 10.0
GOODBYE_S = 3.0
"""How long each answer of the buffer is waited for once the learner is stopping."""

Result = TypeVar("Result")
Fetch: TypeAlias = Callable[[Sequence[GroupHeader]], Awaitable[tuple[TrajectoryGroup, ...]]]


@dataclass(frozen=True)
class LearnerState:
    """What a learner continues from, besides its trainer's state; the default is a new run."""

    policy_version: int = 0
    books: Books = field(default_factory=Books)


class LearnerSession:
    """One learner's side of the buffer, starting from `state`.

    With several ranks, `fetch` makes every rank fetch its share of the groups with these headers
    and returns the first rank's; a single rank gets the payloads with the batch it takes.
    `learner_id` is that of the weight sender.
    """

    def __init__(
        self,
        config: RunConfig,
        buffer: TrajectoryBuffer,
        reporter: StatusReporter,
        state: LearnerState,
        fetch: Fetch | None = None,
        learner_id: str = "",
    ) -> None:
        self._config = config
        self._fetch = fetch
        self._learner_id = learner_id
        self._buffer = buffer
        self._reporter = reporter
        self._state = state
        self.stopping = asyncio.Event()
        """Set once the learner is stopping: from then on no answer is waited for longer than
        GOODBYE_S."""
        self._incarnation = ""
        self._held: tuple[GroupHeader, ...] = ()
        self.new_headers: tuple[GroupHeader, ...] = ()
        """The groups that the last `take` added to the batch."""

    @property
    def state(self) -> LearnerState:
        """The state after the last step that the buffer was notified of."""
        return self._state

    async def attach(self) -> BufferStats:
        """Become the buffer's learner, at the session's version; returns the buffer's stats.

        Raises:
            ConfigError: the buffer was started with other settings.
        """
        version = self._state.policy_version
        self._reporter.set_activity(LearnerActivity.ATTACHING, policy_version=version)
        attached = self._buffer.attach(version, self._state.books, self._learner_id)
        stats = await self._answer(attached)
        _require_same_settings(stats, self._config)
        self._incarnation = stats.incarnation
        self._held = ()
        self._reporter.update(learner_term=stats.books.learner_term)
        self._reporter.on_stats(stats)
        return stats

    async def take(self, on_wait: Callable[[], Awaitable[None]]) -> TakenBatch | None:
        """Take the next batch, with its trajectories; None once `stopping` is set.

        Waits until generators have put enough groups, and calls `on_wait` every TAKE_WAIT_S. If the
        algorithm accepts parts, the result may be part of the batch: the next call then waits for
        more groups, and returns all headers but only the trajectories of the new groups. If the
        buffer has lent other groups instead, the batch begins again, and the call returns the
        trajectories of all its groups. With several ranks the trajectories are the first rank's
        share.
        """
        num_groups, version = self._config.learner.groups_per_step, self._state.policy_version

        async def request() -> TakenBatch | None:
            in_parts = accepts_parts(self._config.algorithm, self._config.learner.num_updates)
            num_held = len(self._held) if in_parts else None
            with_payloads = self._fetch is None
            take = self._buffer.take(
                num_groups, version, TAKE_WAIT_S, with_payloads=with_payloads, num_held=num_held
            )
            taken = await unless_set(self.stopping, take)
            new = () if taken is None else taken.headers[len(self._held) :]
            if self._fetch is None or taken is None or not self._continues(taken):
                return taken
            return replace(taken, groups=await self._fetch(new))

        while not self.stopping.is_set():
            taken = await self._call(LearnerActivity.WAITING, request)
            if taken is None:
                return None
            if not taken.headers:
                num_missing = num_groups - len(self._held)
                log.info("waiting for %d groups at version %d", num_missing, version)
                await on_wait()
            elif self._continues(taken):
                self.new_headers = taken.headers[len(self._held) :]
                self._held = taken.headers
                return taken
            else:
                self._held = ()
        return None

    def _continues(self, taken: TakenBatch) -> bool:
        """Whether the taken batch has groups and begins with those already held."""
        return bool(taken.headers) and taken.headers[: len(self._held)] == self._held

    async def advance(
        self, policy_version: int, taken: TakenBatch, steered_bound: int = 0
    ) -> BufferStats:
        """Notify the buffer that the step to this version trained the taken batch, and of the new
        bound on staleness if the run steers it; returns the buffer's stats."""
        self._held = ()
        trained = [header.prompt_index for header in taken.headers]
        # For a buffer that loses its memory before it has recorded this step.
        books = books_with(self._state.books, trained)
        books = replace(books, steered_bound=steered_bound)
        self._state = LearnerState(policy_version, books)
        self._reporter.update(policy_version=policy_version)
        stats = await self._report(lambda: self._buffer.advance(policy_version, steered_bound))
        self._state = LearnerState(policy_version, stats.books)
        self._reporter.on_stats(stats)
        return stats

    async def acknowledge(self, policy_version: int) -> None:
        """Notify the buffer that a checkpoint of this version is durable."""
        await self._report(lambda: self._buffer.acknowledge(policy_version))

    async def finish(self) -> None:
        """Notify the buffer that the run is complete."""
        await self._report(self._buffer.finish)

    async def _report(self, request: Callable[[], Awaitable[Result]]) -> Result:
        return await self._call(LearnerActivity.REPORTING, lambda: self._answer(request()))

    async def _answer(self, request: Awaitable[Result]) -> Result:
        return await unless_late(self.stopping, request)

    async def _call(
        self, activity: LearnerActivity, request: Callable[[], Awaitable[Result]]
    ) -> Result:
        """The buffer's reply. If it lost its memory, attach again and repeat the request."""
        while True:
            self._reporter.set_activity(activity)
            try:
                return await request()
            except FencedError:
                raise
            except LedgerError as error:
                if not isinstance(error, LostMemoryError):
                    stats = await self._answer(self._buffer.stats())
                    if stats.incarnation == self._incarnation:
                        raise
                log.warning("the buffer came back with an older state (%s); attaching again", error)
            await self.attach()


def books_with(books: Books, prompt_indices: Iterable[int]) -> Books:
    """The books after a step on these prompts, which the buffer has not recorded yet.

    Each prompt counts as granted once more: its lease is lost with the buffer's memory.
    """
    trained = set(prompt_indices)
    next_prompt_index = max(books.next_prompt_index, *(index + 1 for index in trained))
    skipped = range(books.next_prompt_index, next_prompt_index)
    return replace(
        books,
        granted=books.granted + len(trained),
        trained=books.trained + len(trained),
        next_prompt_index=next_prompt_index,
        revision=books.revision + 1,
        open_ranges=ranges_of({*books.open_prompt_indices, *skipped} - trained),
    )


def _require_same_settings(stats: BufferStats, config: RunConfig) -> None:
    smallest, largest = config.buffer.smallest_staleness, config.buffer.largest_staleness
    bound = min(max(stats.staleness_bound, smallest), largest)
    for name, theirs, ours in (
        ("learner.groups_per_step", stats.groups_per_step, config.learner.groups_per_step),
        ("buffer.max_staleness", stats.max_staleness, largest),
        ("buffer.max_staleness", stats.staleness_bound, bound),
        ("buffer.overdue", stats.overdue, config.buffer.overdue),
    ):
        if theirs != ours:
            raise ConfigError(
                f"{name}: the buffer was started with {theirs}, this learner with {ours}; "
                "start every daemon of a run with one configuration"
            )


async def unless_late(event: asyncio.Event, answer: Awaitable[Result]) -> Result:
    """The buffer's answer; TransportError if none has come GOODBYE_S after the event is set (or
    after this call, if it was set before)."""
    call = asyncio.ensure_future(answer)
    try:
        if not await ends_in_time(call, event, GOODBYE_S):
            raise TransportError(f"the buffer does not answer within {GOODBYE_S:g} s")
        return call.result()
    finally:
        call.cancel()


async def unless_set(event: asyncio.Event, coroutine: Coroutine[Any, Any, Result]) -> Result | None:
    """The coroutine's result; None, and the coroutine is cancelled, if the event is set first."""
    call = asyncio.create_task(coroutine)
    try:
        return call.result() if await ends_in_time(call, event) else None
    finally:
        call.cancel()


async def ends_in_time(
    call: asyncio.Future[Any], event: asyncio.Event, grace_s: float = 0.0
) -> bool:
    """Whether the call ends before the event is set or within `grace_s` after that. The call is not
    cancelled."""
    is_set = asyncio.create_task(event.wait())
    try:
        await asyncio.wait({call, is_set}, return_when=asyncio.FIRST_COMPLETED)
        if not call.done() and grace_s:
            await asyncio.wait({call}, timeout=grace_s)
        return call.done()
    finally:
        is_set.cancel()
