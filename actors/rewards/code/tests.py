"""The unit tests of a row, in the forms of known data sets; each form may also be encoded as text.

    {"inputs": [...], "outputs": [...], "fn_name": NAME}    APPS, TACO, PRIME, verl; rStar-Coder
    [{"input", "output", "testtype" or "type"}, ...]        LiveCodeBench, DeepCoder, open-r1
    {"input": [...], "output": [...]}                       CodeContests; texts are one test
    {"assert_case" | "functional" | "pytest" | "test_code": ...}   verl, Code-R1, Skywork
    ["assert ...", ...]                                     MBPP (`test_list`), AceCode
    "class TestCases(unittest.TestCase): ..."               BigCodeBench
    "def test_...(): ..."                                   KodCode
    "def check(candidate): ..."                             HumanEval (`test` with `entry_point`)
    "assert ..."                                            any code that raises on failure

With a function's name, inputs are its arguments; without one, inputs and outputs are what a program
reads and writes. Invariant: a program can pass or fail every test read here; anything else is a
FinalError.
"""

import json
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from actors.rewards.calls.limits import FinalError
from actors.rewards.code.encodings import blocks, decoded
from actors.rewards.code.python_tests import PythonTest, defined_functions, python_test
from actors.rewards.forms import gold_of
from streamrl.errors import did_you_mean
from streamrl.interfaces import Prompt

COLUMNS = (
    *("input_output", "public_test_cases", "private_test_cases", "test_list", "test", "tests"),
    *("test_code", "test_cases", "verification_info"),
    *("public_tests", "private_tests", "generated_tests"),
)
"""Columns that are searched for tests unless one is named; `inputs` and `outputs` come next, and
the answer last."""
_ALLOWED = (
    "tests are a record of inputs and outputs, a list of cases or of assertions, or Python with "
    "an assertion, a unittest class, test functions or check(candidate)"
)
_shown = reprlib.Repr()
_shown.maxstring = 80
# No column has this name.
_PROMPTS = "the texts of the prompt"
# The first of these that a record has is read.
_NESTED = ("assert_case", "functional", "pytest", "test_code", "test_cases", "tests")
_FUNCTION = ("entry_point", "fn_name", "func_name", "function_name")


@dataclass(frozen=True)
class ProgramTest:
    """What a program should print for its standard input."""

    stdin: str
    expected: str


@dataclass(frozen=True)
class CallTest:
    """What a function should return for these arguments; JSON values."""

    function: str
    arguments: Sequence[Any]
    expected: Any


Test = ProgramTest | CallTest | PythonTest


class _UnreadableError(ValueError):
    """Says what a column was, and why it contains no test."""

    def __init__(self, place: str, value: Any, reason: object) -> None:
        super().__init__(f"{place} was {_shown.repr(value)}: {reason}")


def read_tests(prompt: Prompt, column: str = "") -> list[Test]:
    """The tests of the prompt's row.

    Raises:
        FinalError: it has none, or what stands in their place tests nothing.
    """
    try:
        values = _values(prompt, column)
        given = {**prompt.row, _PROMPTS: (_text_of(prompt), prompt.row.get("prompt"))}
        found = [test for place, value in values for test in _read(place, value, given)]
        if not found:
            raise _UnreadableError(*values[0], "it has no tests")
        if all(isinstance(test, ProgramTest) and not test.expected.strip() for test in found):
            raise _UnreadableError(*values[0], "it expects no output of any program")
    except _UnreadableError as error:
        raise FinalError(f"{prompt.origin or 'the row'}: {error}; {_ALLOWED}") from error
    return found


def _values(prompt: Prompt, column: str) -> list[tuple[str, Any]]:
    """The columns of tests, with their values."""
    row = prompt.row
    if column:
        if column not in row:
            raise _UnreadableError(column, None, f"there is no column; {did_you_mean(column, row)}")
        return [(column, row[column])]
    values = [(name, row[name]) for name in COLUMNS if _is_given(row.get(name))]
    if not values and _is_given(row.get("inputs")) and "outputs" in row:
        return [("inputs", row)]
    gold = gold_of(prompt)
    empty = [(name, row[name]) for name in COLUMNS if name in row]
    return values or (empty if empty and not _is_given(gold) else [("the answer", gold)])


def _is_given(value: Any) -> bool:
    return value is not None and (not hasattr(value, "__len__") or len(value) > 0)


def _read(
    place: str, value: Any, given: Mapping[str, Any], *, is_item: bool = False
) -> Iterator[Test]:
    """Yield the tests of a value; an item of a list may be a case."""
    value = decoded(value)
    try:
        if isinstance(value, str):
            yield _python(value, given)
        elif isinstance(value, Mapping) and is_item and "input" in value:
            yield _case(value, given)
        elif isinstance(value, Mapping):
            yield from _record(place, value, given)
        elif isinstance(value, Iterable) and not is_item:
            for i, item in enumerate(value):
                yield from _read(f"{place}[{i}]", item, given, is_item=True)
        else:
            raise TypeError("it is no test")
    except _UnreadableError:
        raise
    except KeyError as error:
        raise _UnreadableError(place, value, f"it has no {error}") from error
    except (TypeError, ValueError) as error:
        raise _UnreadableError(place, value, error) from error


def _record(place: str, value: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[Test]:
    for key in _NESTED:
        if value.get(key) is not None:
            yield from _read(f"{place}.{key}", value[key], {**given, **value})
            return
    plural = "" if "input" in value else "s"
    inputs, outputs = decoded(value[f"input{plural}"]), decoded(value[f"output{plural}"])
    function = value.get("fn_name") or value.get("func_name")
    texts = {"input": value[f"input{plural}"], "output": value[f"output{plural}"]}
    are_several = isinstance(inputs, list | tuple) and all(
        isinstance(one, str)
        or (isinstance(one, list | tuple) and (function or all(isinstance(t, str) for t in one)))
        for one in inputs
    )
    if isinstance(outputs, str) or (isinstance(texts["input"], str) and not are_several):
        yield _pair(function, *texts.values()) if function else _case({**value, **texts}, given)
        return
    if len(inputs) != len(outputs):
        raise ValueError(f"it has {len(inputs)} inputs and {len(outputs)} outputs")
    for arguments, expected in zip(inputs, outputs, strict=True):
        yield _pair(function, arguments, expected)


def _case(item: Mapping[str, Any], given: Mapping[str, Any]) -> Test:
    kind = item.get("testtype") or item.get("type")
    if kind not in ("functional", "function_call"):
        return _pair(None, item["input"], item["output"])
    own = _function_of({**_metadata(given), **_metadata(item), **item})
    function = own or _function_of(given)
    if not function:
        raise KeyError("func_name")
    return _pair(function, item["input"], item["output"])


def _pair(function: str | None, given: Any, expected: Any) -> Test:
    if function and isinstance(given, str):
        # One JSON value per line.
        arguments = [json.loads(line) for line in given.splitlines() if line.strip()]
        return CallTest(function, arguments, json.loads(expected))
    if function:
        return CallTest(function, list(given), expected)
    if given is None or expected is None:
        raise ValueError("an input or an output is None")
    return ProgramTest(_text(given), _text(expected))


def _python(code: str, given: Mapping[str, Any]) -> PythonTest:
    """A test in Python, with the imports and set-up that MBPP and others keep in other columns."""
    imports = decoded(given.get("test_imports") or [])
    lines = imports if isinstance(imports, list | tuple) else [imports]
    setup = given.get("test_setup_code") or given.get("test_setup") or ""
    before = "\n".join([*map(str, lines), str(setup)]).strip("\n")
    test = python_test(f"{before}\n{code}" if before else code, _entry_point(given))
    return replace(test, header=str(given.get("import_prefix") or given.get("prefix") or ""))


def _entry_point(given: Mapping[str, Any]) -> str:
    """The tested function by the row's columns; else the only function that its prompt defines."""
    info = decoded(given.get("test_info"))
    infos = info if isinstance(info, list) and len(info) == 1 else []
    for record in (given, _metadata(given), *infos):
        if isinstance(record, Mapping) and (name := _function_of(record)):
            return name
    prompts = [prompt for prompt in given[_PROMPTS] if isinstance(prompt, str)]
    shown = [block for prompt in prompts for block in blocks(prompt) or [("", prompt)]]
    functions = {name for _, block in shown for name in defined_functions(block)}
    return functions.pop() if len(functions) == 1 else ""


def _function_of(record: Mapping[str, Any]) -> str:
    names = (record.get(key) for key in _FUNCTION)
    return next((name for name in names if isinstance(name, str) and name.strip()), "")


def _metadata(record: Mapping[str, Any]) -> Mapping[str, Any]:
    metadata = decoded(record.get("metadata"))
    return metadata if isinstance(metadata, Mapping) else {}


def _text_of(prompt: Prompt) -> str:
    if isinstance(prompt.content, str):
        return prompt.content
    return "\n".join(str(message.get("content")) for message in prompt.content)


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)
