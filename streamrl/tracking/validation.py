"""`validation.jsonl`: a line for each validation, and which of them is the best."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from streamrl.tracking.jsonl import read_metrics

VALIDATION_FILE = "validation.jsonl"
VERSION = "validation/policy_version"
"""The metric that says which version the others of `validation/` are of."""


class Best(NamedTuple):
    """The best validation so far; `num_since` is how many came after it."""

    policy_version: int
    value: float
    num_since: int


def read_validations(run: Path) -> dict[int, dict[str, float]]:
    """The metrics of each validated version, oldest first."""
    lines = read_metrics(run / VALIDATION_FILE)
    return {line["step"]: {k: v for k, v in line.items() if k != "step"} for line in lines}


def best_of(
    validated: Mapping[int, Mapping[str, float]],
    metric: str,
    best_is: Literal["highest", "lowest"],
    *,
    min_improvement: float = 0.0,
) -> Best | None:
    """Of those that have the metric; a later one is better if it exceeds the best before by more
    than `min_improvement`. None if none has it."""
    sign = 1 if best_is == "highest" else -1
    best: Best | None = None
    for version in sorted(validated):
        value = validated[version].get(metric)
        if value is None:
            continue
        if best is None or sign * (value - best.value) > min_improvement:
            best = Best(version, value, 0)
        else:
            best = best._replace(num_since=best.num_since + 1)
    return best
