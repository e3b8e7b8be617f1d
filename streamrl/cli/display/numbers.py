"""Numbers of a run's metrics, and how they are printed."""

from collections.abc import Mapping, Sequence
from typing import Any

_BARS = " ▁▂▃▄▅▆▇█"


def metric_mean(lines: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """Mean of a metric over the lines that have it; None without one."""
    values = [line[name] for line in lines if line.get(name) is not None]
    return sum(values) / len(values) if values else None


def wait_shares(lines: Sequence[Mapping[str, Any]]) -> str:
    """Parts of the step time: `learner/wait_s` and, if there was any, `learner/wait_due_s`.

    Such as: waits 45 %, due groups 34 %. The second may overlap with the training of a part.
    """
    step_s = max(metric_mean(lines, "learner/step_s") or 1.0, 1e-9)
    percent = 100 * (metric_mean(lines, "learner/wait_s") or 0.0) / step_s
    percent_due = 100 * (metric_mean(lines, "learner/wait_due_s") or 0.0) / step_s
    due = f", due groups {percent_due:.0f} %" if percent_due >= 0.5 else ""
    return f"waits {percent:.0f} %{due}"


def duration(seconds: float) -> str:
    """Such as 1:05 or 2:00:30."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """The values between 0 and their largest as bars, averaged into at most `width` of them."""
    if not values:
        return ""
    size = -(-len(values) // width)
    means = [
        sum(values[i : i + size]) / len(values[i : i + size]) for i in range(0, len(values), size)
    ]
    highest = max(*means, 1e-9)
    bars = (_BARS[round(max(0.0, m) / highest * (len(_BARS) - 1))] for m in means)
    return "".join(bars) + f" {means[-1]:.3f}"
