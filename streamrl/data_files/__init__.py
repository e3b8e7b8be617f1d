"""Rows of files and data sets, each with its place, read on demand.

    rows       Row, the interface of a set of rows, and how values are read and shown
    text       JSONL (also compressed), JSON, CSV
    arrow      parquet, and folders and names of the `datasets` library

Invariant: a returned row is an object. If a file cannot be read, or a row is no object, the error
begins with the setting and names the place. The same rows have the same values in every format,
except in CSV, where all values are text. A new format is a suffix, a class with `__len__` and
`__getitem__`, and a branch in `_open_file`.
"""

import glob
import hashlib
from functools import partial
from pathlib import Path

from streamrl.data_files.arrow import count_parquet, is_data_set, open_data_set, read_parquet
from streamrl.data_files.rows import (
    ConcatenatedRows,
    Row as Row,
    RowSource as RowSource,
    as_json_values as as_json_values,
    shown as shown,
    value_of_text as value_of_text,
)
from streamrl.data_files.text import COMPRESSED, JsonLines, count_lines, read_csv, read_json
from streamrl.errors import ConfigError, reading

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", *COMPRESSED)


def has_rows(source: str) -> bool:
    """Whether the source has countable rows: a file, a pattern of files, or a data set.

    >>> has_rows("train/*.parquet"), has_rows("datasets:openai/gsm8k"), has_rows("addition")
    (True, True, False)
    """
    return source.endswith(SUFFIXES) or is_data_set(source)


def open_rows(setting: str, source: str, *, subset: str | None, split: str | None) -> RowSource:
    """The rows of a source that `has_rows`; several files follow each other, sorted by name.

    Raises:
        ConfigError: it cannot be read, has another format, or has no rows.
    """
    rows: RowSource
    if is_data_set(source):
        rows = open_data_set(setting, source, subset=subset, split=split)
    else:
        files = tuple(_open_file(setting, path) for path in _matching(setting, source))
        rows = files[0] if len(files) == 1 else ConcatenatedRows(files)
    if not len(rows):
        raise ConfigError(f"{setting}: {source} holds no rows")
    return rows


def count_rows(
    setting: str, source: str, *, subset: str | None = None, split: str | None = None
) -> int:
    """The number of rows of `open_rows`, with its errors; the rows' content is read only if
    counting needs it."""
    if is_data_set(source):
        return len(open_rows(setting, source, subset=subset, split=split))
    counts = [_count(setting, path) for path in _matching(setting, source)]
    if not sum(counts):
        raise ConfigError(f"{setting}: {source} holds no rows")
    return sum(counts)


def fingerprint(
    setting: str, source: str, *, subset: str | None, split: str | None
) -> tuple[int, str]:
    """Identify the rows of `open_rows` by their number and the SHA-256 of all files' bytes, one
    file after the other. Reads every byte; raises as `open_rows` does."""
    if is_data_set(source):
        data_set = open_data_set(setting, source, subset=subset, split=split)
        num_rows, files = len(data_set), data_set.files
    else:
        num_rows, files = count_rows(setting, source), _matching(setting, source)
    digest = hashlib.sha256()
    for path in files:
        with reading(path, setting), path.open("rb") as file:
            for block in iter(partial(file.read, 2**20), b""):
                digest.update(block)
    return num_rows, digest.hexdigest()


def files_of(source: str) -> tuple[Path, ...]:
    """The files that a pattern of files matches, sorted; the file itself if it is no pattern."""
    if not glob.has_magic(source) or Path(source).exists():
        return (Path(source),)
    return tuple(Path(match) for match in sorted(glob.glob(source, recursive=True)))


def _matching(setting: str, source: str) -> tuple[Path, ...]:
    files = files_of(source)
    if not files:
        raise ConfigError(f"{setting}: no file matches {source}")
    return files


def _open_file(setting: str, path: Path) -> RowSource:
    with reading(path, setting):
        match path.suffix:
            case ".parquet":
                return read_parquet(setting, path)
            case ".json":
                return read_json(setting, path)
            case ".csv":
                return read_csv(setting, path)
            case _:
                return JsonLines(setting, path)


def _count(setting: str, path: Path) -> int:
    with reading(path, setting):
        match path.suffix:
            case ".parquet":
                return count_parquet(setting, path)
            case ".json" | ".csv":
                return len(_open_file(setting, path))
            case _:
                return count_lines(setting, path)
