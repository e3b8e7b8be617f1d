"""What a soak reads and writes down, the trend of each reading, and their table.

`soak.jsonl` has one line per sample: the time, the process id of each role, and the values, named
SUBJECT/READING, where the subject is a role or `run`. A process that was started again begins
anew; of the lives that a role had, the longest is judged. The table has a row for each reading that
moved, and one line for the others.
"""

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tests.research.growth import Bound, Trend, trend
from tests.research.processes import FamilyReading

SOAK_FILE = "soak.jsonl"
RUN = "run"
_MB = 1e6
# A count that grows by one from quarter to quarter; medians of counts may be halves.
_COUNT = Bound(per_minute=0.01, resolution=0.9)

BOUNDS: Mapping[str, Bound] = MappingProxyType(
    {
        "rss_mb": Bound(per_minute=0.1, resolution=1.0),
        "descriptors": _COUNT,
        "sockets": _COUNT,
        "threads": _COUNT,
        "children": _COUNT,
        "zombies": _COUNT,
        "checkpoints_mb": Bound(per_minute=0.1, resolution=1.0),
        # A journal grows until it is cut, by up to a write-ahead log of this size.
        "buffer_mb": Bound(per_minute=0.1, resolution=20.0),
        "weights_mb": Bound(per_minute=0.1, resolution=1.0),
        "quarantine_mb": Bound(per_minute=0.1, resolution=0.1),
        "other_mb": Bound(per_minute=0.1, resolution=0.1),
        # A line per step, and a few per fault.
        "records_mb": Bound(per_minute=5.0, resolution=1.0),
        "logs_mb": Bound(per_minute=0.25, resolution=0.25),
        "temporary_files": _COUNT,
        "shared_memory_names": _COUNT,
        "buffer_call_ms": Bound(per_minute=0.5, resolution=5.0, relative=0.2),
        "step_s": Bound(per_minute=0.01, resolution=0.1, relative=0.2),
    }
)
_FOLDERS = ("checkpoints", "buffer", "weights", "quarantine", "logs")
_RECORDS = (".jsonl",)


@dataclass(frozen=True)
class Row:
    """One reading of one subject; `num_lives` of its process, 1 for the run's."""

    subject: str
    reading: str
    num_lives: int
    trend: Trend


def process_values(role: str, reading: FamilyReading) -> dict[str, float]:
    return {
        f"{role}/rss_mb": reading.rss_bytes / _MB,
        f"{role}/descriptors": reading.num_descriptors,
        f"{role}/sockets": reading.num_sockets,
        f"{role}/threads": reading.num_threads,
        f"{role}/children": reading.num_children,
        f"{role}/zombies": reading.num_zombies,
    }


def disk_values(folder: Path) -> dict[str, float]:
    """The run's folder by its parts; `records` are the files with a line per step."""
    sizes = dict.fromkeys((*_FOLDERS, "records", "other"), 0)
    for path, num_bytes in _files(folder):
        if path.name != SOAK_FILE:
            sizes[_part(path.relative_to(folder))] += num_bytes
    return {f"{RUN}/{part}_mb": num_bytes / _MB for part, num_bytes in sizes.items()}


def rows(record: Path, warm_up_s: float) -> list[Row]:
    """A row for each reading of each subject, in order of appearance."""
    lines = record.read_text().splitlines() if record.exists() else []
    samples = [json.loads(line) for line in lines]
    names = dict.fromkeys(name for sample in samples for name in sample["values"])
    return [_row(name, samples, warm_up_s) for name in names]


def _row(name: str, samples: list[dict[str, Any]], warm_up_s: float) -> Row:
    subject, _, reading = name.partition("/")
    lives: dict[int, list[tuple[float, float]]] = {}
    for sample in samples:
        if name in sample["values"]:
            life = sample["lives"].get(subject, 0)
            lives.setdefault(life, []).append((sample["time_s"], sample["values"][name]))
    longest = max(lives.values(), key=lambda points: points[-1][0] - points[0][0])
    times_s, values = zip(*longest, strict=True)
    return Row(subject, reading, len(lives), trend(times_s, values, BOUNDS[reading], warm_up_s))


def _files(folder: Path) -> Iterator[tuple[Path, int]]:
    """Those that are removed meanwhile are left out."""
    for parent, _, names in os.walk(folder):
        for path in (Path(parent, name) for name in names):
            with contextlib.suppress(OSError):
                yield path, path.stat().st_size


def _part(path: Path) -> str:
    if path.parts[0] in _FOLDERS:
        return path.parts[0]
    return "records" if path.suffix in _RECORDS else "other"


WIDTH = 110
_HEADERS = ("subject", "lives", "reading", "first", "last", "per minute", "10 % .. 90 %", "verdict")


def soak_table(rows: Sequence[Row]) -> RenderableType:
    """`first` and `last` are the medians of the first and the last quarter after the warm-up."""
    table = Table(title="readings after the warm-up", box=None, width=WIDTH, pad_edge=False)
    for header in _HEADERS:
        is_name = header in ("subject", "reading", "verdict")
        table.add_column(header, justify="left" if is_name else "right", no_wrap=True)
    for row in rows:
        if not _is_constant(row):
            table.add_row(*_cells(row), style="red" if row.trend.grows else None)
    constant = ", ".join(
        f"{row.subject} {row.reading} {row.trend.first:.6g}" for row in rows if _is_constant(row)
    )
    return Group(table, Text(f"constant: {constant or 'none'}"))


def _is_constant(row: Row) -> bool:
    trend = row.trend
    return trend.first == trend.last and trend.low == trend.high == 0


def _cells(row: Row) -> tuple[str, ...]:
    trend = row.trend
    numbers = (trend.first, trend.last, trend.per_minute)
    spread = f"{_number(trend.low)} .. {_number(trend.high)}"
    cells = (row.subject, str(row.num_lives), row.reading, *map(_number, numbers))
    return (*cells, spread, str(trend.verdict))


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{round(value, 3):.6g}"
