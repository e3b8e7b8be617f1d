"""Prompts from JSONL, JSON and parquet files.

Invariant: the order is a pure function of (seed, prompt index): each epoch is a fresh
permutation, so no prompt comes twice within an epoch and a resumed run goes on where it stopped.
Every row is checked when the file is opened, so none ends a run that has begun.
"""

import math
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actors.prompts.media import MediaColumns, is_content
from streamrl.data_files import Row, read_rows, shown
from streamrl.errors import ConfigError, did_you_mean
from streamrl.interfaces import Prompt

_PROMPT = "it must be text, or a list of messages that have a role and a content"


class FilePrompts:
    """Rows of a file; `seed` None keeps the file's order.

    Args:
        setting: the one that names the file; errors begin with it.

    Raises:
        ConfigError: the file cannot be read, or a row of it has no prompt or no answer.
    """

    def __init__(
        self,
        setting: str,
        path: Path,
        *,
        prompt_key: str,
        answer_key: str,
        seed: int | None,
        media_keys: Mapping[str, str] | None = None,
        system_prompt: str | None = None,
    ) -> None:
        self._seed = seed
        rows = read_rows(setting, path)
        columns = MediaColumns(media_keys or {}, path.parent, system_prompt)
        named = {f"{kind}_key": key for kind, key in columns.keys.items()}
        for name, key in {"prompt_key": prompt_key, "answer_key": answer_key, **named}.items():
            if key not in rows[0].fields:
                hint = did_you_mean(key, rows[0].fields)
                raise ConfigError(f"data.{name}: {path} has no column {key!r}; {hint}")
        self._prompts = tuple(
            columns.fill(_prompt(setting, row, prompt_key, answer_key)) for row in rows
        )
        self._order = lru_cache(maxsize=2)(self._permutation)

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, prompt_index: int) -> Prompt:
        epoch, place = divmod(prompt_index, len(self._prompts))
        return self._prompts[place if self._seed is None else int(self._order(epoch)[place])]

    def _permutation(self, epoch: int) -> NDArray[np.int64]:
        return np.random.default_rng([self._seed or 0, epoch]).permutation(len(self._prompts))


def _prompt(setting: str, row: Row, prompt_key: str, answer_key: str) -> Prompt:
    fields, place = row
    for key in (prompt_key, answer_key):
        if key not in fields:
            raise ConfigError(f"{setting}: {place} lacks {key!r}; it has {', '.join(fields)}")
    content, answer = _content(fields[prompt_key]), fields[answer_key]
    if not content:
        raise ConfigError(
            f"{setting}: {place}: {prompt_key} was {shown(fields[prompt_key])}; {_PROMPT}"
        )
    if answer is None or (isinstance(answer, float) and math.isnan(answer)):
        raise ConfigError(f"{setting}: {place}: {answer_key} was {answer}; it must have a value")
    return Prompt(content, str(answer), fields, place)


def _content(value: Any) -> str | tuple[Mapping[str, Any], ...]:
    """The prompt's text or messages; empty if the value is neither."""
    if isinstance(value, str):
        return value
    messages = value if isinstance(value, list) and all(map(_is_message, value)) else ()
    return tuple({"role": turn["role"], "content": turn["content"]} for turn in messages)


def _is_message(turn: Any) -> bool:
    return (
        isinstance(turn, dict)
        and isinstance(turn.get("role"), str)
        and is_content(turn.get("content"))
    )
