"""The unit tests of a row, in the forms that data sets have.

    {"inputs": [...], "outputs": [...], "fn_name": NAME}    APPS, TACO, verl; JSON or its text
    [{"input", "output", "testtype"}, ...]                  LiveCodeBench; JSON or its text
    ["assert ...", ...]                                     MBPP (`test_list`)
    "def check(candidate): ..."                             HumanEval (`test` with `entry_point`)
    "assert ..."                                            any code that raises where it fails

With a function's name, inputs are its arguments; without one, what a program reads and writes.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from actors.rewards.forms import ground_truth
from streamrl.errors import RolloutError
from streamrl.interfaces import Episode

COLUMNS = ("input_output", "public_test_cases", "private_test_cases", "test_list", "test", "tests")
"""Where tests are looked for, unless a column is named; then in the answer."""


@dataclass(frozen=True)
class ProgramTest:
    """What a program prints for what it reads."""

    stdin: str
    expected: str


@dataclass(frozen=True)
class CallTest:
    """What a function returns for these arguments; JSON values."""

    function: str
    arguments: Sequence[Any]
    expected: Any


@dataclass(frozen=True)
class AssertTest:
    """Code after the solution, which raises where the solution is wrong."""

    code: str


Test = ProgramTest | CallTest | AssertTest


def read_tests(episode: Episode, column: str = "") -> list[Test]:
    """The tests of the episode's row.

    Raises:
        RolloutError: it has none, or they have none of these forms.
    """
    row = episode.prompt.row
    columns = [column] if column else [name for name in COLUMNS if row.get(name)]
    values = [row.get(name) for name in columns] or [ground_truth(episode)]
    try:
        found = [test for value in values for test in _read(value, row)]
    except (KeyError, TypeError, ValueError) as error:
        raise RolloutError(
            f"the tests of {_place(episode, columns)} cannot be read: {error!r}"
        ) from error
    if not found:
        raise RolloutError(f"{_place(episode, columns)} has no tests")
    return found


def _place(episode: Episode, columns: Sequence[str]) -> str:
    return f"{episode.prompt.origin or 'the row'} ({' and '.join(columns) or 'its answer'})"


def _read(value: Any, row: Mapping[str, Any]) -> Iterator[Test]:
    if isinstance(value, str):
        parsed = _json(value)
        if parsed is None:
            yield from _asserts([value], row)
            return
        value = parsed
    if isinstance(value, Mapping):
        yield from _pairs(value)
    elif all(isinstance(item, str) for item in value):
        yield from _asserts(value, row)
    else:
        yield from (_case(item, row) for item in value)


def _json(text: str) -> Any:
    """A record or a list; None if the text is neither."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict | list) else None


def _pairs(value: Mapping[str, Any]) -> Iterator[Test]:
    function = value.get("fn_name")
    for given, expected in zip(value["inputs"], value["outputs"], strict=True):
        if not function:
            yield ProgramTest(_text(given), _text(expected))
        elif isinstance(given, str):
            yield CallTest(function, _arguments(given), json.loads(expected))
        else:
            yield CallTest(function, list(given), expected)


def _case(item: Mapping[str, Any], row: Mapping[str, Any]) -> Test:
    if item.get("testtype") != "functional":
        return ProgramTest(_text(item["input"]), _text(item["output"]))
    metadata = row.get("metadata") or {}
    if isinstance(metadata, str):
        metadata = json.loads(metadata)
    function = item.get("fn_name") or metadata["func_name"]
    return CallTest(function, _arguments(item["input"]), json.loads(item["output"]))


def _asserts(tests: Sequence[str], row: Mapping[str, Any]) -> Iterator[Test]:
    """With what MBPP and HumanEval have in other columns."""
    imports = row.get("test_imports") or []
    setup = "\n".join([*imports, row.get("test_setup_code") or row.get("test_setup") or ""])
    entry_point = row.get("entry_point")
    for test in tests:
        is_check = "def check(" in test and entry_point
        yield AssertTest("\n".join([setup, test, f"check({entry_point})" if is_check else ""]))


def _arguments(text: str) -> list[Any]:
    """One JSON value a line."""
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)
