"""Whether a series of readings grows without bound, told from noise, steps, plateaus and warm-up.

Of one life of a process, or of the whole run for what outlives processes. What is left after the
warm-up is cut into quarters. A series grows if all of this holds:

    it rises            the median slope between two readings is `Bound.per_minute` or more, and
                        nine in ten of these slopes are not below 0 (of noise, half are)
    in every quarter    the median of each quarter is above that of the one before it by
                        `Bound.resolution` or more (a step rises in one, a plateau in none)
    and does not stop   the last of these rises is at least half of the first (a cache that fills,
                        or memory that settles, rises less and less)

So a leak is found once a quarter of the time adds more than the resolution, and a warm-up that is
slower than the soak may hide it: then a longer soak shows it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

MIN_READINGS = 12
_MOST_POINTS = 200
_QUARTERS = 4


class Verdict(StrEnum):
    STEADY = "steady"
    GROWS = "grows"
    NOT_JUDGED = "too short"


@dataclass(frozen=True)
class Bound:
    """The growth that a reading may have: per minute, and from quarter to quarter.

    `resolution` is in the reading's unit, `relative` a part of the first quarter's median; the
    larger one holds.
    """

    per_minute: float
    resolution: float
    relative: float = 0.0


@dataclass(frozen=True)
class Trend:
    """Medians of the first and the last quarter, and the slope per minute: its median and the tenth
    and ninetieth percentile. NaN if there are too few readings."""

    verdict: Verdict
    first: float = math.nan
    last: float = math.nan
    per_minute: float = math.nan
    low: float = math.nan
    high: float = math.nan

    @property
    def grows(self) -> bool:
        return self.verdict is Verdict.GROWS


def trend(
    times_s: Sequence[float], values: Sequence[float], bound: Bound, warm_up_s: float
) -> Trend:
    """Of one life; `times_s` are in order and in seconds, each with its value."""
    times, readings = np.asarray(times_s, np.float64), np.asarray(values, np.float64)
    is_warm = times >= (times[0] if len(times) else 0.0) + warm_up_s
    times, readings = times[is_warm], readings[is_warm]
    if len(times) < MIN_READINGS:
        return Trend(Verdict.NOT_JUDGED)
    medians = np.array([np.median(part) for part in np.array_split(readings, _QUARTERS)])
    low, slope, high = np.percentile(_slopes_per_minute(times, readings), [10, 50, 90])
    rises = np.diff(medians)
    least = max(bound.resolution, bound.relative * abs(float(medians[0])))
    grows = (
        slope >= bound.per_minute
        and low >= 0
        and bool((rises >= least).all())
        and rises[-1] >= rises[0] / 2
    )
    return Trend(
        Verdict.GROWS if grows else Verdict.STEADY,
        float(medians[0]),
        float(medians[-1]),
        float(slope),
        float(low),
        float(high),
    )


def _slopes_per_minute(
    times: NDArray[np.float64], readings: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Between all readings that are a quarter of the time or more apart; of many readings in a row
    the median stands for all."""
    num_points = min(len(times), _MOST_POINTS)
    xs = np.array([np.median(part) for part in np.array_split(times, num_points)])
    ys = np.array([np.median(part) for part in np.array_split(readings, num_points)])
    earlier, later = np.triu_indices(num_points, k=1)
    apart = xs[later] - xs[earlier]
    is_far = apart >= (xs[-1] - xs[0]) / _QUARTERS
    slopes: NDArray[np.float64] = (ys[later] - ys[earlier])[is_far] / apart[is_far] * 60.0
    return slopes
