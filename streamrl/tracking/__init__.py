"""Trackers: where a step's metrics go. `metrics.jsonl` is always written.

A new tracker is a class with the methods of `streamrl.interfaces.Tracker` and a line in
`open_trackers`. A tracker other than `metrics.jsonl` that fails is switched off and logged; the run
continues.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from streamrl.config import RunConfig
from streamrl.interfaces import Tracker
from streamrl.tracking.console import ConsoleTracker
from streamrl.tracking.jsonl import METRICS_FILE, JsonlTracker

log = logging.getLogger(__name__)


def open_trackers(
    config: RunConfig, *, first_step: int, more: Sequence[Tracker] = ()
) -> "Trackers":
    """Those that `tracking` asks for, and `more`.

    `metrics.jsonl` loses its lines of `first_step` and later: they are of steps after the
    checkpoint from which the run resumes.

    Raises:
        ConfigError: a package that was asked for is not installed.
    """
    tracking, folder = config.tracking, config.run.path
    makers: list[Callable[[], Tracker | JsonlTracker]] = [
        lambda: JsonlTracker(folder / METRICS_FILE, first_step=first_step)
    ]
    if tracking.console:
        makers.append(ConsoleTracker)
    if tracking.tensorboard:
        from streamrl.tracking.tensorboard import TensorboardTracker

        makers.append(lambda: TensorboardTracker(folder / "tensorboard", first_step=first_step))
    if tracking.wandb != "off":
        from streamrl.tracking.wandb import WandbTracker

        makers.append(lambda: WandbTracker(config))
    return Trackers([*(make() for make in makers), *more])


class Trackers:
    """All of a run's trackers as one."""

    def __init__(self, trackers: Sequence[Tracker | JsonlTracker]) -> None:
        self._trackers = tuple(trackers)

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        for tracker in self._trackers:
            # It keeps what it cannot write, and `flush` says so.
            if isinstance(tracker, JsonlTracker):
                tracker.log(metrics, step)
                continue
            self._try(tracker, lambda t: t.log(metrics, step))

    def log_validation(self, metrics: Mapping[str, Any], policy_version: int) -> None:
        """`metrics.jsonl` has them in the line of the next step."""
        for tracker in self._others:
            self._try(tracker, lambda t: t.log_validation(metrics, policy_version))

    def log_samples(self, samples: Sequence[Mapping[str, Any]], step: int) -> None:
        """To those that show tables."""
        for tracker in self._others:
            self._try(tracker, lambda t: t.log_samples(samples, step))

    def flush(self) -> None:
        """Wait until every line of `metrics.jsonl` is on disk.

        Raises:
            OSError: it is full, for example.
        """
        for tracker in self._trackers:
            if isinstance(tracker, JsonlTracker):
                tracker.flush()

    @property
    def _others(self) -> tuple[Tracker, ...]:
        return tuple(t for t in self._trackers if not isinstance(t, JsonlTracker))

    def _try(self, tracker: Tracker, call: Callable[[Tracker], None]) -> None:
        try:
            call(tracker)
        except Exception:
            log.exception("%s is switched off", type(tracker).__name__)
            self._trackers = tuple(t for t in self._trackers if t is not tracker)

    def close(self) -> None:
        for tracker in self._trackers:
            with suppress(OSError):
                tracker.close()
