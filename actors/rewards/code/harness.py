"""Loads a program and runs the tests of its row on it; its last line of output says the result.

It runs in the sandbox as a program itself. It reads a job as JSON from standard input and imports
only the standard library (and pytest, if the tests need it). It writes one line to standard output:
the job's mark with the number of passed tests and of all, or with the modules that the tests need
and this interpreter lacks.

Invariant: only this file writes to that output, and nothing that the program does early (ending,
printing, replacing what tests are made of) counts as a pass. The mark is not in this file, and is
read before the program is loaded.
"""

import importlib
import inspect
import json
import linecache
import os
import sys
import traceback
import unittest
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

_PROGRAM, _FILE = "solution", "solution.py"
# Modules that tests may be made of, besides the functions below.
_MACHINERY = ("builtins", "unittest", "pytest", "_pytest")
# Tests replace these, too.
_REPLACEABLE = frozenset({"input", "open", "print", "__import__", "_"})
# Plugins of pytest, by the modules that they are installed as.
_PLUGINS = {"pytest_asyncio": "asyncio", "pytest_mock": "pytest_mock"}
Counts = tuple[int, int]  # How many tests passed, of how many.
Part = tuple[str, ModuleType, Any, dict[str, Any]]
"""A module's name, the module, an owner (the module or a class in it), and the owner's
callables."""


class _LackError(Exception):
    """Something that the tests need is not installed."""


def main() -> None:
    """Run the job, report its result and end the process."""
    write, leave, every = os.write, os._exit, BaseException
    job: dict[str, Any] = json.loads(sys.stdin.buffer.read())
    report, mark = _take_output(), job.pop("mark")
    try:
        passed, total = _run(job)
        said = f"passed {passed} of {total}"
    except _LackError as error:
        said = f"missing {'|'.join(error.args)}"
    except every:
        said = f"passed 0 of {job['num_tests']}"
    write(report, f"\n{mark}{said}\n".encode())
    leave(0)


def _take_output() -> int:
    """Return a descriptor of the real standard output; the program's own streams go nowhere."""
    report, nothing = os.dup(1), os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    return report


def is_installed(module: str) -> bool:
    """Whether this interpreter can import it, as far as can be told without importing it."""
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _machinery() -> Iterator[Part]:
    """Yield what tests are made of."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in _MACHINERY:
            classes = [
                value
                for value in vars(module).values()
                if isinstance(value, type) and value.__module__ == name != "builtins"
            ]
            for owner in (module, *classes):
                own = {n: v for n, v in vars(owner).items() if callable(v)}
                yield name, module, owner, own


def _is_whole(machinery: list[Part]) -> bool:
    """Whether no part of it was replaced."""
    return all(
        sys.modules.get(name) is module
        and all(vars(owner).get(n) is v for n, v in own.items() if n not in _REPLACEABLE)
        for name, module, owner, own in machinery
    )


def _run(job: dict[str, Any]) -> Counts:
    if missing := [name for name in job["modules"] if not is_installed(name)]:
        raise _LackError(*missing)
    if job["by_pytest"]:
        importlib.import_module("pytest")
    machinery = list(_machinery())
    program = _loaded(job["program"])
    if not _is_whole(machinery):
        return 0, job["num_tests"]
    names, most = job["names"], job["max_tests"]
    if job["by_pytest"]:
        passed, total = _by_pytest(job)
    else:
        # Scripts may call their tests below `if __name__ == "__main__"`; named tests are called
        # here.
        vars(program)["__name__"] = _PROGRAM if names else "__main__"
        exec(compile(job["tests"], "tests.py", "exec"), vars(program))
        passed, total = _by_unittest(program, names, most) if names else (1, 1)
    # While pytest runs, its plugins replace its own parts.
    if not _is_whole([part for part in machinery if not part[0].startswith("_pytest")]):
        passed = 0
    # Skipping all tests is no pass.
    return (passed, total) if total else (0, 1)


def _loaded(code: str) -> ModuleType:
    """Load the program as the module `solution`, which is the main module, too."""
    program = ModuleType(_PROGRAM)
    vars(program).update(__file__=os.path.abspath(_FILE), unittest=unittest)
    for name in (_PROGRAM, "__main__"):
        sys.modules[name] = program
    linecache.cache[_FILE] = len(code), None, code.splitlines(keepends=True), _FILE
    exec(compile(code, _FILE, "exec"), vars(program))
    return program


def _by_unittest(program: ModuleType, names: list[str], most: int | None) -> Counts:
    cases = [case for name in names for case in _cases(getattr(program, name))][:most]
    result = _Result()
    unittest.TestSuite(cases).run(result)
    return len(result.passed - result.failed), len(cases) - len(result.passed_over)


def _cases(owner: Any) -> list[unittest.TestCase]:
    """The test cases of a class, or the one that a function is."""
    if not isinstance(owner, type):
        return [unittest.FunctionTestCase(_waited(owner))]
    if issubclass(owner, unittest.TestCase):
        loader = unittest.TestLoader()
        return [owner(name) for name in loader.getTestCaseNames(owner)]
    names = [name for name in dir(owner) if name.startswith("test")]
    return [unittest.FunctionTestCase(_waited(getattr(owner(), name))) for name in names]


def _waited(function: Callable[[], Any]) -> Callable[[], None]:
    def call() -> None:
        answer = function()
        if inspect.iscoroutine(answer):
            # Importing asyncio takes longer than most tests.
            importlib.import_module("asyncio").run(answer)

    return call


class _Result(unittest.TestResult):
    """The ids of tests that passed, of tests that failed at least in part, and of skipped tests."""

    def __init__(self) -> None:
        super().__init__()
        self.passed: set[int] = set()
        self.failed: set[int] = set()
        self.passed_over: set[int] = set()

    def addSuccess(self, test: unittest.TestCase, err: Any = None) -> None:
        self.passed.add(id(test))

    def addFailure(self, test: unittest.TestCase, err: Any = None) -> None:
        self.failed.add(id(test))

    addExpectedFailure = addSuccess
    addError = addUnexpectedSuccess = addFailure

    def addSubTest(self, test: unittest.TestCase, subtest: Any, err: Any) -> None:
        if err is not None:
            self.failed.add(id(test))

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        """A skip that the program itself raises is a failure."""
        trace = sys.exc_info()[2]
        files = {frame.f_code.co_filename for frame, _ in traceback.walk_tb(trace)}
        (self.failed if _FILE in files else self.passed_over).add(id(test))


def _by_pytest(job: dict[str, Any]) -> Counts:
    import pytest

    file = Path("test_of_the_row.py")
    # Tests may use the program's names without importing them.
    names_of_it = (
        "globals().update({n: v for n, v in vars(__import__('sys').modules"
        f"['{_PROGRAM}']).items() if n[:2] != '__'}})"
    )
    file.write_text(f"{names_of_it}\n{job['tests']}", encoding="utf-8")
    followed = _Followed(set(job["names"]), job["max_tests"])
    options = ["-q", "--capture=sys", "-p", "no:cacheprovider", "--rootdir=.", "-c", os.devnull]
    # Plugins that are not needed take longer to import than pytest itself.
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    for module, plugin in _PLUGINS.items():
        options += [f"-p{plugin}"] if module in job["modules"] else []
    options += ["-oasyncio_mode=auto"] if "pytest_asyncio" in job["modules"] else []
    pytest.main([*options, str(file)], plugins=[followed])
    if followed.lacking:
        raise _LackError(*(f"the fixture {name}" for name in followed.lacking))
    return len(followed.passed - followed.failed), followed.num_tests - len(followed.passed_over)


class _Followed:
    """A plugin of pytest that records the result of each test of these names, by its node."""

    def __init__(self, names: set[str], most: int | None) -> None:
        self._names = names
        self._most = most
        self.num_tests = 0
        self.passed: set[str] = set()
        self.failed: set[str] = set()
        self.passed_over: set[str] = set()
        self.lacking: list[str] = []

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        wanted = [item for item in items if self._name(item.nodeid) in self._names]
        items[:] = wanted[: self._most]
        self.num_tests = len(items)

    def pytest_runtest_logreport(self, report: Any) -> None:
        node = report.nodeid
        if report.failed:
            self.failed.add(node)
            if type(report.longrepr).__name__ == "FixtureLookupErrorRepr":
                self.lacking.append(report.longrepr.argname)
        elif hasattr(report, "wasxfail") or (report.passed and report.when == "call"):
            self.passed.add(node)
        elif report.skipped:
            is_of_program = _FILE in str(report.longrepr)
            (self.failed if is_of_program else self.passed_over).add(node)

    @staticmethod
    def _name(node: str) -> str:
        return node.split("::")[1].partition("[")[0]


if __name__ == "__main__":
    main()
