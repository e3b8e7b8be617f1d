"""Dynamic sampling (DAPO, arXiv 2503.14476): leaves out groups whose rewards are all equal, since
they teach nothing.

At most `max_refills` groups are left out for each one kept, with credit for the first step's groups
in advance, so a generator whose groups are all uniform neither stalls nor spins.
"""

import logging

from streamrl.config.algorithm.advantages import GdpoSettings
from streamrl.config.algorithm.settings import AlgorithmSettings
from streamrl.types import TrajectoryGroup
from streamrl.types.rollouts import ALIKE_WITHIN

log = logging.getLogger(__name__)


class UniformFilter:
    """Decides on one generator's groups, one after the other."""

    def __init__(self, algorithm: AlgorithmSettings, groups_per_step: int) -> None:
        self._settings = settings = algorithm.dynamic_sampling
        self._metrics: tuple[str, ...] = () if settings is None else (settings.metric,)
        self._setting = "dynamic_sampling.metric"
        if self._metrics == ("reward",) and isinstance(algorithm.advantage_config, GdpoSettings):
            # The advantage compares each of these rewards among siblings, not their sum.
            weights, self._setting = algorithm.advantage_config.rewards, "advantage_config.rewards"
            self._metrics = tuple(name for name, weight in weights.items() if weight)
        self._most = 0.0 if settings is None else settings.max_refills * groups_per_step
        self._left = self._most
        self._warned: set[str] = set()

    def leaves_out(self, group: TrajectoryGroup) -> bool:
        """Whether the group is released instead of put."""
        if self._settings is None:
            return False
        is_uniform = all([self._are_alike(group, metric) for metric in self._metrics])
        if is_uniform and self._left >= 1:
            self._left -= 1
            log.info("prompt %d is left out: its rewards are all alike", group.prompt_index)
            return True
        if is_uniform:
            self._warn(
                "of too many groups all siblings have one %s: one of %g is trained nevertheless, "
                "as algorithm.dynamic_sampling.max_refills says",
                " and one ".join(self._metrics),
                self._settings.max_refills + 1,
            )
        self._left = min(self._most, self._left + self._settings.max_refills)
        return False

    def _are_alike(self, group: TrajectoryGroup, metric: str) -> bool:
        values = [
            t.reward if metric == "reward" else t.metrics.get(metric) for t in group.trajectories
        ]
        known = [value for value in values if value is not None]
        if len(known) < len(values):
            self._warn(
                "algorithm.%s: environment %s does not record %r, so no group is left out",
                self._setting,
                group.environment,
                metric,
            )
            return False
        return max(known) - min(known) <= ALIKE_WITHIN

    def _warn(self, sentence: str, *values: object) -> None:
        """Log each sentence only once."""
        if sentence not in self._warned:
            log.warning(sentence, *values)
        self._warned.add(sentence)
