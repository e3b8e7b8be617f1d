"""Gauges of a server from its Prometheus page; the names are each server's own.

A page has one `name{label="value",...} number` per line; comments begin with #.

Invariant: a reading is finite and not negative, whatever the page holds.
"""

from collections.abc import Mapping
from typing import TypeAlias

# Our gauge: the server's name, and a label that has to be in the braces ("" for any).
Names: TypeAlias = Mapping[str, tuple[str, str]]
LARGEST = 2.0**53
"""The largest reading: beyond it floats are not exact, and a status has integers of 64 bits."""


def readings(page: str, names: Names) -> dict[str, float]:
    """Our gauges, each the sum over the lines that match its name; 0 without such a line.

    >>> page = 'vllm:num_requests_running{engine="0"} 3.0'
    >>> readings(page, {"num_active": ("vllm:num_requests_running", "")})
    {'num_active': 3.0}
    """
    sums = dict.fromkeys(names, 0.0)
    for line in page.splitlines():
        series, _, value = line.rpartition(" ")
        name, _, labels = series.partition("{")
        for gauge, (wanted, label) in names.items():
            if name == wanted and label in labels:
                sums[gauge] += _number(value)
    return {gauge: min(total, LARGEST) for gauge, total in sums.items()}


def _number(text: str) -> float:
    """0 for what is no number that a gauge can have."""
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return min(value, LARGEST) if value > 0 else 0.0
