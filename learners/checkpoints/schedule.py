"""Saves beside the training: when one begins, when it has ended, and what then happens.

A save is due every `learner.checkpoint.every` steps, and again soon after a failure; one that is
due while another is under way begins after it. No more than MAX_UNSAVED intervals of steps are made
without a checkpoint, since the buffer keeps the groups of each until one is durable.

Invariant: the buffer is notified of a version only once a checkpoint of it is durable, and one save
is under way at a time. Waits for a disk that takes the run's files, where too many steps are in no
checkpoint and at the end: unblocked by the next attempt that succeeds, or by `stopping`.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path

from learners.session import LearnerSession, LearnerState
from learners.status_reporter import StatusReporter
from streamrl.errors import CheckpointWriteError
from streamrl.types import LearnerActivity

RETRY_S = 20.0
MAX_UNSAVED = 3

log = logging.getLogger(__name__)


class CheckpointSaver:
    """Of the session's learner; `begin` copies a state and writes it in a thread."""

    def __init__(
        self,
        every: int,
        session: LearnerSession,
        reporter: StatusReporter,
        begin: Callable[[LearnerState], Awaitable[Future[Path]]],
    ) -> None:
        self._every = every
        self._session = session
        self._reporter = reporter
        self._stopping = session.stopping
        self._begin_writing = begin
        self._save: asyncio.Future[Path] | None = None
        self._begun_version = self._version
        self._failure = ""
        self._retry_at_s = 0.0
        self.saved_version = self._version
        """Of the newest checkpoint that is durable."""

    @property
    def sentence(self) -> str:
        """Which steps are in no checkpoint and why; "" if the last save has not failed."""
        if not self._failure:
            return ""
        steps = f"the steps since {self.saved_version} are in no checkpoint"
        waits = ", and the learner waits" if self._must_wait() else ""
        return f"{self._failure}; {steps}{waits}"

    async def keep_up(self) -> None:
        """Begin a save that is due; wait if too many steps are in no checkpoint."""
        await self.settle()
        if self._is_due():
            await self._begin()
        while self._must_wait():
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
        """Save the last version, after the save under way; whether there is a checkpoint of it. The
        buffer is not notified."""
        if self._save is not None:
            await self._end()
        while self._version != self.saved_version:
            await self._begin()
            await self._end()
            if self._failure:
                if self._stopping.is_set():
                    return False
                await wait_for_retry(self._stopping)
        return True

    @property
    def _version(self) -> int:
        return self._session.state.policy_version

    def _is_due(self) -> bool:
        if self._save is not None or self._version == self.saved_version:
            return False
        is_regular = self._version // self._every > self._begun_version // self._every
        return is_regular or (bool(self._failure) and time.monotonic() >= self._retry_at_s)

    def _must_wait(self) -> bool:
        """Whether no step may be made before a checkpoint is saved."""
        is_behind = self._version - self.saved_version >= MAX_UNSAVED * self._every
        return is_behind and (self._save is not None or bool(self._failure))

    async def _begin(self) -> None:
        self._reporter.set_activity(LearnerActivity.SAVING)
        self._begun_version = self._version
        self._save = asyncio.wrap_future(await self._begin_writing(self._session.state))

    async def _end(self) -> None:
        """Wait until the save under way has ended."""
        assert self._save is not None, "a save is under way"
        if not self._save.done():
            self._reporter.set_activity(LearnerActivity.SAVING)
        try:
            await self._save
        except CheckpointWriteError as error:
            self._failure, self._retry_at_s = str(error), time.monotonic() + RETRY_S
        else:
            self._failure, self.saved_version = "", self._begun_version
        self._save = None
        if self._failure:
            log.warning("%s", self.sentence)
        self._reporter.update(unsaved=self.sentence)

    async def _acknowledge(self) -> None:
        if not self._failure:
            await self._session.acknowledge(self.saved_version)


async def wait_for_retry(stopping: asyncio.Event) -> None:
    """Waits RETRY_S, or until stopped."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(RETRY_S):
            await stopping.wait()
