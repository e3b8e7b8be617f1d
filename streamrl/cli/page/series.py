"""The metrics of a run of any length as a bounded number of points.

Invariant: a file is read a line at a time, and what is kept does not grow with it: where there are
too many points, two neighbors become one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streamrl.tracking.jsonl import read_lines

NUM_POINTS = 200


@dataclass
class Point:
    """Consecutive lines as one: the last one's step and time, and sums of each metric."""

    step: int
    time_s: float
    num_lines: int = 1
    sums: dict[str, tuple[float, int, float, float]] = field(default_factory=dict)
    """Sum, count, smallest, largest."""

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> "Point":
        sums = {
            name: (value, 1, value, value)
            for name, value in line.items()
            if "/" in name and isinstance(value, int | float)
        }
        return cls(line["step"], line.get("time_s") or 0.0, sums=sums)

    def add(self, later: "Point") -> None:
        for name, (total, count, low, high) in later.sums.items():
            mine = self.sums.get(name, (0.0, 0, low, high))
            both = (mine[0] + total, mine[1] + count, min(mine[2], low), max(mine[3], high))
            self.sums[name] = both
        self.step, self.time_s = later.step, later.time_s
        self.num_lines += later.num_lines


def read_points(path: Path) -> list[Point]:
    """At most 2 NUM_POINTS, each of as many lines but for the last one."""
    points: list[Point] = []
    every = 1
    for line in read_lines(path):
        if points and points[-1].num_lines < every:
            points[-1].add(Point.of(line))
            continue
        if len(points) == 2 * NUM_POINTS:
            for i in range(0, len(points), 2):
                points[i].add(points[i + 1])
            points, every = points[::2], 2 * every
        points.append(Point.of(line))
    return points


def as_series(points: list[Point]) -> dict[str, Any]:
    """Steps and times of the points, and of each metric the means, with the smallest and largest
    values where a point stands for several lines; null where it was not measured."""
    names = dict.fromkeys(name for point in points for name in point.sums)
    is_band = any(point.num_lines > 1 for point in points)
    return {
        "step": [point.step for point in points],
        "time": [round(point.time_s, 1) for point in points],
        "metrics": {name: _values(points, name, is_band) for name in names},
    }


def _values(points: list[Point], name: str, is_band: bool) -> dict[str, list[float | None]]:
    found = [point.sums.get(name) for point in points]
    means = [None if f is None else _short(f[0] / f[1]) for f in found]
    if not is_band:
        return {"mean": means}
    low = [None if f is None else _short(f[2]) for f in found]
    high = [None if f is None else _short(f[3]) for f in found]
    return {"mean": means} if low == high else {"mean": means, "low": low, "high": high}


def _short(value: float) -> float:
    """Four digits are more than a chart shows."""
    rounded = float(f"{value:.4g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 2**53 else rounded
