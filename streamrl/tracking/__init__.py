"""Trackers: where a step's metrics go. `metrics.jsonl` is always written.

A new tracker is a class with the methods of `streamrl.interfaces.Tracker` and a line in
`open_trackers`. A tracker other than `metrics.jsonl` that fails is switched off and logged; the run
continues. A tracker that hangs does not stop the run either: all except `metrics.jsonl` are called
one after the other in a separate thread, and only `close` waits for it. If a table fails, only that
table is lost.
"""

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from msgspec import to_builtins

from streamrl.config import RunConfig
from streamrl.interfaces import Tracker
from streamrl.samples.files import side_by_side
from streamrl.tracking.dashboards import TensorboardTracker, TrackioTracker, WandbTracker
from streamrl.tracking.jsonl import METRICS_FILE, JsonlTracker

CLOSE_S = 60.0
MAX_WAITING = 1000
"""Calls that may wait for the trackers; while so many wait, further calls are lost."""

log = logging.getLogger(__name__)
_progress = logging.getLogger("streamrl.progress")
_MOST_SHOWN = 12
_SHOWN = {
    "reward": "reward/mean",
    "staleness": "buffer/staleness_mean",
    "ess": "mismatch/rollout_is_eff_sample_size",
    "length": "response_length/mean",
    "wait_s": "learner/wait_s",
    "step_s": "learner/step_s",
}


class ConsoleTracker(Tracker):
    """Logs one line per step in the learner's log; samples have their own files."""

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        shown = [f"{k} {metrics[name]:.3g}" for k, name in _SHOWN.items() if name in metrics]
        _progress.info("step %d  %s", step, "  ".join(shown))

    def log_validation(self, metrics: Mapping[str, Any], policy_version: int) -> None:
        shown = [
            f"{name.removeprefix('validation/')} {value:.3g}"
            for name, value in metrics.items()
            if "@" in name
        ]
        _progress.info(
            "validation of version %d  %s", policy_version, "  ".join(shown[:_MOST_SHOWN])
        )


def open_trackers(
    config: RunConfig,
    *,
    first_step: int,
    more: Sequence[Tracker] = (),
    survives: Callable[[], bool] = lambda: True,
) -> "Trackers":
    """Open the trackers that `tracking` asks for, and add `more`; `survives` is as in
    `JsonlTracker`.

    `metrics.jsonl` loses its lines of `first_step` and later: these steps come after the checkpoint
    from which the run resumes.

    Raises:
        ConfigError: a package that was asked for is not installed.
    """
    tracking, folder = config.tracking, config.run.path
    file = JsonlTracker(folder / METRICS_FILE, first_step=first_step, survives=survives)
    others: list[Tracker] = []
    if tracking.console:
        others.append(ConsoleTracker())
    if tracking.tensorboard:
        others.append(TensorboardTracker(folder / "tensorboard", first_step=first_step))
    if tracking.wandb != "off":
        others.append(WandbTracker(config))
    if tracking.trackio:
        others.append(TrackioTracker(config))
    return Trackers(file, [*others, *more])


class Trackers:
    """All of a run's trackers as one."""

    def __init__(self, file: JsonlTracker, others: Sequence[Tracker]) -> None:
        self._file, self._others = file, tuple(others)
        self._calls: queue.Queue[Callable[[Tracker], object] | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._run, name="trackers", daemon=True)
        if self._others:
            self._thread.start()

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        # The file tracker keeps what it cannot write; `flush` raises then.
        self._file.log(metrics, step)
        self._call(lambda t: t.log(metrics, step))

    def log_validation(self, metrics: Mapping[str, Any], policy_version: int) -> None:
        """Log a validation to all others; `metrics.jsonl` gets it in the line of the next step."""
        self._call(lambda t: t.log_validation(metrics, policy_version))

    def log_samples(self, samples: Sequence[Mapping[str, Any]], step: int) -> None:
        """Log samples of a step to the trackers that show tables."""
        self._call_for_table(lambda t: t.log_samples(samples, step))

    def log_validation_samples(self, run: Path, policy_version: int) -> None:
        """Log responses of validations to the trackers that show tables; their thread reads the
        files."""
        read = cache(lambda: [to_builtins(one) for one in side_by_side(run, num_versions=10)])

        def show(tracker: Tracker) -> None:
            if samples := read():
                tracker.log_validation_samples(samples, policy_version)

        self._call_for_table(show)

    def flush(self) -> None:
        """Wait until every line of `metrics.jsonl` is on disk. Raises OSError, for example if the
        disk is full."""
        self._file.flush()

    def close(self, wait_s: float = CLOSE_S) -> None:
        """Close the trackers. Wait until all have taken what they were given, at most `wait_s`."""
        with suppress(OSError):
            self._file.close()
        if not self._thread.is_alive():
            return
        self._call(lambda t: t.close())
        self._call(None)
        self._thread.join(wait_s)
        if self._thread.is_alive():
            log.warning(
                "%s has not taken its last lines within %g s: left alone", self._called, wait_s
            )

    def _call_for_table(self, call: Callable[[Tracker], object]) -> None:
        def spared(tracker: Tracker) -> None:
            try:
                call(tracker)
            except Exception as error:
                name = type(tracker).__name__
                log.warning("%s lacks a table of samples: %s", name, error, exc_info=True)

        self._call(spared)

    def _call(self, call: Callable[[Tracker], object] | None) -> None:
        """Queue a call of every tracker for the thread; drop it if the queue is full or no tracker
        is left."""
        if not self._thread.is_alive():
            return
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            log.debug("%s has not taken what it was given %d calls ago", self._called, MAX_WAITING)

    def _run(self) -> None:
        """Make the queued calls until `close`, or until no tracker is left; waits for the next
        call."""
        while self._others and (call := self._calls.get()) is not None:
            for tracker in self._others:
                self._called = type(tracker).__name__
                try:
                    call(tracker)
                except Exception:
                    log.exception("%s is switched off", self._called)
                    self._others = tuple(t for t in self._others if t is not tracker)
