"""The learner's loop: take, train, publish, advance, save.

Invariant: policy version v stands for v completed steps, here, in the buffer and at the generators;
a group is acknowledged only once a checkpoint that contains it is on disk. A part of a batch is in
no version: what interrupts the batch discards the gradient.
Waits for groups: unblocked by generators that put enough of them, or by `stop`. Waits for a disk
that takes the run's files: unblocked by the next attempt that succeeds, or by `stop`. What is
computed is a command, which every rank executes in a thread of its own, so that the weight channel,
status and signals work meanwhile; this loop is that of the first rank.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path

from learners.checkpoints.records import RunRecords
from learners.checkpoints.saver import CheckpointSaver, wait_for_retry
from learners.checkpoints.schedule import RETRY_S
from learners.fairness import FairnessWindow
from learners.parallel.commands import Accumulate, Discard, Save, Snapshot, Update
from learners.parallel.lockstep import Lockstep
from learners.profiling.scaling import ScalingWindow
from learners.profiling.times import StepTimes
from learners.session import LearnerSession, LearnerState, unless_set
from learners.status_reporter import StatusReporter
from learners.validations import Validations
from streamrl.config import RunConfig
from streamrl.errors import CheckpointWriteError, TransportError
from streamrl.metrics import books_metrics, buffer_metrics, reward_metrics, staleness_metrics
from streamrl.types import BufferStats, LearnerActivity, Loan
from streamrl.weights.sender import WeightSender

log = logging.getLogger(__name__)

SHUTDOWN_GRACE_S = 3.0


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
        self._scaling = ScalingWindow(lockstep.num_ranks)
        self._stopping = asyncio.Event()
        every = config.learner.checkpoint.every
        self._saver = CheckpointSaver(every, session, reporter, self._stopping, self._save)

    def stop(self) -> None:
        """Finish the step at hand if its batch is complete, make it durable, and return."""
        self._stopping.set()

    async def run(self) -> None:
        """Make steps until `run.max_steps` or until stopped, then save."""
        stats = await self._session.attach()
        self._fairness = FairnessWindow(stats, self._config.mean_group_size)
        if not await self._begin():
            return
        self._validations.begin()
        await self._publish()
        log.info("attached at version %d of %d", self._version, self._config.run.max_steps)
        self._logged_s = time.perf_counter()
        while not self._is_complete():
            step = await self._train()
            if step is None:
                break
            loan, metrics = step
            # Before the buffer grants leases of the next version, which need these weights.
            if self._version % self._config.weights.publish_every == 0:
                await self._publish()
            stats = await self._session.advance(self._version, loan)
            # Before the checkpoint, so that whoever resumes from it finds the step's lines.
            self._log(loan, metrics, stats)
            await self._saver.keep_up()
        await self._finish()

    def _is_complete(self) -> bool:
        """Whether all steps are made, or validations end the run before."""
        is_last = self._version >= self._config.run.max_steps
        return is_last or bool(self._validations.stop_reason(self._version))

    async def _begin(self) -> bool:
        """Begin the records of the run; whether that was done before the learner was stopped."""
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

    async def _train(self) -> tuple[Loan, dict[str, float]] | None:
        """One step over the loan that is returned, with metrics; None if it is stopped before.

        Where the batch is lent in parts, each is trained while the next one is still sampled.
        """
        wait_s, trained = 0.0, Loan()
        while len(trained.headers) < self._config.learner.groups_per_step:
            start_s = time.perf_counter()
            loan = await self._session.take(self._stopping, self._while_waiting)
            wait_s += time.perf_counter() - start_s
            part = () if loan is None else self._session.new_headers
            if loan is None or len(part) == len(loan.headers):
                await self._discard(trained)
            if loan is None:
                return None
            self._reporter.set_activity(LearnerActivity.COMPUTING)
            await self._lockstep.run(Accumulate(part, self._version), loan.groups)
            trained = loan
        metrics = await self._lockstep.run(Update())
        self._version += 1
        waits = {"learner/wait_s": wait_s, "learner/wait_due_s": trained.wait_due_s}
        return trained, {**metrics, **waits}

    async def _discard(self, part: Loan) -> None:
        """Discard the gradient of a part whose batch ends or begins again."""
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
        """Publish before `weights.publish_every` says so; settle a save that has ended.

        Groups that failed may have left only leases in flight that this version has to sample.
        """
        await self._saver.settle()
        if self._published_version < self._version:
            await self._publish()

    def _log(self, loan: Loan, metrics: Mapping[str, float], stats: BufferStats) -> None:
        now_s = time.perf_counter()
        step_s, self._logged_s = now_s - self._logged_s, now_s
        self._records.log(
            self._version,
            loan.headers,
            {
                **metrics,
                # Of the save after the step before, if there was one.
                **self._times.take("snapshot", "save"),
                **self._validations.take(),
                **staleness_metrics(loan.headers, self._version - 1),
                **books_metrics(stats.books),
                **buffer_metrics(stats),
                **reward_metrics(stats, [r.label for r in self._config.data.all_rewards]),
                **self._fairness.metrics(stats, step_s, loan.headers),
                **self._scaling.metrics(stats, step_s, metrics),
                **{f"weights/{name}": value for name, value in self._sender.gauges().items()},
                "learner/policy_version": self._version,
                "learner/step_s": step_s,
                "learner/wait_frac": metrics["learner/wait_s"] / max(step_s, 1e-9),
                "learner/stalls": self._reporter.num_stalls,
                "learner/num_unsaved_steps": self._version - self._saver.saved_version,
                "time_s": time.time(),
            },
        )

    async def _save(self, state: LearnerState) -> Future[Path]:
        """Copy the state on every rank; the checkpoint, once it is durable."""
        with self._times.phase("save"):
            written: Future[Path] = await self._lockstep.run(Save(state))
        return written

    def _explain_end(self) -> None:
        """If it is before the last step."""
        if self._version < self._config.run.max_steps:
            reason = self._validations.stop_reason(self._version)
            log.info("%s", reason)
            self._reporter.update(ended_early=reason)

    async def _publish_last(self) -> None:
        """Publish the last version for validators, however early it comes for them."""
        if not self._config.validation.needs_last_version:
            return
        if self._published_version < self._version:
            await self._publish()
        self._sender.send_last()

    async def _finish(self) -> None:
        """Save the last version and notify the buffer, if it is still there."""
        is_complete = self._is_complete()
        if is_complete:
            self._explain_end()
            await self._publish_last()
        is_saved = await self._saver.finish()
        if is_complete:
            await self._validations.finish(self._version, self._stopping)
        await self._notify_of_end(has_ended=is_saved and is_complete)
        self._reporter.set_activity(LearnerActivity.ENDED)

    async def _notify_of_end(self, *, has_ended: bool) -> None:
        """Tell the buffer what is durable, and whether the run has ended.

        Waits for its answer; where a signal stops the learner, SHUTDOWN_GRACE_S at most: without
        the notice, the next learner attaches at the checkpoint's version.

        Raises:
            TransportError: the run has ended and the buffer does not answer, so that generators
                would wait for more; another start of the learner notifies it.
        """
        if has_ended and await unless_set(self._stopping, self._notify(has_ended)):
            return
        with contextlib.suppress(TimeoutError, TransportError):
            async with asyncio.timeout(SHUTDOWN_GRACE_S):
                await self._notify(has_ended)

    async def _notify(self, has_ended: bool) -> bool:
        await self._session.acknowledge(self._saver.saved_version)
        if has_ended:
            await self._session.finish()
        return True
