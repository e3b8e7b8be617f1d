"""The rows of a JSONL, JSON or parquet file, each with its place in the file.

Invariant: a row that is returned is an object; a file that cannot be read, and a row that is none,
is one sentence that begins with the setting and names the place.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from streamrl.errors import ConfigError

SUFFIXES = (".jsonl", ".json", ".parquet")


class Row(NamedTuple):
    """`place` is where a person finds it, such as "line 3 of a.jsonl"; both count from 1."""

    fields: Mapping[str, Any]
    place: str


def read_rows(setting: str, path: Path) -> tuple[Row, ...]:
    """Every row of the file, in its order.

    Raises:
        ConfigError: the file cannot be read, has another format, or has no rows.
    """
    with _explained(setting, path):
        rows = tuple(_rows(setting, path))
    if not rows:
        raise ConfigError(f"{setting}: {path} holds no rows")
    return rows


def count_rows(setting: str, path: Path) -> int:
    """How many `read_rows` returns; what they hold is looked at only where counting needs it.

    Raises:
        ConfigError: as `read_rows`.
    """
    if path.suffix == ".jsonl":
        with _explained(setting, path), path.open("rb") as lines:
            count = sum(not line.isspace() for line in lines)
    elif path.suffix == ".parquet":
        with _explained(setting, path), _parquet_file(setting, path) as file:
            count = file.metadata.num_rows
    else:
        return len(read_rows(setting, path))
    if not count:
        raise ConfigError(f"{setting}: {path} holds no rows")
    return count


@contextmanager
def _explained(setting: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{setting}: cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{setting}: {path} is not UTF-8: {error}") from error


def _rows(setting: str, path: Path) -> Iterator[Row]:
    match path.suffix:
        case ".parquet":
            return _numbered(setting, path, "row", enumerate(_parquet(setting, path), 1))
        case ".json":
            return _numbered(setting, path, "row", enumerate(_json(setting, path), 1))
        case _:
            return _numbered(setting, path, "line", _json_lines(setting, path))


def _numbered(
    setting: str, path: Path, unit: str, rows: Iterable[tuple[int, Any]]
) -> Iterator[Row]:
    for number, fields in rows:
        place = f"{unit} {number} of {path.name}"
        if not isinstance(fields, dict):
            raise ConfigError(f"{setting}: {place} was {shown(fields)}; it must be a JSON object")
        yield Row(fields, place)


def _json_lines(setting: str, path: Path) -> Iterator[tuple[int, Any]]:
    # Not splitlines(), which splits at characters that may stand in a JSON string.
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except ValueError as error:
                place = f"line {number} of {path.name}"
                raise ConfigError(f"{setting}: {place} is not JSON: {error}") from error


def _json(setting: str, path: Path) -> list[Any]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{setting}: {path} is not JSON: {error}") from error
    if not isinstance(rows, list):
        raise ConfigError(f"{setting}: {path} was {shown(rows)}; it must be a list of objects")
    return rows


def _parquet(setting: str, path: Path) -> list[Any]:
    with _parquet_file(setting, path) as file:
        rows: list[Any] = file.read().to_pylist()
    return rows


@contextmanager
def _parquet_file(setting: str, path: Path) -> Iterator[Any]:
    try:
        import pyarrow.lib
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(
            f"{setting}: {path} is parquet; install the extra: pip install 'streamrl[parquet]'"
        ) from error
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            yield file
    except pyarrow.lib.ArrowInvalid as error:
        raise ConfigError(f"{setting}: {path} is not parquet: {error}") from error


def shown(value: object) -> str:
    """The value in a sentence, cut to 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
