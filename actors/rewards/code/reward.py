"""Rewards by unit tests: in the sandbox of this machine, or in a Sandbox Fusion service.

Invariant: code that fails, hangs or attacks scores 0; a row without tests, tests that cannot be
run, or a sandbox that does not answer fails the group.

`program_of` makes the program that runs a test on a solution; `outcome_of` decides whether what it
printed passes. Expected results are compared here and are not part of the program, so a solution
cannot read them.
"""

import ast
import asyncio
import json
import math
import re
import secrets
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from actors.rewards.answers import answer_of
from actors.rewards.calls.limits import FinalError
from actors.rewards.code.encodings import blocks
from actors.rewards.code.harness import is_installed
from actors.rewards.code.python_tests import PythonTest, beginning, functions
from actors.rewards.code.tests import CallTest, ProgramTest, Test, read_tests
from actors.rewards.remote.http import Service, ServiceSettings
from actors.sandbox.isolation import IsolationChoice, SandboxLimits
from actors.sandbox.sandbox import Sandbox, choose
from streamrl.config.section import Positive, Seconds, Section
from streamrl.errors import RolloutError
from streamrl.interfaces import Episode, Prompt
from streamrl.placement.hosts import num_cores

PRELUDE = (
    "import bisect, collections, functools, heapq, itertools, json, math, operator, random, re, "
    "string, sys\n"
    # Numbers of any length can be printed, as before Python 3.11.
    "sys.set_int_max_str_digits(0)\n"
    "from collections import *\nfrom functools import *\nfrom heapq import *\n"
    "from itertools import *\nfrom math import inf\nfrom typing import *\n"
)
"""What LeetCode-style solutions use without importing it."""
# Code below `if __name__ == "__main__"` would read the arguments from standard input.
_UNCALLED = '__name__ = "solution"; sys.modules[__name__] = sys.modules["__main__"]\n'
_CALL = """
def _call_of_the_test():
    import json, sys
    name, arguments = json.loads(sys.stdin.read())
    owner = globals().get("Solution")
    function = getattr(owner(), name) if hasattr(owner, name) else globals()[name]
    # Numbers and arrays of numpy.
    result = json.dumps(function(*arguments), default=lambda value: value.tolist())
    print("\\n{mark}" + result)
_call_of_the_test()
"""
_SPACE = re.compile(r"\s+")
_WHOLE = re.compile(r"[-+]?\d+")
_NEAR = 1e-6
# The most digits that `int` reads.
_MAX_DIGITS = 4300
_HARNESS = Path(__file__).with_name("harness.py").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Program:
    """Code, its standard input, and the mark before its result ("" if it has none)."""

    code: str
    stdin: str = ""
    mark: str = ""


@dataclass(frozen=True)
class ProgramOutcome:
    """How many of how many tests passed, or the modules that the interpreter lacks to run them."""

    num_passed: int
    num_tests: int = 1
    missing: tuple[str, ...] = ()


# Tags in quotes do not count: a program may print them.
_ANSWER = re.compile(r"(?<!['\"])<answer>(.*?)(?:(?<!['\"])</answer>|\Z)", re.DOTALL)


def solution_of(response: str, language: str = "python") -> str:
    """The last code block of the response (the last that names the language, if any does); without
    a block, its last <answer>, or else all of it.

    >>> solution_of("So:\\n```py\\nprint(1)\\n```\\nIt prints:\\n```\\n1\\n```")
    'print(1)\\n'
    """
    found = blocks(response)
    named = [block for block in found if _names(block[0].casefold(), language)]
    if chosen := named or found:
        return chosen[-1][1]
    answers: list[str] = _ANSWER.findall(response)
    return (answers or [response])[-1]


def _names(word: str, language: str) -> bool:
    """Whether a block names the language; py, python and python3 are the same."""
    return bool(word) and (word.startswith(language) or language.startswith(word))


def program_of(
    solution: str, test: Test, mark: str, header: str = "", max_tests: int | None = None
) -> Program:
    """Make the program of a test. Output and call tests of one solution with one mark share their
    code.

    Args:
        header: the head of a function whose body the solution may be.
        max_tests: how many tests of one text to run; None: all.
    """
    match test:
        case ProgramTest():
            return Program(_whole(solution), test.stdin)
        case CallTest():
            stdin = json.dumps([test.function, list(test.arguments)])
            code = f"{solution}\n{_CALL.replace('{mark}', mark)}"
            return Program(_whole(code, PRELUDE + _UNCALLED), stdin, mark)
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
def _whole(code: str, prelude: str = PRELUDE) -> str:
    """The code after our imports; its imports from `__future__` are moved before them."""
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return prelude + code
    future = [n for n in body if isinstance(n, ast.ImportFrom) and n.module == "__future__"]
    for statement in future:
        written = ast.get_source_segment(code, statement) or ""
        places = (found.start() for found in re.finditer(re.escape(written), code))
        start = next(p for p in places if code.count("\n", 0, p) == statement.lineno - 1)
        # As many lines as before, so that other statements keep their line numbers.
        blank = "pass" + "\n" * written.count("\n")
        code = code[:start] + blank + code[start + len(written) :]
    names = ", ".join(alias.name for statement in future for alias in statement.names)
    return (f"from __future__ import {names}\n" if names else "") + prelude + code


def outcome_of(test: Test, program: Program, stdout: str | None) -> ProgramOutcome:
    """Decide the outcome of a test.

    Args:
        stdout: what the program printed; None unless it ended with success.
    """
    _, mark, said = (stdout or "").rpartition(f"\n{program.mark}")
    match test:
        case ProgramTest():
            is_right = stdout is not None and same_output(stdout, test.expected)
        case CallTest():
            is_right = bool(mark) and same_value(_json(said), test.expected)
        case PythonTest():
            match said.split() if mark else []:
                case ["passed", passed, "of", total]:
                    return ProgramOutcome(int(passed), int(total))
                case ["missing", *_]:
                    names = said.strip().removeprefix("missing ").split("|")
                    return ProgramOutcome(0, test.num_tests, tuple(names))
            return ProgramOutcome(0, test.num_tests)
    return ProgramOutcome(int(is_right))


def same_output(printed: str, expected: str) -> bool:
    """Compare line by line, without white space at the ends; numbers are compared by value."""
    given, wanted = _lines(printed), _lines(expected)
    return len(given) == len(wanted) and all(map(_same_line, given, wanted))


def same_value(given: Any, expected: Any) -> bool:
    """Whether a function's result is the expected one, which APPS puts into a list of one."""
    return _is_near(given, expected) or _is_near([given], expected)


def _is_near(given: Any, expected: Any) -> bool:
    """Whether values are equal; floats to a millionth, absolute or relative."""
    match given, expected:
        case [*first], [*second]:
            return len(first) == len(second) and all(map(_is_near, first, second))
        case dict(), dict():
            return given.keys() == expected.keys() and all(
                _is_near(value, expected[key]) for key, value in given.items()
            )
        case (float() | int(), float()) | (float(), int()):
            return math.isclose(given, expected, rel_tol=_NEAR, abs_tol=_NEAR)
        case _:
            return bool(given == expected)


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


def _same_line(given: str, wanted: str) -> bool:
    """Compare words; if the line contains text, its white space counts, too."""
    first, second = given.split(), wanted.split()
    if len(first) != len(second) or not all(map(_same_word, first, second)):
        return False
    return None not in map(_number, second) or _SPACE.findall(given) == _SPACE.findall(wanted)


def _same_word(given: str, wanted: str) -> bool:
    """Compare whole numbers by value, other numbers to a millionth (absolute or relative), as
    contest judges do, yes and no in any case, and everything else as text."""
    if given == wanted or given.casefold() == wanted.casefold() in ("yes", "no"):
        return True
    first, second = _number(given), _number(wanted)
    if first is None or second is None:
        return False
    if _WHOLE.fullmatch(given) and _WHOLE.fullmatch(wanted):
        return first == second
    return abs(first - second) <= Decimal(_NEAR) * max(Decimal(1), abs(first), abs(second))


def _number(word: str) -> Decimal | None:
    try:
        number = Decimal(word)
    except InvalidOperation:
        return None
    # The difference of larger or smaller numbers cannot be computed.
    return number if number.is_finite() and abs(number.adjusted()) < 10_000 else None


def _json(text: str) -> Any:
    try:
        return json.loads(text, parse_int=_integer)
    except (ValueError, RecursionError):
        return None


def _integer(digits: str) -> int | Decimal:
    """A whole number, also with more digits than `int` reads."""
    return int(digits) if len(digits) < _MAX_DIGITS else Decimal(digits)


Run = Callable[[Sequence[Program]], Awaitable[Sequence[str | None]]]
"""Runs some of these programs, which share their code: at least the first one. Returns what each
printed, None for one that did not end with success."""
_CASES = Path(__file__).with_name("cases.py").read_text(encoding="utf-8")
# After this time the outputs so far are compared, so that wrong programs end early.
_BUDGET_S, _START_S = 1.0, 10.0
_MOST_INPUT = 2**22


class TestSettings(Section):
    """Which tests are run, and what passing some of them is worth."""

    tests_key: str = ""
    """Column of the tests. If empty: the columns that hold tests in the data sets of the manual, as
    far as a row has them, else its answer."""
    max_tests: Positive | None = None
    """Run only the first tests, this many at most."""
    partial: bool = False
    """The reward is the share of tests that pass, not counting skipped ones; if false, it is 1 if
    all pass, else 0."""


class Code:
    """The reward `code`: Python in the sandbox of this machine."""

    class Settings(TestSettings):
        time_s: Seconds = 10.0
        """Time limit for a test, or for all tests of one text."""
        memory_bytes: Positive = 512 * 2**20
        """Memory limit for the processes of a program together."""
        num_programs: Positive | None = None
        """Programs that run at a time. Null: the number of the machine's cores."""
        isolation: IsolationChoice = "auto"
        """How programs are isolated; `none` runs them without isolation."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        limits = SandboxLimits(time_s=settings.time_s, memory_bytes=settings.memory_bytes)
        self._sandbox = Sandbox(
            limits,
            max_concurrent=settings.num_programs or num_cores(),
            isolation=settings.isolation,
        )

    async def score(self, episode: Episode) -> float:
        """Score an episode. Waits for the tests."""
        return await _share(episode, self._settings, self._run)

    async def _run(self, programs: Sequence[Program]) -> Sequence[str | None]:
        """Run several programs in one sandbox, if it may start processes; else only the first."""
        fitting = _fitting(programs)
        isolation = await asyncio.to_thread(choose, self._settings.isolation)
        if len(fitting) > 1 and isolation == "namespaces":
            return await self._run_together(fitting)
        result = await self._sandbox.run(programs[0].code, stdin=programs[0].stdin)
        return [result.stdout if result.is_success else None]

    async def _run_together(self, programs: Sequence[Program]) -> Sequence[str | None]:
        limits = self._sandbox.limits
        job = {
            "code": programs[0].code,
            "prelude": PRELUDE,
            "inputs": [program.stdin for program in programs],
            "time_s": limits.time_s,
            "output_bytes": limits.output_bytes,
            "budget_s": _BUDGET_S,
            "stops": not self._settings.partial,
        }
        together = replace(
            limits,
            time_s=limits.time_s + _BUDGET_S + _START_S,
            # An escaped character takes six bytes.
            output_bytes=6 * len(programs) * limits.output_bytes,
        )
        result = await self._sandbox.run(_CASES, stdin=json.dumps(job), limits=together)
        # A program may write further lines itself.
        said = [_json(line) for line in result.stdout.split("\n")[:-1]]
        return [text if isinstance(text, str) else None for text in said] or [None]


def _fitting(programs: Sequence[Program]) -> Sequence[Program]:
    """The first programs, as many as have inputs small enough for their memory; at least one."""
    sizes = accumulate(len(program.stdin) for program in programs)
    return programs[: max(1, sum(size <= _MOST_INPUT for size in sizes))]


class RunResult(Struct, frozen=True):
    """The result of a run."""

    status: str = ""
    return_code: int | None = None
    stdout: str | None = None


class FusionAnswer(Struct, frozen=True):
    """What Sandbox Fusion answers to `run_code`."""

    status: Literal["Success", "Failed", "SandboxError"]
    message: str = ""
    run_result: RunResult | None = None


class SandboxFusion:
    """The reward `sandbox_fusion`: code of many languages in a service elsewhere."""

    class Settings(TestSettings, ServiceSettings):
        language: str = "python"
        """The language, as the service names it. Tests by functions and assertions need Python."""
        compile_timeout_s: Seconds = 10.0
        """Time to compile a program."""
        run_timeout_s: Seconds = 10.0
        """Time to run it."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        url = settings.url.rstrip("/").removesuffix("/run_code")
        self._service = Service(settings.model_copy(update={"url": url}))

    async def score(self, episode: Episode) -> float:
        """Score an episode. Waits for the service to run one test after the other."""
        return await _share(episode, self._settings, self._run)

    async def _run(self, programs: Sequence[Program]) -> Sequence[str | None]:
        program = programs[0]
        settings = self._settings
        request = {
            "code": program.code,
            "stdin": program.stdin,
            "language": settings.language,
            "compile_timeout": settings.compile_timeout_s,
            "run_timeout": settings.run_timeout_s,
            "files": {},
            "fetch_files": [],
        }
        answer = await self._service.post("/run_code", request, FusionAnswer)
        if answer.status == "SandboxError":
            raise RolloutError(f"{settings.url}: SandboxError: {answer.message[:200]}")
        result = answer.run_result
        if answer.status != "Success" or result is None or result.return_code:
            return [None]
        return [result.stdout or ""]


async def _share(episode: Episode, settings: TestSettings, run: Run) -> float:
    """The share of passed tests, or 1 or 0. Waits for one test after the other; stops at the first
    failure unless the share counts.

    Raises:
        FinalError: the row has no tests, or they cannot run where programs run.
        RolloutError: the sandbox does not answer.
    """
    language = getattr(settings, "language", "python")
    solution, num_passed, num_tests = solution_of(answer_of(episode), language), 0, 0
    header = _header(episode, solution)
    for batch in _batches(_tests(settings, episode.prompt)):
        most = None if settings.max_tests is None else settings.max_tests - num_tests
        mark = secrets.token_hex(16)
        rest = [(t, program_of(solution, t, mark, header, most)) for t in batch[:most]]
        while rest:
            outputs = await run([program for _, program in rest])
            for (test, program), output in zip(rest, outputs, strict=False):
                outcome = outcome_of(test, program, output)
                if outcome.missing:
                    raise FinalError(not_installed(episode.prompt, outcome.missing))
                num_passed += outcome.num_passed
                num_tests += min(outcome.num_tests, most or outcome.num_tests)
                if not settings.partial and num_passed < num_tests:
                    return 0.0
            rest = rest[len(outputs) :]
    return num_passed / num_tests


def _batches(tests: Sequence[Test]) -> Iterator[Sequence[Test]]:
    """Batches of adjacent tests that are one code with several inputs. A Python test is its own
    batch, since it may be several tests, and no other process may know its mark."""
    for kind, found in groupby(tests, type):
        batch = list(found)
        yield from ([test] for test in batch) if kind is PythonTest else [batch]


def check_tests(settings: TestSettings, prompt: Prompt, *, is_local: bool) -> None:
    """Check that the row has tests and, if they run on this machine, that it can run them.

    Raises:
        FinalError: no program could be scored.
    """
    tests = _tests(settings, prompt)
    modules = {name for test in tests if isinstance(test, PythonTest) for name in test.modules}
    if is_local and (missing := sorted(name for name in modules if not is_installed(name))):
        raise FinalError(not_installed(prompt, missing))


def _tests(settings: TestSettings, prompt: Prompt) -> list[Test]:
    tests = read_tests(prompt, settings.tests_key)
    language = getattr(settings, "language", "python")
    if not language.startswith("python") and not all(isinstance(t, ProgramTest) for t in tests):
        raise FinalError(
            f"{prompt.origin or 'the row'}: its tests are Python, and language is {language}"
        )
    return tests


def not_installed(prompt: Prompt, modules: Sequence[str]) -> str:
    """The error message about modules that tests need and the interpreter lacks."""
    names = " and ".join(modules)
    why = "; fixtures, parametrize and set-up functions need pytest" if "pytest" in modules else ""
    return (
        f"{prompt.origin or 'the row'}: its tests need {names}, which the Python that runs them "
        f"does not have{why}"
    )


def _header(episode: Episode, solution: str) -> str:
    """The head of a function whose body the solution may be: HumanEval's prompt, or BigCodeBench's.
    For a whole solution that leaves out another function of the prompt: the rest of the prompt."""
    row = episode.prompt.row
    entry_point = str(row.get("entry_point") or "")
    prompts = (row.get(name) for name in ("prompt", "complete_prompt", "code_prompt"))
    for text in prompts if entry_point else ():
        tree = beginning(text) if isinstance(text, str) else None
        if tree is None:
            continue
        if f"def {entry_point}" not in solution:
            return str(text)
        given = [node for node in tree.body if getattr(node, "name", "") != entry_point]
        names = {node.name for node in functions(given)}
        left_out = any(n in solution and f"def {n}" not in solution for n in names)
        return f"{ast.unparse(ast.Module(given, []))}\n" if left_out else ""
    return ""
