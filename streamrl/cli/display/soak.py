"""The table at the end of a soak: a row for each reading that moved, one line for the others."""

import math
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from streamrl.cli.verification.soak_record import Row

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
