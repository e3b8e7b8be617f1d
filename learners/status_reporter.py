"""Reports the learner's activity: every second to a file, and to the log when it stalls.

The file is `learner.json` of the run's folder, which `streamrl status` reads. The log explains an
activity that has lasted `run.stall_s`, explains it again each time its duration has doubled, and
says when it ends. It runs as a separate task, so it reports during long steps and waits.

Invariant: a report never delays the learner; a buffer that does not answer is a finding.
Waits REPORT_S between reports, and for the buffer's stats, as long as `try_stats` allows.
"""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from buffers.connect import try_stats
from streamrl.config import RunConfig
from streamrl.diagnosis import Reading, diagnose, waits_for
from streamrl.diagnosis.causes import SHOWN_AFTER_S, failed_groups
from streamrl.diagnosis.reading import startup_s
from streamrl.interfaces import TrajectoryBuffer
from streamrl.run_folder import LEARNER_FILE
from streamrl.types import (
    BufferStats,
    DropReason,
    LearnerActivity,
    LearnerStatus,
    ValidatorStatus,
    replace,
)
from streamrl.weights.sender import WeightSender

log = logging.getLogger(__name__)

REPORT_S = 1.0


class StatusReporter:
    """Reports one learner's status, which the learner updates; the daemon runs `run`."""

    def __init__(self, config: RunConfig, buffer: TrajectoryBuffer, sender: WeightSender) -> None:
        self._file = config.run.path / LEARNER_FILE
        self._stall_s = config.run.stall_s
        self._buffer = buffer
        self._sender = sender
        self._startup_s = startup_s(config)
        self._start_s = self._validator_seen_s = time.monotonic()
        self._is_validated = config.is_validated
        self._awaits_validator = config.validation.every is not None
        self._report_stall_after_s = self._stall_s
        self._status = LearnerStatus(
            policy_version=0,
            learner_term=0,
            activity=LearnerActivity.ATTACHING,
            activity_s=0.0,
            time_s=time.time(),
        )

        self.on_report: Callable[[LearnerStatus], None] = lambda _: None
        """Called with each report."""

    @property
    def num_stalls(self) -> int:
        """The number of activities that lasted `run.stall_s` or longer."""
        return self._status.num_stalls

    @property
    def _activity_s(self) -> float:
        return time.monotonic() - self._start_s

    def set_activity(self, activity: LearnerActivity, **fields: Any) -> None:
        """Update the activity and other fields; repeated calls do not restart its duration."""
        if activity is not self._status.activity:
            if self._report_stall_after_s > self._stall_s:
                log.info("the learner goes on after %.0f s", self._activity_s)
            self._start_s, self._report_stall_after_s = time.monotonic(), self._stall_s
            self.update(waits_for="")
        self.update(activity=activity, **fields)

    def update(self, **fields: Any) -> None:
        self._status = replace(self._status, **fields)

    def on_stats(self, stats: BufferStats) -> None:
        """Update the counts of dropped groups, by reason."""
        self._update_failures(stats)
        self.update(dropped=stats.books.dropped)

    async def run(self) -> None:
        """Report until cancelled, and then once more."""
        try:
            while True:
                await asyncio.sleep(REPORT_S)
                self._write()
                is_waiting = self._status.activity is LearnerActivity.WAITING
                is_stalled = self._activity_s >= self._report_stall_after_s
                if is_stalled or (is_waiting and self._activity_s >= SHOWN_AFTER_S):
                    await self._explain(is_waiting=is_waiting, is_stalled=is_stalled)
        finally:
            self._write()

    async def _explain(self, *, is_waiting: bool, is_stalled: bool) -> None:
        """Report what the learner waits for; log why it stalls, if it still does once the buffer
        has answered."""
        start_s = self._start_s
        stats, unreachable = await try_stats(self._buffer)
        if stats is not None:
            self._update_failures(stats)
        if self._start_s != start_s:
            return
        reading = Reading(
            stall_s=self._stall_s,
            stats=stats,
            unreachable=unreachable,
            learner=self._current(),
            startup_s=self._startup_s,
        )
        if is_waiting:
            self.update(waits_for=waits_for(reading))
        if is_stalled:
            if self._report_stall_after_s == self._stall_s:
                self.update(num_stalls=self._status.num_stalls + 1)
            self._report_stall_after_s = 2 * self._activity_s
            causes = "; ".join(finding.sentence for finding in diagnose(reading))
            log.warning("stalled for %.0f s: %s", reading.waited_s, causes or "no cause is known")

    def _update_failures(self, stats: BufferStats) -> None:
        """Keep the sentence if groups failed but the generator that knew why restarted or left."""
        has_failed = DropReason.FAILED in stats.books.dropped
        is_known = not has_failed or any(g.last_failure is not None for g in stats.generators)
        if is_known or not self._status.failures:
            self.update(failures=failed_groups(stats))

    def _current(self) -> LearnerStatus:
        return replace(
            self._status,
            activity_s=self._activity_s,
            time_s=time.time(),
            num_receivers=int(self._sender.gauges()["num_receivers"]),
            behind=self._sender.behind(),
            left_out=self._sender.left_out(),
            stored=self._sender.stored(),
            validating=_progress(self._sender.validating()),
            no_validator_s=self._no_validator_s(),
        )

    def _no_validator_s(self) -> float | None:
        """A validator starts after the first step; if no setting asks for one, it may be absent."""
        if not self._is_validated:
            return None
        now_s = time.monotonic()
        if self._sender.validators():
            self._validator_seen_s, self._awaits_validator = now_s, True
        if not self._awaits_validator:
            return None
        if not self._status.policy_version:
            self._validator_seen_s = now_s
        return now_s - self._validator_seen_s

    def _write(self) -> None:
        """Replace the whole file; the learner does not depend on it."""
        unfinished = self._file.with_name(f".{self._file.name}.unfinished")
        status = self._current()
        self.on_report(status)
        content = json.dumps(msgspec.to_builtins(status, str_keys=True)).encode()
        try:
            try:
                unfinished.write_bytes(content)
                unfinished.replace(self._file)
            except OSError:
                # A full disk allows this, but no new file.
                with self._file.open("r+b", buffering=0) as file:
                    file.write(content)
                    file.truncate()
        except OSError as error:
            log.debug("cannot write %s: %s", self._file, error)


def _progress(validating: Mapping[int, ValidatorStatus]) -> str:
    """Such as: version 20 is being validated: 12 of 256 prompts."""
    return "; ".join(
        f"version {version} is being validated: {status.num_done} of {status.num_prompts} prompts"
        for version, status in sorted(validating.items())
    )
