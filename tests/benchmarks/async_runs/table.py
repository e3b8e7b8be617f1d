"""The lines of bench_async as tables in Markdown, means over the seeds."""

from collections.abc import Iterator, Sequence
from typing import Any

from tests.benchmarks.async_runs.figures import with_ratios
from tests.benchmarks.async_runs.records import Line

_COLUMNS = {
    "seconds": "seconds",
    "ratio": "against the faster synchronous",
    "ratio_to_reward": "to the same reward",
    "wait_s": "learner waits, s",
    "wait_due_s": "of it for due groups, s",
    "staleness_max": "largest staleness",
    "dropped": "dropped (answer length)",
    "unfinished": "unfinished (answer length)",
    "trained_response_length_mean": "trained length, mean",
    "trained_response_length_p99": "p99",
    "sampled_response_length_mean": "sampled length, mean",
    "sampled_response_length_p99": "p99",
    "ks_p": "KS p, smallest",
}


def tables(lines: Sequence[Line]) -> str:
    """One table a workload; a row a mode, in the order of the lines."""
    parts = []
    for workload in dict.fromkeys(line["workload"] for line in lines):
        chosen = with_all_ratios([line for line in lines if line["workload"] == workload])
        parts.append(f"{heading(chosen)}\n\n" + "\n".join(table(chosen)))
    return "\n\n".join(parts)


def with_all_ratios(lines: Sequence[Line]) -> list[Line]:
    """Also of the lines that were printed without the synchronous runs beside them."""
    seeds = dict.fromkeys(line["seed"] for line in lines)
    by_seed = [[line for line in lines if line["seed"] == seed] for seed in seeds]
    return [line for of_seed in by_seed for line in with_ratios(of_seed)]


def heading(lines: Sequence[Line]) -> str:
    seeds = len({line["seed"] for line in lines})
    start = starts(lines)
    return f"{lines[0]['workload']}: {lines[0]['steps']} steps, {seeds} seeds; at the start {start}"


def starts(lines: Sequence[Line]) -> str:
    """Held-out exact match of the models that the runs start from, by bucket."""
    first = {line["seed"]: line["curve"][0]["exact"] for line in lines}
    names = next(iter(first.values()))
    return ", ".join(
        f"{show(average([exact[name] for exact in first.values()]))} of {name}" for name in names
    )


def table(lines: Sequence[Line]) -> Iterator[str]:
    buckets = list(lines[0]["curve"][-1]["exact"])
    names = ["mode", *_COLUMNS.values(), *(f"exact, {bucket}" for bucket in buckets)]
    yield "| " + " | ".join(names) + " |"
    yield "|" + "---|" * len(names)
    for mode in dict.fromkeys(line["mode"] for line in lines):
        of_mode = [line for line in lines if line["mode"] == mode]
        cells = [cell(of_mode, column) for column in _COLUMNS]
        exact = [average([line["curve"][-1]["exact"][b] for line in of_mode]) for b in buckets]
        yield "| " + " | ".join([mode, *cells, *map(show, exact)]) + " |"


def cell(lines: Sequence[Line], column: str) -> str:
    """Means over the seeds; sums of what was dropped; the smallest p-value."""
    match column:
        case "dropped":
            counts = [sum(line.get(column, {}).values()) for line in lines]
            return with_length(sum(counts), lines, "dropped_answer_length_mean")
        case "unfinished":
            count = sum(line.get(column, 0) for line in lines)
            return with_length(count, lines, "unfinished_answer_length_mean")
        case "ks_p" | "staleness_max":
            values = [line[column] for line in lines if column in line]
            worst = min if column == "ks_p" else max
            return show(worst(values, default=None))
        case _:
            return show(average([line.get(column) for line in lines]))


def with_length(count: int, lines: Sequence[Line], column: str) -> str:
    lengths = [line[column] for line in lines if line.get(column) is not None]
    return f"{count} ({show(average(lengths))})" if count else "0"


def average(values: Sequence[float | None]) -> float | None:
    """The mean; None where a value is."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if len(known) == len(values) else None


def show(value: Any) -> str:
    return "-" if value is None else f"{value:.3g}"
