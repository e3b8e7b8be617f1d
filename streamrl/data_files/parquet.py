"""Parquet files, whose columns are held as Arrow has them: compact, and objects only row by row."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from streamrl.data_files.rows import Row, as_json_values, row
from streamrl.errors import ConfigError
from streamrl.extras import missing

_BATCH = 4096


class Parquet:
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

    def _row(self, number: int, fields: Any) -> Row:
        place = f"row {number + 1} of {self._name}"
        return row(self._setting, place, as_json_values(fields))


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
