"""The program that runs a test on a solution, and whether what it printed passes.

Invariant: what a function should return and a program should print is compared here and is not part
of the program, so that a solution cannot read it.
"""

import ast
import json
import math
import re
import secrets
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from pathlib import Path
from typing import Any

from actors.rewards.code.python_tests import PythonTest
from actors.rewards.code.tests import FENCE, CallTest, ProgramTest, Test

PRELUDE = (
    "import bisect, collections, functools, heapq, itertools, json, math, operator, random, re, "
    "string, sys\n"
    # A number of any length is printed, as before Python 3.11.
    "sys.set_int_max_str_digits(0)\n"
    "from collections import *\nfrom functools import *\nfrom heapq import *\n"
    "from itertools import *\nfrom math import inf\nfrom typing import *\n"
)
"""What solutions in the style of LeetCode use without importing it."""
_CALL = """
def _call_of_the_test():
    import json, sys
    name, arguments = json.loads(sys.stdin.read())
    owner = globals().get("Solution")
    function = getattr(owner(), name) if owner is not None else globals()[name]
    print("\\n{mark}" + json.dumps(function(*arguments)))
_call_of_the_test()
"""
_SPACE = re.compile(r"\s+")
_WHOLE = re.compile(r"[-+]?\d+")
_NEAR = 1e-6
# Of what `int` reads.
_MAX_DIGITS = 4300
_HARNESS = Path(__file__).with_name("harness.py").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Program:
    """Code, what it reads, and the mark before its result, if it has one."""

    code: str
    stdin: str = ""
    mark: str = ""


@dataclass(frozen=True)
class ProgramOutcome:
    """How many tests passed, of how many; or what the interpreter lacks to run them."""

    num_passed: int
    num_tests: int = 1
    missing: tuple[str, ...] = ()


def solution_of(response: str) -> str:
    """The last block of code in the response, or all of it.

    >>> solution_of("So:\\n```python\\nprint(1)\\n```")
    'print(1)\\n'
    """
    blocks: list[str] = FENCE.findall(response)
    return blocks[-1] if blocks else response


def program_of(
    solution: str, test: Test, header: str = "", max_tests: int | None = None, mark: str = ""
) -> Program:
    """
    Args:
        header: of a function whose body the solution may be.
        max_tests: how many to run of several in one text; None: all.
        mark: of the result; "" for one of its own. Tests of one kind with one mark have one code.
    """
    mark = mark or secrets.token_hex(16)
    match test:
        case ProgramTest():
            return Program(_whole(solution), test.stdin)
        case CallTest():
            stdin = json.dumps([test.function, list(test.arguments)])
            return Program(_whole(f"{solution}\n{_CALL.replace('{mark}', mark)}"), stdin, mark)
        case PythonTest():
            job = {
                "mark": mark,
                "program": _whole(f"{test.header}\n{header}{solution}\n"),
                "tests": test.code,
                "names": test.names,
                "num_tests": test.num_tests,
                "max_tests": max_tests,
                "modules": test.modules,
                "by_pytest": test.by_pytest,
            }
            return Program(_HARNESS, json.dumps(job), mark)


@lru_cache(maxsize=64)
def _whole(code: str) -> str:
    """The code behind our imports; what it imports from `__future__` stands before them."""
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return PRELUDE + code
    future = [n for n in body if isinstance(n, ast.ImportFrom) and n.module == "__future__"]
    for statement in future:
        written = ast.get_source_segment(code, statement) or ""
        places = (found.start() for found in re.finditer(re.escape(written), code))
        start = next(p for p in places if code.count("\n", 0, p) == statement.lineno - 1)
        # As many lines, so that those of other statements stay.
        blank = "pass" + "\n" * written.count("\n")
        code = code[:start] + blank + code[start + len(written) :]
    names = ", ".join(alias.name for statement in future for alias in statement.names)
    return (f"from __future__ import {names}\n" if names else "") + PRELUDE + code


def outcome_of(test: Test, program: Program, stdout: str | None) -> ProgramOutcome:
    """What became of a test.

    Args:
        stdout: of the program; None unless it ended with success.
    """
    match test:
        case PythonTest():
            _, mark, said = (stdout or "").rpartition(f"\n{program.mark}")
            return _outcome(said.strip() if mark else "", test.num_tests)
        case _:
            return ProgramOutcome(int(stdout is not None and passes(test, program, stdout)))


def _outcome(said: str, num_tests: int) -> ProgramOutcome:
    """Of the line of the harness."""
    match said.split():
        case ["passed", passed, "of", total]:
            return ProgramOutcome(int(passed), int(total))
        case ["missing", *_]:
            return ProgramOutcome(0, num_tests, tuple(said.removeprefix("missing ").split("|")))
    return ProgramOutcome(0, num_tests)


def passes(test: ProgramTest | CallTest, program: Program, stdout: str) -> bool:
    """Whether the output of a program that ended with success passes its test."""
    match test:
        case ProgramTest():
            return same_output(stdout, test.expected)
        case CallTest():
            last = stdout.rpartition(f"\n{program.mark}")
            return bool(last[1]) and same_value(_json(last[2]), test.expected)


def same_output(printed: str, expected: str) -> bool:
    """Line by line, but for white space at the ends; numbers by their value."""
    given, wanted = _lines(printed), _lines(expected)
    return len(given) == len(wanted) and all(map(_same_line, given, wanted))


def same_value(given: Any, expected: Any) -> bool:
    """APPS puts what a function returns into a list of one."""
    return _is_near(given, expected) or _is_near([given], expected)


def _is_near(given: Any, expected: Any) -> bool:
    """Equal, a float to a millionth of it."""
    match given, expected:
        case [*first], [*second]:
            return len(first) == len(second) and all(map(_is_near, first, second))
        case dict(), dict():
            return given.keys() == expected.keys() and all(
                _is_near(value, expected[key]) for key, value in given.items()
            )
        case (float() | int(), float()) | (float(), int()):
            return math.isclose(given, expected, rel_tol=_NEAR)
        case _:
            return bool(given == expected)


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


def _same_line(given: str, wanted: str) -> bool:
    """Of a line with text, the white space counts, too."""
    first, second = given.split(), wanted.split()
    if len(first) != len(second) or not all(map(_same_word, first, second)):
        return False
    return None not in map(_number, second) or _SPACE.findall(given) == _SPACE.findall(wanted)


def _same_word(given: str, wanted: str) -> bool:
    """Whole numbers by their value, others to a millionth, all else as text."""
    if given == wanted:
        return True
    first, second = _number(given), _number(wanted)
    if first is None or second is None:
        return False
    if _WHOLE.fullmatch(given) and _WHOLE.fullmatch(wanted):
        return first == second
    return abs(first - second) <= Decimal(_NEAR) * max(abs(first), abs(second))


def _number(word: str) -> Decimal | None:
    try:
        number = Decimal(word)
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


def _json(text: str) -> Any:
    try:
        return json.loads(text, parse_int=_integer)
    except (ValueError, RecursionError):
        return None


def _integer(digits: str) -> int | Decimal:
    """Also of more digits than `int` reads."""
    return int(digits) if len(digits) < _MAX_DIGITS else Decimal(digits)
