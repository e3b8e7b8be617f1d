"""Prompts from JSONL, JSON and parquet files.

Invariant: the order is a pure function of (seed, prompt index): each epoch is a fresh
permutation, so no prompt comes twice within an epoch and a resumed run goes on where it stopped.
"""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamrl.errors import ConfigError, did_you_mean
from streamrl.interfaces import Prompt


class FilePrompts:
    """Rows of a file; `seed` None keeps the file's order."""

    SUFFIXES = (".jsonl", ".json", ".parquet")

    def __init__(self, path: Path, *, prompt_key: str, answer_key: str, seed: int | None) -> None:
        self._path = path
        self._prompt_key = prompt_key
        self._answer_key = answer_key
        self._seed = seed
        self._rows = _read(path)
        if not self._rows:
            raise ConfigError(f"data.source: {path} holds no rows")
        for key, name in ((prompt_key, "prompt_key"), (answer_key, "answer_key")):
            if key not in self._rows[0]:
                hint = did_you_mean(key, self._rows[0])
                raise ConfigError(f"data.{name}: {path} has no column {key!r}; {hint}")
        self._order = lru_cache(maxsize=2)(self._permutation)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, prompt_index: int) -> Prompt:
        epoch, place = divmod(prompt_index, len(self._rows))
        number = place if self._seed is None else int(self._order(epoch)[place])
        row, origin = self._rows[number], f"row {number} of {self._path.name}"
        try:
            return Prompt(_content(row[self._prompt_key]), str(row[self._answer_key]), row, origin)
        except (KeyError, TypeError) as error:
            raise ConfigError(f"data.source: a row of {self._path} lacks {error}") from error

    def _permutation(self, epoch: int) -> NDArray[np.int64]:
        return np.random.default_rng([self._seed or 0, epoch]).permutation(len(self._rows))


def _content(value: Any) -> str | tuple[Mapping[str, str], ...]:
    if isinstance(value, str):
        return value
    return tuple({"role": turn["role"], "content": turn["content"]} for turn in value)


def _read(path: Path) -> Sequence[Mapping[str, Any]]:
    try:
        match path.suffix:
            case ".parquet":
                return _read_parquet(path)
            case ".json":
                rows: list[Mapping[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
                return rows
            case _:
                return list(_read_lines(path))
    except OSError as error:
        raise ConfigError(f"data.source: cannot read {path}: {error.strerror or error}") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"data.source: {path} is not JSON: {error}") from error


def _read_lines(path: Path) -> Sequence[Mapping[str, Any]]:
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"data.source: {path}:{number} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise ConfigError(f"data.source: {path}:{number} is no JSON object")
        rows.append(row)
    return rows


def _read_parquet(path: Path) -> Sequence[Mapping[str, Any]]:
    try:
        import pyarrow.lib
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(
            f"data.source: {path} is parquet; install the extra: pip install 'streamrl[parquet]'"
        ) from error
    try:
        rows: list[Mapping[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.lib.ArrowInvalid as error:
        raise ConfigError(f"data.source: {path} is not parquet: {error}") from error
    return rows
