"""Whether a process that failed is started again, and when.

    exit code 2, 3 or 6              never: a restart cannot change a configuration, a takeover, or
                                     a training whose gradients are not finite
    before the first new step        a reward that fails for every group ends the launch at once,
                                     what raises at the same line twice ends it the second time
    else                             up to `max_restarts` times within `restart_window_s`, and as
                                     often without a new step, after a back-off

A budget of restarts per time is that of systemd (StartLimitBurst in StartLimitIntervalSec) and of
Erlang's supervisors (intensity in period). A start may take longer than the window divided by the
restarts, so restarts that brought no step stay counted.

Invariant: steps that are trained again after a restart are not new ones.
"""

import signal
import time
from collections.abc import Callable

from streamrl.config.run import RunSettings
from streamrl.error_record import ErrorRecord
from streamrl.errors import (
    EXIT_CONFIG,
    EXIT_CRASHED,
    EXIT_DIVERGED,
    EXIT_FENCED,
    EXIT_ROLLOUTS,
    error_of,
)

FIRST_DELAY_S, LONGEST_DELAY_S = 0.5, 30.0
HEALTHY_S = 60.0
"""A process that ran so long is started again after the first delay."""


class RestartBudget:
    """That of one process; `step` is the newest step of the run when the launch begins."""

    def __init__(
        self, settings: RunSettings, step: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._first_step = self._newest_step = step
        self._restarts_s: tuple[float, ...] = ()
        self._num_without_step = 0
        self._num_short = 0
        self._started_s = clock()
        self._last_origin = ""

    def on_start(self) -> None:
        """The process has been started."""
        self._started_s = self._clock()

    def delay_s(self, exit_code: int, record: ErrorRecord | None, step: int) -> float:
        """Seconds until the next start of a process that failed, while the run is at this step.

        Raises:
            StreamRLError: of the failure's kind: it is not started again.
        """
        now_s, sentence = self._clock(), sentence_of(exit_code, record)
        self._count_step(step)
        if not self._may_help(exit_code, record):
            raise error_of(exit_code, sentence)
        self._require_room(now_s, exit_code, sentence)
        self._restarts_s = (*self._restarts_s, now_s)
        self._num_without_step += 1
        self._num_short = 0 if now_s - self._started_s >= HEALTHY_S else self._num_short + 1
        return min(FIRST_DELAY_S * 2.0 ** max(0, self._num_short - 1), LONGEST_DELAY_S)

    def _count_step(self, step: int) -> None:
        if step > self._newest_step:
            self._newest_step = step
            self._num_without_step = 0

    def _may_help(self, exit_code: int, record: ErrorRecord | None) -> bool:
        """Whether a restart can end otherwise than this start did."""
        if exit_code in (EXIT_CONFIG, EXIT_FENCED, EXIT_DIVERGED):
            return False
        origin = record.origin if record else ""
        is_alike = exit_code == EXIT_CRASHED and origin != "" and origin == self._last_origin
        self._last_origin = origin
        if self._newest_step > self._first_step:
            return True
        return exit_code != EXIT_ROLLOUTS and not is_alike

    def _require_room(self, now_s: float, exit_code: int, sentence: str) -> None:
        window_s, allowed = self._settings.restart_window_s, self._settings.max_restarts
        self._restarts_s = tuple(at_s for at_s in self._restarts_s if now_s - at_s < window_s)
        if self._num_without_step >= allowed:
            scope = "without a new step of the run"
        elif len(self._restarts_s) >= allowed:
            scope = f"within run.restart_window_s ({window_s:g} s)"
        else:
            return
        raise error_of(
            exit_code,
            f"{sentence}; started again {allowed} times (run.max_restarts) {scope}",
        )


def sentence_of(exit_code: int, record: ErrorRecord | None) -> str:
    """Why a process ended: its own sentence, else what its exit code tells."""
    if record is not None:
        return record.sentence
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    names = {number.value: number.name for number in signal.Signals}
    hint = ", as when memory runs out" if exit_code == -signal.SIGKILL else ""
    return f"was killed by {names.get(-exit_code, f'signal {-exit_code}')}{hint}"
