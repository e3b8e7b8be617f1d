"""Rows that Arrow holds: compact, and objects only row by row.

Parquet files, and data sets of the `datasets` library: folders that it saved, and names on the
Hugging Face hub. A name is downloaded once; with HF_HUB_OFFLINE=1 it is read from the library's
cache.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from streamrl.data_files.rows import Row, as_json_values, row
from streamrl.errors import ConfigError
from streamrl.extras import missing

_BATCH = 4096


class _Arrow:
    """Rows of a file or a data set of this name."""

    _setting: str
    _name: str

    def _row(self, number: int, fields: Any) -> Row:
        place = f"row {number + 1} of {self._name}"
        return row(self._setting, place, as_json_values(fields))


class Parquet(_Arrow):
    """The rows of one file."""

    def __init__(self, setting: str, path: Path) -> None:
        self._setting, self._name = setting, path.name
        with _parquet_file(setting, path) as file:
            self._table = file.read()

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, number: int) -> Row:
        (fields,) = self._table.slice(number, 1).to_pylist()
        return self._row(number, fields)

    def __iter__(self) -> Iterator[Row]:
        number = 0
        for batch in self._table.to_batches(max_chunksize=_BATCH):
            for fields in batch.to_pylist():
                yield self._row(number, fields)
                number += 1


def count_parquet(setting: str, path: Path) -> int:
    """As the file's footer says."""
    with _parquet_file(setting, path) as file:
        return int(file.metadata.num_rows)


@contextmanager
def _parquet_file(setting: str, path: Path) -> Iterator[Any]:
    try:
        import pyarrow.lib
        import pyarrow.parquet
    except ImportError as error:
        raise missing(f"{setting}: {path}", error) from error
    try:
        with pyarrow.parquet.ParquetFile(path, memory_map=True) as file:
            yield file
    except pyarrow.lib.ArrowInvalid as error:
        raise ConfigError(f"{setting}: {path} is not parquet: {error}") from error


_HUB = "datasets:"


def is_data_set(source: str) -> bool:
    """Whether it is datasets:NAME, or a folder."""
    return source.startswith(_HUB) or os.path.isdir(source)


class DataSetRows(_Arrow):
    """The rows of a `datasets.Dataset`, which maps its files into memory."""

    def __init__(self, setting: str, name: str, data_set: Any) -> None:
        self._setting, self._name, self._data_set = setting, name, data_set

    def __len__(self) -> int:
        return len(self._data_set)

    def __getitem__(self, number: int) -> Row:
        return self._row(number, self._data_set[number])

    def __iter__(self) -> Iterator[Row]:
        return (self._row(number, fields) for number, fields in enumerate(self._data_set))

    @property
    def files(self) -> tuple[Path, ...]:
        """Those that hold its rows, and which of them it has."""
        return tuple(Path(file["filename"]) for file in self._data_set.cache_files)


def open_data_set(
    setting: str, source: str, *, subset: str | None, split: str | None
) -> DataSetRows:
    """
    Raises:
        ConfigError: the library is not installed, has no such data set, or there are several
            splits and none is named.
    """
    try:
        import datasets
    except ImportError as error:
        raise missing(f"{setting}: {source}", error) from error
    datasets.disable_progress_bars()
    try:
        if source.startswith(_HUB):
            name = source.removeprefix(_HUB)
            found = datasets.load_dataset(name, subset, split=split)
        else:
            name, found = Path(source).name, datasets.load_from_disk(source)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{setting}: cannot read {source}: {error}") from error
    return DataSetRows(setting, name, _split(setting, source, found, split))


def _split(setting: str, source: str, found: Any, split: str | None) -> Any:
    """The one split of a dictionary of them, or that which is named."""
    if not isinstance(found, dict):
        return found
    if split is None and len(found) == 1:
        (only,) = found.values()
        return only
    if split not in found:
        was = "has several splits" if split is None else f"has no split {split!r}"
        raise ConfigError(f"{setting}: {source} {was}; set split to one of {', '.join(found)}")
    return found[split]
