"""What validators report to the learner: recorded once per version, and used for the early stop.

The weight sender calls `on_report` with each report, again with each Hello.
Invariant: a step waits for no validation.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping

from learners.checkpoints.records import RunRecords
from learners.status_reporter import StatusReporter
from streamrl.config import RunConfig
from streamrl.config.validation import ValidationSettings
from streamrl.errors import did_you_mean
from streamrl.tracking.jsonl import VERSION, best_of
from streamrl.types import LearnerActivity, ValidationReport
from streamrl.weights.sender import WeightSender

log = logging.getLogger(__name__)

ABSENT_S = 60.0
POLL_S = 0.5


class Validations:
    """The validations of one learner's versions; `records` keep the reports."""

    def __init__(
        self, config: RunConfig, sender: WeightSender, records: RunRecords, reporter: StatusReporter
    ) -> None:
        self._settings = config.validation
        self._is_validated = config.is_validated
        self._max_steps = config.run.max_steps
        self._sender = sender
        self._records = records
        self._reporter = reporter
        self._seen_s: float | None = None
        self._new: Mapping[str, float] = {}
        self._changed = asyncio.Event()

    def begin(self) -> None:
        """Accept reports from now on: the run's records have begun."""
        self._sender.handle_reports(self.on_report)

    def on_report(self, report: ValidationReport) -> None:
        """Record a report, unless its version was validated before."""
        version, recorded = report.policy_version, self._records.validated
        if version in recorded:
            return
        metrics = {**dict(report.metrics), VERSION: float(version)}
        if isinstance(every := self._settings.every, int):
            metrics["validation/num_missed"] = float(num_missed({*recorded, version}, every))
        if (watched := self._settings.watched_metric) not in metrics:
            hint = did_you_mean(watched, metrics)
            log.warning("validation.metric: there is no %r; %s", watched, hint)
        self._records.log_validation(version, metrics)
        self._new = metrics
        self._changed.set()

    @property
    def needs_last_version(self) -> bool:
        """Whether the run's last version gets validated: if no setting asks for a validator, only
        if there has been one."""
        self._look()
        is_there = self._settings.every is not None or self._seen_s is not None
        return self._is_validated and self._settings.at_end and is_there

    def take(self) -> Mapping[str, float]:
        """Metrics reported since the last call, for the line of a step."""
        self._look()
        new, self._new = self._new, {}
        return new

    def _look(self) -> None:
        if self._sender.validators():
            self._seen_s = time.monotonic()

    def stop_reason(self, policy_version: int) -> str:
        """Why the run ends at this version, as a sentence; "" if it goes on."""
        settings = self._settings
        patience = settings.early_stop.patience
        best = best_of(
            self._records.validated,
            settings.watched_metric,
            settings.best_is,
            min_improvement=settings.early_stop.min_improvement,
        )
        if not patience or best is None or best.num_since < patience:
            return ""
        return (
            f"stopped early at version {policy_version} of {self._max_steps}: "
            f"{settings.watched_metric} has not become better than {best.value:.4g}, that of "
            f"version {best.policy_version}, in {best.num_since} validations"
        )

    async def finish(self, policy_version: int, stopping: asyncio.Event) -> None:
        """Have the last version of the run validated.

        Waits for the report, at most `validation.end_wait_s`, and gives up if no validator has been
        there for ABSENT_S, or once `stopping` is set.
        """
        if not self.needs_last_version:
            return
        self._reporter.set_activity(LearnerActivity.VALIDATING)
        start_s = time.monotonic()
        while policy_version not in self._records.validated and not stopping.is_set():
            self._look()
            now_s = time.monotonic()
            seen_s = start_s if self._seen_s is None else self._seen_s
            if reason := _gave_up(self._settings, now_s - start_s, now_s - seen_s):
                log.warning("the last version, %d, is not validated: %s", policy_version, reason)
                return
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._changed.wait()


def num_missed(validated: set[int], every: int) -> int:
    """How many due versions got no validation since the first one: in each interval of `every`
    versions one is due, the first that reaches a validator.

    >>> num_missed({0, 10, 31}, 10)
    1
    """
    intervals = {version // every for version in validated}
    return max(intervals) + 1 - min(intervals) - len(intervals)


def _gave_up(settings: ValidationSettings, waited_s: float, absent_s: float) -> str:
    if waited_s >= settings.end_wait_s:
        return f"it took longer than validation.end_wait_s ({settings.end_wait_s:g} s)"
    return f"no validator has reported for {absent_s:.0f} s" if absent_s >= ABSENT_S else ""
