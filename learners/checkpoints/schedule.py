"""Saves beside the training: when one begins, when it has ended, and what then happens.

Invariant: the buffer is notified of a version only once a checkpoint of it is durable, and one save
is under way at a time. The learner calls `keep_up` after each step, `settle` while it waits for
groups, and `finish` at its end. Waits for a disk that takes the run's files, where too many steps
are in no checkpoint and at the end: unblocked by the next attempt that succeeds, or by `stopping`.

`SaveSchedule`: when a learner saves, which is every `learner.checkpoint.every` steps, and after a
failure again soon. One save is under way at a time, and one that is due meanwhile begins after it;
no more than MAX_UNSAVED intervals of steps are made without a checkpoint, since the buffer keeps
the groups of each until one is durable. Pure; the caller reads the clock.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeAlias

from learners.session import LearnerSession, LearnerState
from learners.status_reporter import StatusReporter
from streamrl.errors import CheckpointWriteError
from streamrl.types import LearnerActivity

RETRY_S = 20.0
MAX_UNSAVED = 3


class SaveSchedule:
    """Of a learner whose newest checkpoint is that of `saved_version`."""

    def __init__(self, every: int, saved_version: int) -> None:
        self._every = every
        self.saved_version = saved_version
        self.failure = ""
        self._is_saving = False
        self._begun_version = saved_version
        self._retry_at_s = 0.0

    def is_due(self, policy_version: int, now_s: float) -> bool:
        """Whether a checkpoint of this version is to be saved now."""
        if self._is_saving or policy_version == self.saved_version:
            return False
        is_regular = policy_version // self._every > self._begun_version // self._every
        return is_regular or (bool(self.failure) and now_s >= self._retry_at_s)

    def must_wait(self, policy_version: int) -> bool:
        """Whether no step may be made before a checkpoint is saved."""
        is_behind = policy_version - self.saved_version >= MAX_UNSAVED * self._every
        return is_behind and (self._is_saving or bool(self.failure))

    def began(self, policy_version: int) -> None:
        self._is_saving, self._begun_version = True, policy_version

    def failed(self, reason: str, now_s: float) -> None:
        self._is_saving = False
        self.failure, self._retry_at_s = reason, now_s + RETRY_S

    def saved(self) -> None:
        self._is_saving = False
        self.failure, self.saved_version = "", self._begun_version

    def sentence(self, policy_version: int) -> str:
        """Why the newest steps are in no checkpoint; "" if the last one was saved."""
        if not self.failure:
            return ""
        steps = f"the steps since {self.saved_version} are in no checkpoint"
        waits = ", and the learner waits" if self.must_wait(policy_version) else ""
        return f"{self.failure}; {steps}{waits}"


log = logging.getLogger(__name__)


Begin: TypeAlias = Callable[[LearnerState], Awaitable[Future[Path]]]


class CheckpointSaver:
    """Of the session's learner; `begin` copies a state and writes it in a thread."""

    def __init__(
        self,
        every: int,
        session: LearnerSession,
        reporter: StatusReporter,
        stopping: asyncio.Event,
        begin: Begin,
    ) -> None:
        self._session = session
        self._reporter = reporter
        self._stopping = stopping
        self._begin_writing = begin
        self._schedule = SaveSchedule(every, session.state.policy_version)
        self._save: asyncio.Future[Path] | None = None

    @property
    def saved_version(self) -> int:
        """Of the newest checkpoint that is durable."""
        return self._schedule.saved_version

    @property
    def sentence(self) -> str:
        """Which steps are in no checkpoint and why; "" if there are none."""
        return self._schedule.sentence(self._version)

    async def keep_up(self) -> None:
        """Begin a save that is due; wait if too many steps are in no checkpoint."""
        await self.settle()
        if self._schedule.is_due(self._version, time.monotonic()):
            await self._begin()
        while self._schedule.must_wait(self._version):
            if self._save is None:
                await wait_for_retry(self._stopping)
            if self._stopping.is_set():
                return
            if self._save is None:
                await self._begin()
            await self._end()
            await self._acknowledge()

    async def settle(self) -> None:
        """Notify the buffer if a save has ended; one that is under way is not waited for."""
        if self._save is not None and self._save.done():
            await self._end()
            await self._acknowledge()

    async def finish(self) -> bool:
        """Save the last version, after the save under way; whether there is a checkpoint of it.

        The buffer is not notified.
        """
        if self._save is not None:
            await self._end()
        while self._version != self.saved_version:
            await self._begin()
            await self._end()
            if self._schedule.failure:
                if self._stopping.is_set():
                    return False
                await wait_for_retry(self._stopping)
        return True

    @property
    def _version(self) -> int:
        return self._session.state.policy_version

    async def _begin(self) -> None:
        self._reporter.set_activity(LearnerActivity.SAVING)
        self._schedule.began(self._version)
        self._save = asyncio.wrap_future(await self._begin_writing(self._session.state))

    async def _end(self) -> None:
        """Wait until the save under way has ended."""
        assert self._save is not None, "a save is under way"
        if not self._save.done():
            self._reporter.set_activity(LearnerActivity.SAVING)
        try:
            await self._save
        except CheckpointWriteError as error:
            self._schedule.failed(str(error), time.monotonic())
            log.warning("%s", self._schedule.sentence(self._version))
        else:
            self._schedule.saved()
        self._save = None
        self._reporter.update(unsaved=self._schedule.sentence(self._version))

    async def _acknowledge(self) -> None:
        if not self._schedule.failure:
            await self._session.acknowledge(self.saved_version)


async def wait_for_retry(stopping: asyncio.Event) -> None:
    """Waits RETRY_S, or until stopped."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(RETRY_S):
            await stopping.wait()
