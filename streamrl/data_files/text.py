"""Text files: JSON lines, which stay on disk, and JSON and CSV, which are read as a whole."""

import csv
import gzip
import io
import json
import os
import sys
import zlib
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import zstandard
from xxhash import xxh3_64_intdigest

from streamrl.data_files.rows import Row, row, shown
from streamrl.errors import ConfigError, reading

COMPRESSED = (".jsonl.gz", ".jsonl.zst")
_MARK = "\ufeff"
"""The byte order mark with which Windows begins text files."""


class JsonLines:
    """One object per line. Only the positions of the lines are in memory, except for a compressed
    file, which is there as a whole. A line that is overwritten before it is read is refused;
    appended lines are not read; of a replaced file the old version is read."""

    def __init__(self, setting: str, path: Path) -> None:
        self._setting, self._path = setting, path
        self._file = _opened(setting, path)
        self._starts, self._sizes, self._numbers = array("q"), array("q"), array("q")
        self._digests = array("Q")
        start = 0
        # Only a newline ends a line: other line separators may occur in a JSON string.
        for number, line in enumerate(self._file, 1):
            if not line.isspace():
                self._starts.append(start)
                self._sizes.append(len(line))
                self._numbers.append(number)
                self._digests.append(xxh3_64_intdigest(line))
            start += len(line)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, number: int) -> Row:
        with reading(self._path, self._setting):
            return self._row(number)

    def __iter__(self) -> Iterator[Row]:
        with reading(self._path, self._setting):
            yield from map(self._row, range(len(self)))

    def _row(self, number: int) -> Row:
        text = self._line(number).decode().removeprefix(_MARK)
        place = f"line {self._numbers[number]} of {self._path.name}"
        try:
            return row(self._setting, place, json.loads(text))
        except (ValueError, RecursionError) as error:
            # The error's own place counts within the line, so it is left out.
            reason = error.msg if isinstance(error, json.JSONDecodeError) else error
            raise ConfigError(f"{self._setting}: {place} is not JSON: {reason}") from error

    def _line(self, number: int) -> bytes:
        start, size = self._starts[number], self._sizes[number]
        if isinstance(self._file, io.BytesIO):
            return bytes(self._file.getbuffer()[start : start + size])
        line = os.pread(self._file.fileno(), size, start)
        if xxh3_64_intdigest(line) != self._digests[number]:
            raise ConfigError(
                f"{self._setting}: {self._path} was written over while its rows were read; "
                "make a new file of them and put that in its place"
            )
        return line


def count_lines(setting: str, path: Path) -> int:
    """The number of lines that are not blank."""
    with _opened(setting, path) as lines:
        return sum(not line.isspace() for line in lines)


def read_json(setting: str, path: Path) -> tuple[Row, ...]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8-sig"))
    except (json.JSONDecodeError, RecursionError) as error:
        is_lines = str(error).startswith("Extra data")
        hint = "; with an object a line it is .jsonl" if is_lines else ""
        raise ConfigError(f"{setting}: {path} is not JSON: {error}{hint}") from error
    if not isinstance(rows, list):
        raise ConfigError(f"{setting}: {path} was {shown(rows)}; it must be a list of objects")
    return tuple(row(setting, f"row {i} of {path.name}", v) for i, v in enumerate(rows, 1))


def read_csv(setting: str, path: Path) -> tuple[Row, ...]:
    """Comma-separated values with a line of column names; every value is text."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        csv.field_size_limit(sys.maxsize)
        lines = csv.reader(file, strict=True)
        try:
            names = next(lines, [])
            rows, begin = [], lines.line_num + 1
            for values in lines:
                place, begin = f"line {begin} of {path.name}", lines.line_num + 1
                if values and len(values) != len(names):
                    raise ConfigError(
                        f"{setting}: {place} has {len(values)} values; there are {len(names)} "
                        f"columns: {', '.join(names)}"
                    )
                if values:
                    rows.append(Row(dict(zip(names, values, strict=True)), place))
        except csv.Error as error:
            raise ConfigError(
                f"{setting}: line {lines.line_num} of {path.name} is not CSV: {error}"
            ) from error
    return tuple(rows)


def _opened(setting: str, path: Path) -> IO[bytes]:
    """Open the file's bytes; a compressed file is decompressed in memory."""
    try:
        match path.suffix:
            case ".zst":
                return io.BytesIO(b"".join(_frames(path.read_bytes())))
            case ".gz":
                return io.BytesIO(gzip.decompress(path.read_bytes()))
            case _:
                return path.open("rb")
    except (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
        raise ConfigError(f"{setting}: {path} cannot be decompressed: {error}") from error


def _frames(data: bytes) -> Iterator[bytes]:
    """
    Raises:
        EOFError: the last frame is incomplete.
    """
    while data:
        frame = zstandard.ZstdDecompressor().decompressobj()
        yield frame.decompress(data)
        if not frame.eof:
            raise EOFError("it ends before its last frame does")
        data = frame.unused_data
