"""A row, the interface of a set of rows, and how values are read, converted and shown."""

import ast
import itertools
import json
import warnings
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, NamedTuple, Protocol

from streamrl.errors import ConfigError


class Row(NamedTuple):
    """`place` says where a person finds the row, such as "line 3 of a.jsonl"; numbers count from
    1."""

    fields: Mapping[str, Any]
    place: str


class RowSource(Protocol):
    """Rows by their number, which counts from 0; iteration may be faster than one by one."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> Row: ...

    def __iter__(self) -> Iterator[Row]: ...


class ConcatenatedRows:
    """The rows of several files, one after the other."""

    def __init__(self, parts: Sequence[RowSource]) -> None:
        self._parts = parts
        self._ends = tuple(itertools.accumulate(map(len, parts)))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, number: int) -> Row:
        part = bisect_right(self._ends, number)
        return self._parts[part][number - (self._ends[part - 1] if part else 0)]

    def __iter__(self) -> Iterator[Row]:
        return itertools.chain.from_iterable(self._parts)


def row(setting: str, place: str, fields: Any) -> Row:
    """
    Raises:
        ConfigError: the row is not an object.
    """
    if not isinstance(fields, dict):
        raise ConfigError(f"{setting}: {place} was {shown(fields)}; it must be a JSON object")
    return Row(fields, place)


def value_of_text(text: str) -> Any:
    """The value of a text in JSON, or as Python prints it (as in CSV files of pandas); None for
    other text.

    >>> value_of_text('[1, null]'), value_of_text("{'a': (1, 2)}"), value_of_text("f(1)")
    ([1, None], {'a': (1, 2)}, None)
    """
    for read in (json.loads, _literal):
        with suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            return read(text)
    return None


def _literal(text: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.literal_eval(text.strip())


_OF_JSON = frozenset({str, int, float, bool, type(None)})


def as_json_values(value: Any) -> Any:
    """Convert a value of Arrow or Python to what a JSON file has, at every depth: dates, decimals
    and bytes of text become text; arrays (which pandas uses for lists) and tuples become lists.
    Dates that a JSON library has turned into midnights become dates again; bytes of images stay.

    >>> as_json_values({"day": datetime(2024, 5, 1), "sum": Decimal("18.90"), "name": b"a"})
    {'day': '2024-05-01', 'sum': '18.90', 'name': 'a'}
    """
    match value:
        case dict() | Mapping():
            return {
                key: inner if type(inner) in _OF_JSON or key == "bytes" else as_json_values(inner)
                for key, inner in value.items()
            }
        case list() | tuple():
            return [v if type(v) in _OF_JSON else as_json_values(v) for v in value]
        case datetime() if value.tzinfo is None and value.time() == time.min:
            return str(value.date())
        case date() | time() | timedelta():
            return str(value)
        case Decimal():
            return format(value, "f")
        case bytes():
            with suppress(UnicodeDecodeError):
                return value.decode()
        case _ if getattr(value, "dtype", None) == "float32" and hasattr(value, "__array__"):
            # Floats with the decimals that they were written with. JAX arrays cannot be cast to
            # str, so `__array__`.
            return value.__array__().astype(str).astype(float).tolist()
        case _ if hasattr(value, "tolist"):
            return as_json_values(value.tolist())
    return value


def shown(value: object) -> str:
    """The value as shown in a message, cut to 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
