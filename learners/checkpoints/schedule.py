"""Schedules saves during training: when one begins, when it has ended, and what happens then.

A save is due every `learner.checkpoint.every` steps, and again soon after a failure; if another is
still running, it begins after that. At most MAX_UNSAVED intervals of steps are made without a
checkpoint, since the buffer keeps their groups until one is durable.

Invariant: the buffer is notified of a version only once a checkpoint of it is durable, and one save
runs at a time. If too many steps are unsaved, and at the end, it waits for a disk that cannot be
written, until an attempt succeeds or `stopping` is set.
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
    """Saves checkpoints of the session's learner; `begin` copies a state and writes it in a
    thread."""

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
        """The version of the newest durable checkpoint."""

    @property
    def sentence(self) -> str:
        """Which steps are unsaved and why; "" if the last save did not fail."""
        if not self._failure:
            return ""
        steps = f"the steps since {self.saved_version} are in no checkpoint"
        waits = ", and the learner waits" if self._must_wait() else ""
        return f"{self._failure}; {steps}{waits}"

    async def keep_up(self) -> None:
        """Begin a save that is due; wait if too many steps are unsaved."""
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
        """Notify the buffer if a save has ended; does not wait for a running one."""
        if self._save is not None and self._save.done():
            await self._end()
            await self._acknowledge()

    async def finish(self) -> bool:
        """Save the last version, after any running save; whether a checkpoint of it exists then.
        Does not notify the buffer."""
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
        """Wait until the running save has ended."""
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
