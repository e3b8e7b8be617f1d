"""Samples as the rows of a table, for trackers that show one.

`TRAINED` are the columns of what a step has trained on, `HELD_OUT` those of a validation's table,
in which the responses of all versions to one prompt follow each other. A reward has a column of its
own, by its name, where there are several. Texts are without the markup of the chat template.
"""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from streamrl.samples.record import cut, without_markup

TRAINED = (
    "step",
    "prompt",
    "response",
    "answer",
    "extracted",
    "reward",
    "version",
    "staleness",
    "environment",
)
HELD_OUT = ("prompt_index", "prompt", "answer", "version", "response", "extracted", "reward")
_REWARD = "reward/"
_LONGEST = 2000


def columns_of(columns: Sequence[str], samples: Sequence[Mapping[str, Any]]) -> list[str]:
    """These, and behind `reward` one for each of several rewards that the samples have."""
    names = dict.fromkeys(name for sample in samples for name in sample.get("rewards", ()))
    place = columns.index("reward") + 1
    own = [f"{_REWARD}{name}" for name in names] if len(names) > 1 else []
    return [*columns[:place], *own, *columns[place:]]


def rows(columns: Sequence[str], samples: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """One for each sample; long texts are cut in their middle."""
    return [[_cell(sample, column) for column in columns] for sample in samples]


def markdown_table(columns: Sequence[str], samples: Sequence[Mapping[str, Any]]) -> str:
    """In Markdown, which has HTML in it: what the model wrote is escaped."""
    shown = columns_of(columns, samples)
    lines = [shown, ["---"] * len(shown), *rows(shown, samples)]
    return "\n".join("| " + " | ".join(map(_escaped, line)) + " |" for line in lines)


def _cell(sample: Mapping[str, Any], column: str) -> Any:
    if column.startswith(_REWARD):
        return sample.get("rewards", {}).get(column.removeprefix(_REWARD))
    written = [m["content"] for m in sample["messages"]] if column == "response" else None
    value = sample.get(column) if written is None else "\n".join(written)
    if not isinstance(value, str):
        return value
    return cut(without_markup(value, sample.get("special_tokens", ())), _LONGEST)


def _escaped(value: Any) -> str:
    text = "" if value is None else str(value)
    special = str.maketrans({c: f"\\{c}" for c in "\\`*_{}[]()#+-.!|~$"})
    return escape(text.translate(special)).replace("\r", "").replace("\n", "<br>")
