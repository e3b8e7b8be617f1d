"""How busy generators and learner are over the last steps, for `streamrl.diagnosis.scaling`.

Invariant: a window is of the same processes from its first step to its last, and has no step that
waited for them to start.
"""

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from streamrl.diagnosis.scaling import Load, busy_frac, scaling_metrics
from streamrl.types import BufferStats, GeneratorStatus

NUM_STEPS = 20
WINDOW_S = 60.0
_MIN_STEPS = 3


class _Step(NamedTuple):
    """Times of a step, and the generators at its end."""

    step_s: float
    wait_s: float
    train_s: float
    generators: Mapping[str, GeneratorStatus]


class ScalingWindow:
    """The last NUM_STEPS steps, or those of WINDOW_S if they are more; the learner calls `metrics`
    after each step."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._steps: deque[_Step] = deque()

    def metrics(
        self, stats: BufferStats, step_s: float, metrics: Mapping[str, float]
    ) -> dict[str, float]:
        """Those of the window that ends with this step, whose metrics are given."""
        generators = {status.session: status for status in stats.generators}
        if self._steps and self._steps[-1].generators.keys() != generators.keys():
            self._steps.clear()
        waits = metrics.get("learner/wait_s", 0.0), metrics.get("learner/train_s", 0.0)
        self._steps.append(_Step(step_s, *waits, generators))
        self._forget()
        return scaling_metrics(self._load(stats.capacity))

    def _load(self, capacity: int) -> Load | None:
        """None before there are enough steps, or unless every generator says how busy it is.

        The first step of the window ends where it begins.
        """
        first, *steps = self._steps
        last = steps[-1].generators if len(steps) >= _MIN_STEPS else {}
        if not last or not all(status.max_num_groups for status in last.values()):
            return None
        busy = (
            status.max_num_groups * busy_frac(status, first.generators[session])
            for session, status in last.items()
        )
        num_steps = len(steps)
        return Load(
            step_s=sum(step.step_s for step in steps) / num_steps,
            wait_s=sum(step.wait_s for step in steps) / num_steps,
            train_s=sum(step.train_s for step in steps) / num_steps,
            num_generators=len(last),
            num_ranks=self._num_ranks,
            max_groups=sum(status.max_num_groups for status in last.values()),
            busy_groups=sum(busy),
            capacity=capacity,
        )

    def _forget(self) -> None:
        total_s = sum(step.step_s for step in self._steps)
        while len(self._steps) > NUM_STEPS + 1 and total_s - self._steps[0].step_s > WINDOW_S:
            total_s -= self._steps.popleft().step_s
