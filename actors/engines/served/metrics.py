"""Gauges of a server from its Prometheus page; the names are each server's own.

A page has one `name{label="value",...} number` per line; comments begin with #.
"""

from collections.abc import Mapping
from typing import TypeAlias

# Our gauge: the server's name, and a label that has to be in the braces ("" for any).
Names: TypeAlias = Mapping[str, tuple[str, str]]


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
                sums[gauge] += float(value)
    return sums
