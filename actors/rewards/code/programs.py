"""The program that runs a test on a solution, and whether what it printed passes.

Invariant: what a function should return and a program should print is compared here and is not part
of the program, so that a solution cannot read it.
"""

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from actors.rewards.code.python_tests import PythonTest
from actors.rewards.code.tests import FENCE, CallTest, ProgramTest, Test

# What solutions in the style of LeetCode use without importing it.
_PRELUDE = (
    "import bisect, collections, functools, heapq, itertools, json, math, operator, random, re, "
    "string, sys\n"
    "from collections import *\nfrom functools import *\nfrom heapq import *\n"
    "from itertools import *\nfrom math import inf\nfrom typing import *\n"
)
_CALL = """
def _call_of_the_test():
    import json, sys
    name, arguments = json.loads(sys.stdin.read())
    owner = globals().get("Solution")
    function = getattr(owner(), name) if owner is not None else globals()[name]
    print("\\n{mark}" + json.dumps(function(*arguments)))
_call_of_the_test()
"""
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
    solution: str, test: Test, header: str = "", max_tests: int | None = None
) -> Program:
    """
    Args:
        header: of a function whose body the solution may be.
        max_tests: how many to run of several in one text; None: all.
    """
    mark = secrets.token_hex(16)
    match test:
        case ProgramTest():
            return Program(_PRELUDE + solution, test.stdin)
        case CallTest():
            stdin = json.dumps([test.function, list(test.arguments)])
            return Program(f"{_PRELUDE}{solution}\n{_CALL.replace('{mark}', mark)}", stdin, mark)
        case PythonTest():
            job = {
                "mark": mark,
                "program": f"{_PRELUDE}{test.header}\n{header}{solution}\n",
                "tests": test.code,
                "names": test.names,
                "num_tests": test.num_tests,
                "max_tests": max_tests,
                "modules": test.modules,
                "by_pytest": test.by_pytest,
            }
            return Program(_HARNESS, json.dumps(job), mark)


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
    return bool(given == expected or [given] == expected)


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


def _same_line(given: str, wanted: str) -> bool:
    if given == wanted:
        return True
    first, second = _numbers(given.split()), _numbers(wanted.split())
    return first is not None and first == second


def _numbers(words: Sequence[str]) -> list[Decimal] | None:
    try:
        numbers = [Decimal(word) for word in words]
    except InvalidOperation:
        return None
    # To compare a signaling NaN is an error.
    return None if any(number.is_snan() for number in numbers) else numbers


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
