"""A question whose answer stands in files, in two steps, with tools to search and to read them.

The files are made up: in one stands which parcel a person waits for, in another one its locker.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from actors.environments.tasks.question import Question, QuestionEnvironment
from actors.tools.tool import ToolError, ToolSession
from streamrl.config.generator import CallLimits
from streamrl.interfaces import ToolSchema

_FIRST = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gina", "Hugo", "Ines", "Jon", "Kara", "Leo")
_LAST = ("Abel", "Berg", "Cole", "Dorn", "Eck", "Frey", "Graf", "Holm", "Ihle", "Jahn", "Kern")
_LINES_OF_A_FILE = 8
_MAX_HITS = 20


def _schema(name: str, description: str, argument: str, meaning: str) -> ToolSchema:
    parameters = {
        "type": "object",
        "properties": {argument: {"type": "string", "description": meaning}},
        "required": [argument],
    }
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


class FileTools:
    """`search` and `read` over files that are given as text, for any number of sessions."""

    schemas = (
        _schema("search", "Finds lines in all files.", "text", "What a line has to contain."),
        _schema("read", "Shows a whole file.", "file", "Its name, as search shows it."),
    )
    limits = CallLimits()

    def __init__(self, files: Mapping[str, tuple[str, ...]]) -> None:
        self._files = files

    async def open(self) -> ToolSession:
        return self

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        (argument,) = self.schemas[name == "read"]["function"]["parameters"]["required"]
        value = arguments.get(argument)
        if not isinstance(value, str) or len(arguments) > 1:
            raise ToolError(f'the one argument is "{argument}", a text')
        return self._read(value) if name == "read" else self._search(value)

    async def close(self) -> None:
        """There is nothing to close."""

    def _search(self, text: str) -> str:
        hits = [
            f"{file}: {line}"
            for file, lines in self._files.items()
            for line in lines
            if text.lower() in line.lower()
        ]
        rest = f"\n({len(hits) - _MAX_HITS} more)" if len(hits) > _MAX_HITS else ""
        return "\n".join(hits[:_MAX_HITS]) + rest if hits else "no line contains it"

    def _read(self, file: str) -> str:
        if file not in self._files:
            raise ToolError(f"there is no file {file!r}")
        return "\n".join(self._files[file])


def file_search(*, num_people: int = 24) -> QuestionEnvironment:
    """
    Args:
        num_people: of whom the files know.

    Raises:
        ValueError: there are not so many names.
    """
    if not 2 <= num_people <= len(_FIRST) * len(_LAST):
        raise ValueError(f"num_people was {num_people}; 2 to {len(_FIRST) * len(_LAST)}")
    return QuestionEnvironment(partial(_ask, num_people=num_people))


def _ask(seed: int, *, num_people: int) -> Question:
    rng = np.random.default_rng(seed)
    names = [f"{first} {last}" for first in _FIRST for last in _LAST]
    people = [names[int(i)] for i in rng.permutation(len(names))[:num_people]]
    parcels = [int(n) for n in rng.permutation(9000)[:num_people] + 1000]
    lockers = [int(n) for n in rng.permutation(900)[:num_people] + 100]
    waits = [f"{who} waits for parcel {n}." for who, n in zip(people, parcels, strict=True)]
    lies = [f"Parcel {n} lies in locker {m}." for n, m in zip(parcels, lockers, strict=True)]
    shuffled = [lies[int(i)] for i in rng.permutation(num_people)]
    files = {**_files("people", waits), **_files("parcels", shuffled)}
    asked = int(rng.integers(num_people))
    question = (
        f"In which locker lies the parcel that {people[asked]} waits for? Search the files, then "
        "answer with the number of the locker."
    )
    return Question(question, lockers[asked], (FileTools(files),))


def _files(name: str, lines: list[str]) -> dict[str, tuple[str, ...]]:
    starts = range(0, len(lines), _LINES_OF_A_FILE)
    parts = (tuple(lines[i : i + _LINES_OF_A_FILE]) for i in starts)
    return {f"{name}-{number}.txt": part for number, part in enumerate(parts, 1)}
