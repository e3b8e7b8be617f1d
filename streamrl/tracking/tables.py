"""Samples as the rows of a table, for trackers that show one."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

COLUMNS = ("step", "prompt", "response", "reward", "version", "staleness", "environment")
_LONGEST = 2000


def rows(samples: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """One for each sample, under `COLUMNS`; long texts are cut in their middle."""
    return [[_cell(sample, column) for column in COLUMNS] for sample in samples]


def markdown_table(samples: Sequence[Mapping[str, Any]]) -> str:
    """In Markdown, which has HTML in it: what the model wrote is escaped."""
    lines = [COLUMNS, ("---",) * len(COLUMNS), *rows(samples)]
    return "\n".join("| " + " | ".join(map(_escaped, line)) + " |" for line in lines)


def cut(text: str, longest: int = _LONGEST) -> str:
    """The first and the last half of a text that is longer."""
    half = longest // 2
    return text if len(text) <= longest else f"{text[:half]} [...] {text[-half:]}"


def _cell(sample: Mapping[str, Any], column: str) -> Any:
    if column == "response":
        return cut("\n".join(f"{m['content']}" for m in sample["messages"]))
    value = sample.get(column)
    return cut(value) if isinstance(value, str) else value


def _escaped(value: Any) -> str:
    text = "" if value is None else str(value)
    special = str.maketrans({c: f"\\{c}" for c in "\\`*_{}[]()#+-.!|~$"})
    return escape(text.translate(special)).replace("\r", "").replace("\n", "<br>")
