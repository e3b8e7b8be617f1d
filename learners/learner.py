"""The learner's loop: take, train, publish, advance, and now and then make it durable.

Invariant: policy version v stands for v completed steps, here, in the buffer and at the generators;
a group is acknowledged only once a checkpoint that contains it is on disk. Compute has a thread of
its own, so the loop, the weight channel and signals work during a long step.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from learners import checkpoint
from learners.batch import TrainingBatch
from learners.status_reporter import StatusReporter
from learners.trainer import Trainer
from streamrl.config import RunConfig
from streamrl.errors import (
    ConfigError,
    FencedError,
    LedgerError,
    LostMemoryError,
    TransportError,
)
from streamrl.interfaces import Tracker, TrajectoryBuffer
from streamrl.metrics import books_metrics, buffer_metrics, staleness_metrics
from streamrl.types import (
    Books,
    BufferStats,
    GroupHeader,
    LearnerActivity,
    Loan,
    ranges_of,
    replace,
)
from streamrl.weights.sender import WeightSender

log = logging.getLogger(__name__)

TAKE_WAIT_S = 10.0
SHUTDOWN_GRACE_S = 3.0

Result = TypeVar("Result")


class Learner:
    """One learner's life, from the version it starts with; `record` gets what each step trained."""

    def __init__(
        self,
        config: RunConfig,
        trainer: Trainer,
        buffer: TrajectoryBuffer,
        sender: WeightSender,
        tracker: Tracker,
        record: Tracker,
        reporter: StatusReporter,
        start: checkpoint.Restored,
    ) -> None:
        self._config = config
        self._trainer = trainer
        self._buffer = buffer
        self._sender = sender
        self._tracker = tracker
        self._record = record
        self._reporter = reporter
        self._logged_s = time.perf_counter()
        self._version = start.policy_version
        self._books = start.books
        self._saved_version = start.policy_version
        self._incarnation = ""
        self._stopping = asyncio.Event()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute")

    def stop(self) -> None:
        """Finish the step at hand, make it durable, and return."""
        self._stopping.set()

    async def run(self) -> None:
        """Steps until `run.max_steps`, or until stopped."""
        await self._attach()
        await self._publish()
        log.info("attached at version %d of %d", self._version, self._config.run.max_steps)
        self._logged_s = time.perf_counter()
        while self._version < self._config.run.max_steps:
            start = time.perf_counter()
            loan = await self._take()
            if loan is None:
                break
            await self._step(loan, start)
        # Should the buffer be gone, the checkpoint says all that it would have been told.
        with contextlib.suppress(TimeoutError, TransportError):
            if self._version > self._saved_version:
                await self._save()
            async with asyncio.timeout(SHUTDOWN_GRACE_S):
                await self._acknowledge()
                if self._version >= self._config.run.max_steps:
                    await self._buffer.finish()
        self._thread.shutdown()
        self._reporter.begin(LearnerActivity.ENDED)

    async def _attach(self) -> None:
        self._reporter.begin(LearnerActivity.ATTACHING, policy_version=self._version)
        stats = await self._buffer.attach(self._version, self._books)
        _require_same_settings(stats, self._config)
        self._incarnation = stats.incarnation
        self._reporter.learn(learner_term=stats.books.learner_term, dropped=stats.books.dropped)

    async def _attached_again(self, error: LedgerError) -> bool:
        """Whether the refusal was that of a buffer that lost its memory; it has it from here now.

        What this learner took and did not train is given back by it.
        """
        if isinstance(error, FencedError):
            return False
        is_other = (await self._buffer.stats()).incarnation != self._incarnation
        if not is_other and not isinstance(error, LostMemoryError):
            return False
        log.warning("the buffer came back with an older state (%s); attaching again", error)
        await self._attach()
        return True

    async def _take(self) -> Loan | None:
        """The next batch on loan. Waits for enough groups; unblocked by them or by `stop`."""
        num_groups = self._config.learner.groups_per_step
        stopped = asyncio.create_task(self._stopping.wait())
        try:
            while not self._stopping.is_set():
                self._reporter.begin(LearnerActivity.WAITING)
                taking = asyncio.create_task(
                    self._buffer.take(num_groups, self._version, TAKE_WAIT_S, with_payloads=True)
                )
                await asyncio.wait({taking, stopped}, return_when=asyncio.FIRST_COMPLETED)
                if not taking.done():
                    taking.cancel()
                    continue
                try:
                    loan = taking.result()
                except LedgerError as error:
                    if not await self._attached_again(error):
                        raise
                    continue
                if loan:
                    return loan
                log.info("waiting for %d groups at version %d", num_groups, self._version)
            return None
        finally:
            stopped.cancel()

    async def _step(self, loan: Loan, start: float) -> None:
        headers = loan.headers
        wait_s = time.perf_counter() - start
        batch = TrainingBatch.of(loan.groups, self._version)
        self._reporter.begin(LearnerActivity.COMPUTING)
        metrics = await self._compute(lambda: self._trainer.step(batch))
        self._version += 1
        # Announced before the buffer admits groups of the next version, which need these weights.
        if self._version % self._config.weights.publish_every == 0:
            await self._publish()
        self._reporter.begin(LearnerActivity.REPORTING, policy_version=self._version)
        stats = await self._advance(headers)
        self._books = stats.books
        self._reporter.learn(dropped=self._books.dropped)
        self._log(stats, headers, metrics, wait_s)
        if self._version % self._config.learner.checkpoint.every == 0:
            await self._save()
            await self._acknowledge()

    def _log(
        self,
        stats: BufferStats,
        headers: tuple[GroupHeader, ...],
        metrics: Mapping[str, float],
        wait_s: float,
    ) -> None:
        """Before the step's checkpoint, so that whoever resumes from that finds its lines."""
        now_s = time.perf_counter()
        step_s, self._logged_s = now_s - self._logged_s, now_s
        prompt_indices = [header.prompt_index for header in headers]
        self._record.log({"prompt_indices": prompt_indices}, step=self._version)
        self._tracker.log(
            {
                **metrics,
                **staleness_metrics(headers, self._version - 1),
                **books_metrics(self._books),
                **buffer_metrics(stats),
                **{f"weights/{name}": value for name, value in self._sender.gauges().items()},
                "learner/policy_version": self._version,
                "learner/wait_s": wait_s,
                "learner/step_s": step_s,
                "learner/stalls": self._reporter.num_stalls,
                "time_s": time.time(),
            },
            step=self._version,
        )

    async def _advance(self, headers: tuple[GroupHeader, ...]) -> BufferStats:
        try:
            return await self._buffer.advance(self._version)
        except LedgerError as error:
            self._books = books_with(self._books, [header.prompt_index for header in headers])
            if not await self._attached_again(error):
                raise
            return await self._buffer.advance(self._version)

    async def _acknowledge(self) -> None:
        try:
            await self._buffer.acknowledge(self._saved_version)
        except LedgerError as error:
            if not await self._attached_again(error):
                raise

    async def _publish(self) -> None:
        parameters = dict(self._trainer.policy.parameters())
        version = self._version
        self._reporter.begin(LearnerActivity.PUBLISHING, policy_version=version)
        await self._compute(lambda: self._sender.snapshot(parameters, version))
        self._sender.publish()

    async def _save(self) -> None:
        start = time.perf_counter()
        self._reporter.begin(LearnerActivity.SAVING)
        version, books = self._version, self._books
        path = await self._compute(
            lambda: checkpoint.save(self._config, self._trainer, version, books)
        )
        self._saved_version = version
        log.info("saved %s in %.2f s", path, time.perf_counter() - start)

    async def _compute(self, work: Callable[[], Result]) -> Result:
        """In the compute thread. Waits for it to finish, signals or not: a step is never torn."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def nothing_restored() -> checkpoint.Restored:
    """Where a run begins."""
    return checkpoint.Restored(policy_version=0, books=Books())


def books_with(books: Books, prompt_indices: Iterable[int]) -> Books:
    """The account after a step that the buffer did not hear of: these are trained, too.

    They count as granted once more, since the leases under which they were are forgotten with it.
    """
    trained = set(prompt_indices)
    following = max(books.next_prompt_index, *(prompt_index + 1 for prompt_index in trained))
    still_open = {*books.open_prompt_indices, *range(books.next_prompt_index, following)} - trained
    return replace(
        books,
        granted=books.granted + len(trained),
        trained=books.trained + len(trained),
        next_prompt_index=following,
        revision=books.revision + 1,
        open_ranges=ranges_of(still_open),
    )


def _require_same_settings(stats: BufferStats, config: RunConfig) -> None:
    for name, theirs, ours in (
        ("learner.groups_per_step", stats.groups_per_step, config.learner.groups_per_step),
        ("buffer.max_staleness", stats.max_staleness, config.buffer.max_staleness),
    ):
        if theirs != ours:
            raise ConfigError(
                f"{name}: the buffer was started with {theirs}, this learner with {ours}; "
                "start every daemon of a run with one configuration"
            )
