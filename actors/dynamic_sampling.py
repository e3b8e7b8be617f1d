"""Dynamic sampling (DAPO, arXiv 2503.14476): groups whose siblings' rewards are all alike, and so
teach nothing, are left out of training.

At most `max_refills` groups are left out for each one that is kept, and for each of the
first step's beforehand. So a generator whose groups are all alike neither stands still nor spins.
"""

import logging
from collections.abc import Iterable

from streamrl.config.algorithm.settings import DynamicSamplingSettings
from streamrl.types import TrajectoryGroup
from streamrl.types.rollouts import ALIKE_WITHIN

log = logging.getLogger(__name__)


class UniformFilter:
    """The groups of one generator, one after the other."""

    def __init__(self, settings: DynamicSamplingSettings | None, groups_per_step: int) -> None:
        self._settings = settings
        self._most = 0.0 if settings is None else settings.max_refills * groups_per_step
        self._left = self._most
        self._has_warned = False

    def leaves_out(self, group: TrajectoryGroup) -> bool:
        """Whether the group is released instead of put."""
        if self._settings is None:
            return False
        is_uniform = self._is_uniform(group, self._settings.metric)
        if is_uniform and self._left >= 1:
            self._left -= 1
            log.info("prompt %d is left out: its rewards are all alike", group.prompt_index)
            return True
        if is_uniform:
            self._warn(
                "of too many groups all siblings have one %s: one of %g is trained nevertheless, "
                "as algorithm.dynamic_sampling.max_refills says",
                self._settings.metric,
                self._settings.max_refills + 1,
            )
        self._left = min(self._most, self._left + self._settings.max_refills)
        return False

    def _is_uniform(self, group: TrajectoryGroup, metric: str) -> bool:
        if metric == "reward":
            return _are_alike(t.reward for t in group.trajectories)
        values = [t.metrics.get(metric) for t in group.trajectories]
        known = [value for value in values if value is not None]
        if len(known) < len(values):
            self._warn(
                "algorithm.dynamic_sampling.metric: environment %s does not record %r, so no group "
                "is left out",
                group.environment,
                metric,
            )
        return len(known) == len(values) and _are_alike(known)

    def _warn(self, sentence: str, *values: object) -> None:
        """Once for all groups."""
        if not self._has_warned:
            log.warning(sentence, *values)
        self._has_warned = True


def _are_alike(values: Iterable[float]) -> bool:
    known = tuple(values)
    return max(known) - min(known) <= ALIKE_WITHIN
