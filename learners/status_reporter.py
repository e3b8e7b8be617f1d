"""The learner's word of itself: what it is at and since when, and why when that lasts too long.

Beats beside the loop, so a long step, a dead buffer or a wait for groups is told while it lasts:
each second in `learner.json` of the run's folder, which `streamrl status` reads, and in the log
once it has lasted `run.stall_s`, again each time that has doubled, and when it is over.

Invariant: telling never holds the learner up; a buffer that does not answer is a finding.
"""

import asyncio
import json
import logging
import time
from typing import Any

import msgspec

from buffers.try_stats import try_stats
from streamrl.config import RunConfig
from streamrl.diagnosis import Reading, diagnose
from streamrl.interfaces import TrajectoryBuffer
from streamrl.run_folder import LEARNER_FILE
from streamrl.types import LearnerActivity, LearnerStatus, replace
from streamrl.weights.sender import WeightSender

log = logging.getLogger(__name__)

BEAT_S = 1.0


class StatusReporter:
    """One learner's; the loop calls `begin` and `learn`, the daemon runs `run`."""

    def __init__(self, config: RunConfig, buffer: TrajectoryBuffer, sender: WeightSender) -> None:
        self._file = config.run.path / LEARNER_FILE
        self._stall_s = config.run.stall_s
        self._buffer = buffer
        self._sender = sender
        self._began_s = time.monotonic()
        self._tell_at_s = self._stall_s
        self._status = LearnerStatus(
            policy_version=0,
            learner_term=0,
            activity=LearnerActivity.ATTACHING,
            activity_s=0.0,
            time_s=time.time(),
        )

    @property
    def num_stalls(self) -> int:
        """How often the learner was at one thing for `run.stall_s` or longer."""
        return self._status.num_stalls

    def begin(self, activity: LearnerActivity, **known: Any) -> None:
        """From here on the learner is at this; going on with the same is no beginning."""
        if activity is not self._status.activity:
            if self._tell_at_s > self._stall_s:
                log.info("goes on after %.0f s", time.monotonic() - self._began_s)
            self._began_s, self._tell_at_s = time.monotonic(), self._stall_s
        self.learn(activity=activity, **known)

    def learn(self, **known: Any) -> None:
        """Fields of its status that are other now."""
        self._status = replace(self._status, **known)

    async def run(self) -> None:
        """Until cancelled. Waits BEAT_S between two beats, and a few seconds for the buffer where
        a stall is to be explained."""
        try:
            while True:
                await asyncio.sleep(BEAT_S)
                self._write()
                if time.monotonic() - self._began_s >= self._tell_at_s:
                    await self._tell()
        finally:
            self._write()

    async def _tell(self) -> None:
        began_s = self._began_s
        stats, unreachable = await try_stats(self._buffer)
        if self._began_s != began_s:
            return
        if self._tell_at_s == self._stall_s:
            self.learn(num_stalls=self._status.num_stalls + 1)
        self._tell_at_s = 2 * (time.monotonic() - began_s)
        reading = Reading(
            stall_s=self._stall_s, stats=stats, unreachable=unreachable, learner=self._now()
        )
        told = "; ".join(finding.sentence for finding in diagnose(reading))
        log.warning("stalled for %.0f s: %s", reading.waited_s, told or "for no reason known")

    def _now(self) -> LearnerStatus:
        return replace(
            self._status,
            activity_s=time.monotonic() - self._began_s,
            time_s=time.time(),
            num_receivers=int(self._sender.gauges()["num_receivers"]),
            behind=self._sender.behind(),
        )

    def _write(self) -> None:
        """Complete or not at all; without a disk the learner goes on."""
        unfinished = self._file.with_name(f".{self._file.name}.unfinished")
        try:
            unfinished.write_text(json.dumps(msgspec.to_builtins(self._now(), str_keys=True)))
            unfinished.replace(self._file)
        except OSError as error:
            log.debug("cannot write %s: %s", self._file, error)
