"""What a learner writes into its run's folder: checkpoints, and lines of metrics for each step.

Invariant: a checkpoint is saved only once the lines of its steps are on disk. Nothing is written
before `begin`, which a learner calls once it is attached to the buffer.
"""

import contextlib
import logging
import math
import shutil
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from learners.checkpoints.restore import LearnerStart
from learners.checkpoints.writer import CheckpointWriter
from learners.session import LearnerState
from learners.step_record import Recorder, forget, record_settings
from learners.trainer import Trainer
from streamrl.checkpoints import abandoned
from streamrl.checkpoints.find import checkpoints_of
from streamrl.checkpoints.history import require_surviving, survives
from streamrl.checkpoints.retention import Validated
from streamrl.config import RunConfig
from streamrl.errors import CheckpointWriteError, did_you_mean
from streamrl.interfaces import Tracker
from streamrl.samples.files import validations_after
from streamrl.tracking import CLOSE_S, Trackers, open_trackers
from streamrl.tracking.jsonl import (
    METRICS_FILE,
    TRAINED_FILE,
    VALIDATION_FILE,
    JsonlTracker,
    read_validations,
)
from streamrl.types import GroupHeader

log = logging.getLogger(__name__)

_LINE_FILES = (METRICS_FILE, TRAINED_FILE, VALIDATION_FILE)


class _Files(NamedTuple):
    """The open files of lines."""

    trained: JsonlTracker
    validations: JsonlTracker
    trackers: Trackers


class RunRecords:
    """The records of a learner that starts from `start`; call `begin` first.

    Only the first rank has one; the others join `save` with just a `CheckpointWriter`. `validating`
    returns the versions being validated, whose checkpoints are kept; `more_trackers` get the same
    as those of `tracking`.
    """

    def __init__(
        self,
        config: RunConfig,
        start: LearnerStart,
        validating: Callable[[], Collection[int]] = tuple,
        more_trackers: Sequence[Tracker] = (),
        recorder: Recorder | None = None,
    ) -> None:
        self._config = config
        self._more_trackers = more_trackers
        self._start = start
        self._recorder = recorder
        self._opened: _Files | None = None
        self._writer = CheckpointWriter(
            config, start.history, lambda: Validated(self.validated, validating())
        )
        self._values: tuple[float, ...] = ()
        self._saving: tuple[Future[Path], int] | None = None
        self._metric_names: tuple[str, ...] = ()
        self.validated: Mapping[int, Mapping[str, float]] = {}
        """Validation metrics by version of this history."""

    def begin(self) -> None:
        """Make this learner's history the surviving one; may be repeated after an error.

        Raises:
            CheckpointWriteError: the disk is full, for example.
            ConfigError: a package that `tracking` asks for is not installed.
        """
        start, run = self._start, self._config.run.path
        try:
            later = validations_after(run, start.policy_version)
            files = (*(run / name for name in _LINE_FILES), *later)
            found = abandoned.begin(run, start.history, start.policy_version, start.reason, files)
            for path in later:
                path.unlink(missing_ok=True)
            _take_lines(run, start.lines_from)
            first_step = start.policy_version + 1
            is_continued = _is_same_folder(start.lines_from, run)
            forget(run, first_step if is_continued else 1)
            if self._recorder is not None:
                record_settings(self._config, first_step)
            self.validated = read_validations(run)
            goes_on = partial(survives, checkpoints_of(run), start.history)
            self._opened = _Files(
                JsonlTracker(run / TRAINED_FILE, first_step=first_step, survives=goes_on),
                JsonlTracker(run / VALIDATION_FILE, first_step=first_step, survives=goes_on),
                open_trackers(
                    self._config, first_step=first_step, more=self._more_trackers, survives=goes_on
                ),
            )
        except OSError as error:
            raise CheckpointWriteError(f"{run} cannot be written: {error}") from error
        if found is not None:
            log.warning(
                "%s: the checkpoints at version %s and the lines of the steps after %d belong to "
                "another history; they are kept in %s",
                start.reason,
                ", ".join(map(str, found.versions)),
                start.policy_version,
                run / found.folder,
            )

    @property
    def _files(self) -> _Files:
        assert self._opened is not None, "begin comes first"
        return self._opened

    def log(
        self,
        step: int,
        headers: Sequence[GroupHeader],
        metrics: Mapping[str, Any],
        steered: str = "",
    ) -> None:
        """Write the lines of a step that trained the groups with these headers; lines that cannot
        be written wait in memory. `steered` says how and why the bound on staleness changed.

        Raises:
            FencedError: another learner writes the lines of the run.
        """
        # A learner cut off from the buffer does not learn from it that another has taken over.
        require_surviving(checkpoints_of(self._config.run.path), self._start.history)
        line = {
            "prompt_indices": [header.prompt_index for header in headers],
            # For the audit of the bound on staleness.
            "oldest_version": min(header.oldest_version for header in headers),
            "newest_version": max(header.newest_version for header in headers),
            "max_staleness": self._config.buffer.largest_staleness,
            "overdue": self._config.buffer.overdue,
            **({"steered": steered} if steered else {}),
        }
        self._files.trained.log(line, step)
        self._files.trackers.log(metrics, step)
        self._metric_names = tuple(metrics)
        value = metrics.get(self._config.learner.checkpoint.best_by, math.nan)
        if math.isfinite(value):
            self._values = (*self._values, value)

    def log_validation(self, policy_version: int, metrics: Mapping[str, float]) -> None:
        """Write the line of a validation, and pass it to the trackers."""
        self.validated = {**self.validated, policy_version: metrics}
        self._files.validations.log(metrics, policy_version)
        self._files.trackers.log_validation(metrics, policy_version)
        self._files.trackers.log_validation_samples(self._config.run.path, policy_version)

    def log_samples(self, samples: Sequence[Mapping[str, Any]], step: int) -> None:
        """Pass samples to the trackers that show tables."""
        self._files.trackers.log_samples(samples, step)

    def save(self, trainer: Trainer, state: LearnerState) -> Future[Path]:
        """Save a checkpoint of this state, after the lines of its steps; returns once the state is
        copied, while a thread writes it. See `CheckpointWriter.save` for what the future raises."""
        saved, count = self._saving or (None, 0)
        self._saving = None
        # If a checkpoint could not be written, the next one takes over its values of `best_by`.
        if saved is not None and saved.exception() is None:
            self._values = self._values[count:]
        future = self._writer.save(trainer, state, self._means(), self._flush)
        self._saving = future, len(self._values)
        return future

    def _means(self) -> dict[str, float]:
        """The mean of `best_by` over the steps since the previous checkpoint."""
        settings, values = self._config.learner.checkpoint, self._values
        if values:
            return {settings.best_by: statistics.fmean(values)}
        is_measured = settings.is_best_validated or settings.best_by in self._metric_names
        if settings.keep_best and not is_measured:
            hint = did_you_mean(settings.best_by, self._metric_names)
            log.warning("learner.checkpoint.best_by: no metric %r; %s", settings.best_by, hint)
        return {}

    def _flush(self) -> None:
        try:
            self._files.trained.flush()
            self._files.trackers.flush()
            if self._recorder is not None:
                self._recorder.flush()
        except OSError as error:
            raise OSError(f"the records of its steps cannot be written: {error}") from error

    def close(self, wait_s: float = CLOSE_S) -> None:
        """Wait for the save under way, and for the trackers, `wait_s` at most; lines of steps that
        are in no checkpoint may be lost."""
        self._writer.close()
        if self._opened is not None:
            for file in (self._opened.trained, self._opened.validations):
                with contextlib.suppress(OSError):
                    file.close()
            self._opened.trackers.close(wait_s)


def _take_lines(run: Path, lines_from: Path | None) -> None:
    """Replace the run's lines by those of the history, from another folder if that has them."""
    if _is_same_folder(lines_from, run):
        return
    for name in _LINE_FILES:
        unfinished = run / f".{name}.unfinished"
        if lines_from is None or not (lines_from / name).exists():
            unfinished.write_bytes(b"")
        else:
            shutil.copyfile(lines_from / name, unfinished)
        unfinished.replace(run / name)


def _is_same_folder(one: Path | None, other: Path) -> bool:
    return one is not None and one.absolute() == other.absolute()
