"""The learner's loop, on the first rank: take, train, publish, advance, save.

Invariant: policy version v stands for v completed steps, here, in the buffer and at the generators;
a group is acknowledged only once a checkpoint that contains it is on disk. A part of a batch
belongs to no version: if the batch is interrupted, its gradient is discarded. Every step is saved
before the loop ends, whether `stop` ends it or a buffer that does not answer; the buffer learns of
those steps at the next attach.
Waits for groups, until generators have put enough of them or `stop` is called. Waits for the
buffer's answers, until the client's deadline or GOODBYE_S after `stop`. Waits for a disk that
cannot be written, until an attempt succeeds or `stop` is called. Computation is sent as commands,
which every rank executes in a separate thread, so that the weight channel, status reports and
signals keep working.
"""

import asyncio
import logging
import math
import time
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path

from learners.checkpoints.records import RunRecords
from learners.checkpoints.schedule import RETRY_S, CheckpointSaver, wait_for_retry
from learners.executor.lockstep import Accumulate, Discard, Lockstep, Save, Snapshot, Update
from learners.fairness import FairnessWindow
from learners.profiling import ScalingWindow, StepTimes
from learners.session import LearnerSession, LearnerState, unless_set
from learners.status_reporter import StatusReporter
from learners.steering import EFF_SAMPLE_SIZE, Steering
from learners.validations import Validations
from streamrl.config import RunConfig
from streamrl.diagnosis.learning import Signs
from streamrl.errors import CheckpointWriteError, TransportError, UnreachableBufferError
from streamrl.metrics import (
    MAX_NAMED_GENERATORS,
    books_metrics,
    buffer_metrics,
    generator_metrics,
    reward_metrics,
    staleness_metrics,
)
from streamrl.placement.hosts import num_cores, usable_devices
from streamrl.run_folder import Rows, read_rows
from streamrl.tracking.jsonl import METRICS_FILE, read_lines
from streamrl.types import BufferStats, LearnerActivity, TakenBatch, replace
from streamrl.weights.sender import WeightSender

log = logging.getLogger(__name__)


class Learner:
    """Trains from the version of its session, and keeps `records` of it in the run's folder."""

    def __init__(
        self,
        config: RunConfig,
        lockstep: Lockstep,
        session: LearnerSession,
        sender: WeightSender,
        records: RunRecords,
        reporter: StatusReporter,
        validations: Validations,
    ) -> None:
        self._config = config
        self._lockstep = lockstep
        self._session = session
        self._sender = sender
        self._records = records
        self._reporter = reporter
        self._validations = validations
        self._version = session.state.policy_version
        self._published_version = -1
        self._logged_s = time.perf_counter()
        self._times = StepTimes()
        self._signs = Signs(config.run.signs)
        self._said_signs: frozenset[str] = frozenset()
        self._scaling = ScalingWindow(lockstep.num_ranks, _free_cores(config, lockstep.num_ranks))
        self._rows = _rows(config)
        self._stopping = session.stopping
        every = config.learner.checkpoint.every
        self._saver = CheckpointSaver(every, session, reporter, self._save)

    def stop(self) -> None:
        """Finish the current step if its batch is complete and its gradient is ready in time, save,
        and return."""
        self._stopping.set()

    async def run(self) -> None:
        """Make steps until `run.max_steps` or until stopped, then save.

        Raises:
            UnreachableBufferError: every step is saved.
            CheckpointWriteError: stopped, and steps could not be saved.
        """
        try:
            self._stats = await self._session.attach()
        except TransportError as error:
            raise self._unreachable(error) from error
        self._steering = Steering.start(
            self._config.buffer.max_staleness, self._stats.staleness_bound
        )
        self._fairness = FairnessWindow(self._stats, self._config.mean_group_size)
        if not await self._begin():
            return
        self._validations.begin()
        await self._publish()
        # In a thread, while generators sample: a long run has many lines.
        done = read_lines(self._config.run.path / METRICS_FILE)
        await asyncio.to_thread(self._signs.go_on, done)
        log.info("attached at version %d of %d", self._version, self._config.run.max_steps)
        self._logged_s = time.perf_counter()
        try:
            await self._make_steps()
        except TransportError as error:
            await self._finish(error)
        else:
            await self._finish()

    async def _make_steps(self) -> None:
        while not self._is_complete():
            step = await self._train()
            if step is None:
                return
            taken, metrics = step
            steered = self._steer(metrics)
            # Before the buffer grants leases of the next version, which need these weights.
            if self._is_to_publish():
                await self._publish()
            # The lines come before the checkpoint, so that whoever resumes from it finds them.
            try:
                bound = 0 if self._steering is None else self._steering.bound
                self._stats = await self._session.advance(self._version, taken, bound)
            except TransportError:
                stats = replace(self._stats, books=self._session.state.books)
                self._log(taken, metrics, stats, steered)
                raise
            self._log(taken, metrics, self._stats, steered)
            await self._saver.keep_up()

    def _steer(self, metrics: Mapping[str, float]) -> str:
        """Adjust the bound on staleness after a step with these metrics; how and why it changed, or
        ""."""
        if self._steering is None:
            return ""
        seconds = max(time.perf_counter() - self._logged_s, 1e-9)
        wait_frac = metrics["learner/wait_s"] / seconds
        self._steering, change = self._steering.after(
            metrics.get(EFF_SAMPLE_SIZE, math.nan), wait_frac
        )
        if change:
            log.info("step %d: buffer.max_staleness steered %s", self._version, change)
        return change

    def _is_to_publish(self) -> bool:
        """Whether to publish now: every `weights.publish_every` steps, and sooner if the bound on
        staleness was steered below that, or generators would wait for an unpublished version."""
        is_due = self._version % self._config.weights.publish_every == 0
        steering = self._steering
        return is_due or (
            steering is not None and self._version - self._published_version > steering.bound
        )

    def _is_complete(self) -> bool:
        """Whether all steps are made, or validations end the run early."""
        is_last = self._version >= self._config.run.max_steps
        return is_last or bool(self._validations.stop_reason(self._version))

    async def _begin(self) -> bool:
        """Begin the run's records, retrying while the disk is full; false if stopped before
        that."""
        while not self._stopping.is_set():
            try:
                self._records.begin()
            except CheckpointWriteError as error:
                log.warning("%s; trying again in %.0f s", error, RETRY_S)
                self._reporter.set_activity(LearnerActivity.SAVING, unsaved=str(error))
                await wait_for_retry(self._stopping)
            else:
                self._reporter.update(unsaved="")
                return True
        return False

    async def _train(self) -> tuple[TakenBatch, dict[str, float]] | None:
        """Train one batch; the batch and the step's metrics, or None if stopped before the step is
        made.

        If the buffer lends the batch in parts, each is trained while the next is still being
        sampled.
        """
        wait_s, trained = 0.0, TakenBatch()
        while len(trained.headers) < self._config.learner.groups_per_step:
            start_s = time.perf_counter()
            try:
                taken = await self._session.take(self._while_waiting)
            except TransportError:
                await self._discard(trained)
                raise
            wait_s += time.perf_counter() - start_s
            part = () if taken is None else self._session.new_headers
            if taken is None or len(part) == len(taken.headers):
                await self._discard(trained)
            if taken is None:
                return None
            self._reporter.set_activity(LearnerActivity.COMPUTING)
            command = Accumulate(part, self._version)
            if not await self._lockstep.accumulate(command, taken.groups, self._stopping):
                log.warning("gave up the gradient of step %d, to save in time", self._version + 1)
                return None
            trained = taken
        metrics = await self._lockstep.run(Update())
        self._version += 1
        waits = {"learner/wait_s": wait_s, "learner/wait_due_s": trained.wait_due_s}
        return trained, {**metrics, **waits}

    async def _discard(self, part: TakenBatch) -> None:
        """Discard the gradient of a part whose batch is given up or begins again."""
        if part:
            num_groups, step = len(part.headers), self._version + 1
            log.warning("discarded the gradient of %d groups of step %d", num_groups, step)
            await self._lockstep.run(Discard())

    async def _publish(self) -> None:
        """Copy the weights, in the compute thread, and announce the version."""
        version = self._version
        self._reporter.set_activity(LearnerActivity.PUBLISHING, policy_version=version)
        with self._times.phase("snapshot"):
            await self._lockstep.run(Snapshot(version))
        self._sender.publish()
        self._published_version = version

    async def _while_waiting(self) -> None:
        """Settle a save that has ended; publish without waiting for `weights.publish_every`.

        When groups fail, all remaining leases may need this version or a newer one.
        """
        await self._saver.settle()
        if self._published_version < self._version:
            await self._publish()

    def _log(
        self,
        taken: TakenBatch,
        metrics: Mapping[str, float],
        stats: BufferStats,
        steered: str = "",
    ) -> None:
        now_s = time.perf_counter()
        step_s, self._logged_s = now_s - self._logged_s, now_s
        is_few = len(stats.generators) <= MAX_NAMED_GENERATORS
        line = {
            **metrics,
            # The save is the one after the previous step, if any.
            **self._times.take("snapshot", "save"),
            **self._validations.take(),
            **staleness_metrics(taken.headers, self._version - 1),
            **books_metrics(stats.books),
            **buffer_metrics(stats),
            **(generator_metrics(stats) if is_few else {}),
            **reward_metrics(stats, [r.label for r in self._config.data.all_rewards]),
            **self._fairness.metrics(stats, step_s, taken.headers),
            **self._scaling.metrics(stats, step_s, metrics),
            **{f"weights/{name}": value for name, value in self._sender.gauges().items()},
            "learner/policy_version": self._version,
            "learner/num_passes": self._rows.num_passes(stats.books.next_prompt_index),
            "learner/step_s": step_s,
            "learner/wait_frac": metrics["learner/wait_s"] / max(step_s, 1e-9),
            "learner/stalls": self._reporter.num_stalls,
            "learner/num_unsaved_steps": self._version - self._saver.saved_version,
            "time_s": time.time(),
        }
        self._records.log(self._version, taken.headers, line, steered)
        # Signs that the run does not learn: in every report, and once in the log.
        signs = self._signs.add(self._version, line)
        for name in signs.keys() - self._said_signs:
            log.warning("%s", signs[name])
        self._said_signs = frozenset(signs)
        self._reporter.update(signs=tuple(signs.values()))

    async def _save(self, state: LearnerState) -> Future[Path]:
        """Copy the state on every rank; the future holds the checkpoint once it is durable."""
        with self._times.phase("save"):
            written: Future[Path] = await self._lockstep.run(Save(state))
        return written

    async def _publish_last(self) -> None:
        """Publish the last version for validators, even if none is due yet."""
        if not self._validations.needs_last_version:
            return
        if self._published_version < self._version:
            await self._publish()
        self._sender.send_last()

    async def _finish(self, unreachable: TransportError | None = None) -> None:
        """Save the last version and notify the buffer, unless it is unreachable."""
        is_complete = self._is_complete()
        if is_complete:
            if self._version < self._config.run.max_steps:
                reason = self._validations.stop_reason(self._version)
                log.info("%s", reason)
                self._reporter.update(ended_early=reason)
            await self._publish_last()
        if not await self._saver.finish():
            raise CheckpointWriteError(
                f"stopped at step {self._version}: {self._saver.sentence}; those steps are trained "
                "again"
            )
        if is_complete:
            await self._validations.finish(self._version, self._stopping)
        try:
            if unreachable is not None:
                raise unreachable
            await self._notify_of_end(has_ended=is_complete)
        except TransportError as error:
            raise self._unreachable(error) from error
        self._reporter.set_activity(LearnerActivity.ENDED)

    def _unreachable(self, error: TransportError) -> UnreachableBufferError:
        """The error, with the learner's step, which is saved."""
        step = f"step {self._version} of {self._config.run.max_steps}"
        if not self._stopping.is_set():
            return UnreachableBufferError(f"{error}; {step} is saved")
        self._reporter.set_activity(LearnerActivity.ENDED)
        return UnreachableBufferError(
            f"the buffer at {self._config.buffer.url} does not answer; stopped at {step}, which is "
            "saved: the buffer hears of it when a learner goes on (--resume)"
        )

    async def _notify_of_end(self, *, has_ended: bool) -> None:
        """Tell the buffer what is durable, and whether the run has ended.

        Waits for its answer, but only briefly once a signal has stopped the learner: without this
        notice, the next learner still attaches at the checkpoint's version.
        """

        async def notify() -> bool:
            await self._session.acknowledge(self._saver.saved_version)
            if has_ended:
                await self._session.finish()
            return True

        if not has_ended or not await unless_set(self._stopping, notify()):
            await notify()


def _free_cores(config: RunConfig, num_ranks: int) -> float:
    """Cores of this machine that no learner rank or generator of the run uses; each counts as many
    as its `num_threads`, else one. NaN where GPUs compute."""
    generator, learner = config.generator, config.learner
    num_generators = generator.max_count if generator.url is None else 0
    used = num_ranks * max(1, learner.num_threads) + num_generators * max(1, generator.num_threads)
    return math.nan if usable_devices() else max(0, num_cores() - used)


def _rows(config: RunConfig) -> Rows:
    """The data rows that the run reads now, as its launch counted them; empty unless every source
    is a set of rows."""
    known = read_rows(config.run.path)
    num_sources = sum(len(entry.data.sources) for entry in config.entries)
    return known[-1] if known and len(known[-1].sources) == num_sources else Rows(0, ())
