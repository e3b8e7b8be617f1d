"""Saves beside the training: when one begins, when it has ended, and what then happens.

Invariant: the buffer is notified of a version only once a checkpoint of it is durable, and one save
is under way at a time. The learner calls `keep_up` after each step, `settle` while it waits for
groups, and `finish` at its end. Waits for a disk that takes the run's files, where too many steps
are in no checkpoint and at the end: unblocked by the next attempt that succeeds, or by `stopping`.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeAlias

from learners.checkpoints.schedule import RETRY_S, SaveSchedule
from learners.session import LearnerSession, LearnerState
from learners.status_reporter import StatusReporter
from streamrl.errors import CheckpointWriteError
from streamrl.types import LearnerActivity

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
