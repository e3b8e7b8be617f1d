"""Rows held by Arrow: compact in memory; each becomes an object when it is read.

Parquet files, and data sets of the `datasets` library: folders that it saved, and names on the
Hugging Face hub. A name is downloaded once; with HF_HUB_OFFLINE=1 it is read from the library's
cache. Images stay encoded: the library would decode them all, without limits.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from streamrl.data_files.rows import Row, as_json_values, row
from streamrl.errors import ConfigError
from streamrl.extras import missing

_BATCH = 256


class ArrowRows:
    """The rows of an Arrow table, or of a data set in that format, which maps its files into
    memory. `files` are the files that contain a data set's rows and their indices."""

    def __init__(self, setting: str, name: str, table: Any, files: tuple[Path, ...] = ()) -> None:
        self._setting, self._name, self._table = setting, name, table
        self.files = files

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, number: int) -> Row:
        (found,) = self._slice(number, number + 1)
        return found

    def __iter__(self) -> Iterator[Row]:
        for start in range(0, len(self), _BATCH):
            yield from self._slice(start, start + _BATCH)

    def _slice(self, start: int, stop: int) -> Iterator[Row]:
        table = self._table[start:stop]
        for schema in self._schemas:
            table = table.cast(schema)
        for number, fields in enumerate(table.to_pylist(), start + 1):
            place = f"row {number} of {self._name}"
            yield row(self._setting, place, as_json_values(fields))

    @cached_property
    def _schemas(self) -> tuple[Any, ...]:
        """What rows are cast to, one after the other, so that floats of 32 bits become the shortest
        decimals that they stand for, as in files of text: as one of 64 bits, 0.1 would be
        0.10000000149."""
        import pyarrow

        schema = self._table[:1].schema
        if "float" not in str(schema.types):
            return ()
        steps = (pyarrow.large_string(), pyarrow.float64())
        return tuple(
            pyarrow.schema(f.with_type(_with_floats(f.type, floats)) for f in schema)
            for floats in steps
        )


def _with_floats(kind: Any, floats: Any) -> Any:
    """The type with 32-bit floats replaced by `floats`, at every depth of lists and records."""
    import pyarrow

    types = pyarrow.types
    if types.is_float32(kind):
        return floats
    if types.is_struct(kind):
        fields = (kind.field(i) for i in range(kind.num_fields))
        return pyarrow.struct([f.with_type(_with_floats(f.type, floats)) for f in fields])
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        values = kind.value_field.with_type(_with_floats(kind.value_type, floats))
        if types.is_fixed_size_list(kind):
            return pyarrow.list_(values, kind.list_size)
        return (pyarrow.list_ if types.is_list(kind) else pyarrow.large_list)(values)
    return kind


def read_parquet(setting: str, path: Path) -> ArrowRows:
    with _parquet_file(setting, path) as file:
        try:
            table = file.read()
        except NotImplementedError:
            # A column of lists with 2 GiB or more, such as images.
            from pyarrow import Table

            table = Table.from_batches(file.iter_batches(_BATCH), file.schema_arrow)
        return ArrowRows(setting, path.name, table)


def count_parquet(setting: str, path: Path) -> int:
    """The number of rows, by the file's footer."""
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
    except pyarrow.lib.ArrowException as error:
        raise ConfigError(f"{setting}: {path} is not parquet: {error}") from error


_HUB = "datasets:"


def is_data_set(source: str) -> bool:
    """Whether the source is datasets:NAME or a folder."""
    return source.startswith(_HUB) or os.path.isdir(source)


def open_data_set(setting: str, source: str, *, subset: str | None, split: str | None) -> ArrowRows:
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
    except Exception as error:  # The library's errors have no common class.
        is_general = isinstance(error, datasets.exceptions.DatasetGenerationError)
        reason = (is_general and error.__cause__) or error
        hint = "" if source.startswith(_HUB) else f"; other files there are {_HUB}{source}"
        sentence = f"{setting}: cannot read {source}: {reason}".rstrip(".")
        raise ConfigError(f"{sentence}{hint}") from error
    data_set = _split(setting, source, found, split)
    files = tuple(Path(file["filename"]) for file in data_set.cache_files)
    return ArrowRows(setting, name, data_set.with_format("arrow"), files)


def _split(setting: str, source: str, found: Any, split: str | None) -> Any:
    """The split that is named, or the only one of a dictionary."""
    if not isinstance(found, dict):
        return found
    if split is None and len(found) == 1:
        (only,) = found.values()
        return only
    if split not in found:
        was = "has several splits" if split is None else f"has no split {split!r}"
        raise ConfigError(f"{setting}: {source} {was}; set split to one of {', '.join(found)}")
    return found[split]
