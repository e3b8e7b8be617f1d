"""The lines of the comparisons with peers as tables in Markdown.

    PYTHONPATH=. .venv/bin/python -m tests.benchmarks.peers.table lines.jsonl

One table per benchmark with a row for each system: the median of its runs, and behind it the lowest
and the highest where there are several. What was skipped or failed is listed with its reason.
"""

import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Line = Mapping[str, Any]
NAMES = ("system", "mode", "workload", "buffer", "peer", "size", "threads", "micro_batches")
IGNORED = ("benchmark", "round", "seed")


def main() -> None:
    lines = [json.loads(text) for text in Path(sys.argv[1]).read_text().splitlines() if text]
    print("\n\n".join(tables(lines)))


def tables(lines: Sequence[Line]) -> Iterable[str]:
    for benchmark in dict.fromkeys(line["benchmark"] for line in lines):
        of_benchmark = [line for line in lines if line["benchmark"] == benchmark]
        measured = [line for line in of_benchmark if not _missing(line)]
        if measured:
            yield f"**{benchmark}**\n\n{table(measured)}"
        for line in of_benchmark:
            if reason := _missing(line):
                yield f"**{benchmark}**: {line.get('system', '')} {reason}".replace("  ", " ")


def table(lines: Sequence[Line]) -> str:
    """
    >>> print(table([{"system": "a", "step_s": 1.0}, {"system": "a", "step_s": 3.0}]))
    | run | step_s |
    |---|---|
    | a | 2 (1 to 3) |
    """
    rows: dict[str, list[Line]] = {}
    for line in lines:
        name = ", ".join(str(line[key]) for key in NAMES if line.get(key) is not None)
        rows.setdefault(name, []).append(line)
    columns = [c for c in dict.fromkeys(key for line in lines for key in line) if _shows(c, lines)]
    head = [f"| run | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    body = [
        f"| {name} | {' | '.join(_cell([line.get(c) for line in of]) for c in columns)} |"
        for name, of in rows.items()
    ]
    return "\n".join([*head, *body])


def _shows(column: str, lines: Sequence[Line]) -> bool:
    values = [line[column] for line in lines if line.get(column) is not None]
    is_number = bool(values) and all(
        isinstance(v, int | float) and not isinstance(v, bool) for v in values
    )
    return is_number and column not in (*NAMES, *IGNORED)


def _cell(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    if len(known) == 1:
        return f"{known[0]:.4g}"
    return f"{statistics.median(known):.4g} ({min(known):.4g} to {max(known):.4g})"


def _missing(line: Line) -> str:
    return next((f"{key}: {line[key]}" for key in ("skipped", "failed") if key in line), "")


if __name__ == "__main__":
    main()
