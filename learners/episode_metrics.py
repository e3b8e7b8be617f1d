"""What environments recorded of their episodes, as means by environment.

Invariant: an episode counts once, however many segments it has; the means do not depend on how the
batch was divided among ranks or cut into parts.
"""

from collections.abc import Iterable, Mapping, Sequence

from streamrl.types import TrajectoryGroup

Sums = Mapping[str, tuple[float, int]]
"""Under `episode/ENVIRONMENT/NAME`: the sum of the metric NAME, and over how many episodes."""


def episode_sums(groups: Sequence[TrajectoryGroup]) -> Sums:
    """Of the groups' `Trajectory.metrics`; an environment of one's own is named without folders."""
    return add_up(
        {f"episode/{group.environment.rpartition('/')[2]}/{name}": (value, 1)}
        for group in groups
        for metrics in _of_episodes(group)
        for name, value in metrics.items()
    )


def add_up(parts: Iterable[Sums]) -> Sums:
    """Of all parts together."""
    totals: dict[str, tuple[float, int]] = {}
    for part in parts:
        for name, (value, count) in part.items():
            total, number = totals.get(name, (0.0, 0))
            totals[name] = (total + value, number + count)
    return totals


def means(sums: Sums) -> dict[str, float]:
    return {name: total / count for name, (total, count) in sorted(sums.items())}


def _of_episodes(group: TrajectoryGroup) -> Iterable[Mapping[str, float]]:
    """Those of each episode's first segment, since every segment has them."""
    indices = group.episode_indices or range(len(group.trajectories))
    first = {i: t for i, t in reversed([*zip(indices, group.trajectories, strict=True)])}
    return [trajectory.metrics for trajectory in first.values()]
