"""Tests that are Python code: what they consist of, and what they need to run.

    class TestCases(unittest.TestCase)    every test method is a test
    def test_...(), class Test...         every function and method is one; pytest runs them if the
                                          text imports it, or if they need fixtures or a set-up
    def check(candidate)                  one test, called with the row's function
    anything else                         one test: it raises if the program is wrong

Invariant: a test that is read here can tell programs apart, as far as its text shows: it runs an
assertion, a raise or a call, and names something that it does not define itself. Only the syntax is
examined; nothing is run.
"""

import ast
import builtins
import symtable
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache

Function = ast.FunctionDef | ast.AsyncFunctionDef
CAN_FAIL = (ast.Assert, ast.Raise, ast.Call)
"""What can make a test fail."""
_SET_UP = frozenset(
    f"{when}_{what}"
    for when in ("setup", "teardown")
    for what in ("module", "class", "function", "method")
)


def parsed(code: str) -> ast.Module:
    """Parse code. Raises ValueError, a sentence about "it", if it is no Python."""
    with _read_as_python():
        return ast.parse(code)


def beginning(code: str) -> ast.Module | None:
    """Parse the beginning of a program, which may end with a function's head; None if it is no
    Python."""
    for ending in ("", "\n    pass", "\n        pass"):
        with suppress(ValueError):
            return parsed(code.rstrip() + ending)
    return None


@contextmanager
def _read_as_python() -> Iterator[None]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except SyntaxError as error:
        raise ValueError(f"it is no Python: {error.msg} (line {error.lineno})") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"it is no Python: {error or type(error).__name__}") from error


def functions(nodes: Iterable[ast.AST]) -> list[Function]:
    return [node for node in nodes if isinstance(node, Function)]


def run_at_once(statements: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield the nodes that run when the module does: not those inside functions and classes."""
    waiting = list(statements)
    while waiting:
        node = waiting.pop()
        if isinstance(node, Function | ast.ClassDef | ast.Lambda) or _is_display(node):
            continue
        yield node
        waiting += ast.iter_child_nodes(node)


def _is_display(node: ast.AST) -> bool:
    """Whether it is a statement that only states a value, such as a docstring."""
    running = ast.Call | ast.Await | ast.ListComp | ast.SetComp | ast.BoolOp | ast.IfExp
    return isinstance(node, ast.Expr) and not isinstance(node.value, running)


def callee(node: ast.AST) -> str:
    """The name of the called function, without its owner; "" if the node is no call."""
    match node:
        case ast.Call(func=ast.Name(id=name)) | ast.Call(func=ast.Attribute(attr=name)):
            return name
    return ""


def called_in_assertion(node: ast.AST) -> Iterator[str]:
    """Yield the functions whose results an assertion checks; nothing if the node is no
    assertion."""
    if isinstance(node, ast.Assert) or callee(node).lower().startswith("assert"):
        yield from map(callee, ast.walk(node))


def imported(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the names of imported packages."""
    for node in nodes:
        match node:
            case ast.Import(names=names):
                yield from (alias.name.partition(".")[0] for alias in names)
            case ast.ImportFrom(module=str(module), level=0) if module != "__future__":
                yield module.partition(".")[0]


def free_names(code: str) -> set[str]:
    """The global names that code reads without defining them. Raises ValueError, a sentence about
    "it", if it is no Python."""
    with _read_as_python():
        module = symtable.symtable(code, "tests.py", "exec")
    own = {
        symbol.get_name()
        for symbol in module.get_symbols()
        if symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()
    }
    used, scopes = set[str](), [module]
    while scopes:
        scope = scopes.pop()
        scopes += scope.get_children()
        used |= {s.get_name() for s in scope.get_symbols() if s.is_referenced() and s.is_global()}
    return used - own


def needed(function: Function) -> list[str]:
    """The function's arguments without a default, except `self` and `cls`."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    positional = positional[: len(positional) - len(arguments.defaults)]
    keywords = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    names = [*positional, *(argument for argument, default in keywords if default is None)]
    return [name.arg for name in names if name.arg not in ("self", "cls")]


def needs_pytest(found: list[Function]) -> bool:
    """Whether there are fixtures or set-up functions of pytest's kind."""
    return any(
        node.name in _SET_UP or (node.name.startswith("test") and needed(node)) for node in found
    )


def is_used(check: Function) -> bool:
    """Whether the check uses its argument and can fail."""
    (given,) = needed(check)
    nodes = [node for statement in check.body for node in ast.walk(statement)]
    is_read = any(isinstance(node, ast.Name) and node.id == given for node in nodes)
    return is_read and any(isinstance(node, CAN_FAIL) for node in nodes)


def bases(node: ast.ClassDef) -> list[str]:
    """The names of its base classes, without their packages."""
    return [ast.unparse(base).rpartition(".")[2] for base in node.bases]


def runs_all(statement: ast.stmt) -> bool:
    """Whether it is `unittest.main()` or `pytest.main()`, which end the process."""
    calls = (ast.unparse(node.func) for node in ast.walk(statement) if isinstance(node, ast.Call))
    is_plain = isinstance(statement, ast.Expr)
    return is_plain and any(call in ("unittest.main", "pytest.main") for call in calls)


def without(code: str, statements: Iterable[ast.stmt]) -> str:
    """The code with the statements replaced by empty lines."""
    lines = code.splitlines()
    for statement in statements:
        end = statement.end_lineno or statement.lineno
        lines[statement.lineno - 1 : end] = [""] * (end - statement.lineno + 1)
    return "\n".join(lines)


PROGRAM_MODULES = frozenset({"solution", "__main__"})
"""The module names under which tests import the program."""
# With these, a test may reach the program without naming it.
_LOOK_UPS = frozenset({"exec", "eval", "globals", "getattr", "__import__", "compile"})


@dataclass(frozen=True)
class PythonTest:
    """Test code that is run after the program."""

    code: str
    names: tuple[str, ...] = ()
    """Its classes and functions that are tests; without any, the whole code is one test."""
    num_tests: int = 1
    """The number of tests, as far as the text tells."""
    modules: tuple[str, ...] = ()
    """Modules that must be installed where it runs."""
    by_pytest: bool = False
    header: str = ""
    """Code before the program."""


@lru_cache(maxsize=128)
def python_test(code: str, entry_point: str = "") -> PythonTest:
    """
    Args:
        entry_point: what `check` is called with: a function, or a method such as `Solution().add`.

    Raises:
        ValueError: it tests nothing, as a sentence about "it".
    """
    text = _Text(code)
    if (check := text.check) is not None:
        entry_point = entry_point or text.entry_point
        if not entry_point:
            raise ValueError(
                "it defines check, and neither a column entry_point, METADATA nor the prompt names "
                "the one function to call it with"
            )
        if not is_used(check):
            raise ValueError("its check tests nothing")
        called = f"{code}\ncheck({entry_point})\n"
        parsed(called)
        return PythonTest(called, modules=text.modules)
    test = text.suite or PythonTest(code, modules=text.modules)
    if not test.names and not any(isinstance(node, CAN_FAIL) for node in text.run_at_once):
        raise ValueError("it runs no assertion, raise, call or test")
    if not any(isinstance(node, CAN_FAIL) for node in ast.walk(text.tree)):
        raise ValueError("its tests have no assertion, raise or call")
    if not text.names_program:
        raise ValueError("it names nothing that it does not define itself: every program passes")
    return test


def defined_functions(code: str) -> list[str]:
    """The public functions, and methods of `Solution`, that a program or its beginning defines.

    >>> defined_functions("class Solution:\\n    def add(self, a, b):")
    ['Solution().add']
    """
    tree = beginning(code)
    if tree is None:
        return []
    found = [node.name for node in functions(tree.body)]
    for owner in tree.body:
        if isinstance(owner, ast.ClassDef) and owner.name == "Solution":
            found += [f"Solution().{node.name}" for node in functions(owner.body)]
    return [name for name in found if not name.rpartition(".")[2].startswith("_")]


class _Text:
    """Test code, taken apart."""

    def __init__(self, code: str) -> None:
        self.code = code
        self.tree = parsed(code)
        self.run_at_once = list(run_at_once(self.tree.body))
        # Modules that it imports unconditionally, except the program.
        self.modules = tuple(sorted(set(imported(self.tree.body)) - PROGRAM_MODULES))
        self._called = frozenset(map(callee, self.run_at_once))
        self._functions = functions(self.tree.body)
        classes = (node for node in self.tree.body if isinstance(node, ast.ClassDef))
        self._classes = {node.name: node for node in classes}

    @property
    def check(self) -> Function | None:
        """HumanEval's function, unless the text calls it itself."""
        for node in self._functions:
            if node.name == "check" and len(needed(node)) == 1 and "check" not in self._called:
                return node
        return None

    @property
    def entry_point(self) -> str:
        """The entry point that its record METADATA names; "" without one."""
        for node in self.tree.body:
            match node:
                case ast.Assign(targets=[ast.Name(id="METADATA")], value=ast.Dict() as record):
                    for key, value in zip(record.keys, record.values, strict=True):
                        match key, value:
                            case ast.Constant("entry_point"), ast.Constant(str(name)):
                                return name
        return ""

    @property
    def suite(self) -> PythonTest | None:
        """Its test classes and functions; None if there are none, or only functions that it calls
        itself."""
        tests = {node.name: node for node in self._functions if node.name.startswith("test")}
        suites = {name: found for name in self._classes if (found := self._tests_of(name))}
        if not suites and tests.keys() <= self._called:
            return None
        order = [node.name for node in self.tree.body if isinstance(node, Function | ast.ClassDef)]
        names = dict.fromkeys(name for name in order if name in tests or name in suites)
        num_tests = len(tests) + sum(map(len, suites.values()))
        code = without(self.code, filter(runs_all, self.tree.body))
        test = PythonTest(code, tuple(names), num_tests, self.modules)
        plain = [self._classes[name] for name in suites if not self._is_case(name)]
        methods = [method for node in plain for method in functions(node.body)]
        if "pytest" not in self.modules and not needs_pytest([*self._functions, *methods]):
            return test
        of_pytest = [*tests.values(), *methods]
        is_async = any(isinstance(node, ast.AsyncFunctionDef) for node in of_pytest)
        has_mocks = any("mocker" in needed(node) for node in of_pytest)
        plugins = {"pytest_asyncio": is_async, "pytest_mock": has_mocks}
        modules = {*self.modules, "pytest", *(name for name, has in plugins.items() if has)}
        return replace(test, modules=tuple(sorted(modules)), by_pytest=True)

    @property
    def names_program(self) -> bool:
        if PROGRAM_MODULES & set(imported(ast.walk(self.tree))):
            return True
        free = free_names(self.code)
        # A program may be named like a built-in function; then an assertion checks its result.
        asserted = {name for node in ast.walk(self.tree) for name in called_in_assertion(node)}
        named = free - set(dir(builtins)) - {"unittest", "pytest"}
        named |= free & (asserted | _LOOK_UPS)
        return any(not name.startswith("__") or name in _LOOK_UPS for name in named)

    def _is_case(self, name: str) -> bool:
        """Whether the class is a `TestCase` of unittest."""
        return any(
            base.endswith("TestCase") or (base in self._classes and self._is_case(base))
            for base in bases(self._classes[name])
            if base != name
        )

    def _tests_of(self, name: str) -> list[Function]:
        """The test methods of a test class, including those of its direct bases."""
        if not (name.startswith("Test") or self._is_case(name)):
            return []
        found = (self._classes.get(base) for base in bases(self._classes[name]))
        owners = [*(base for base in found if base), self._classes[name]]
        methods = {m.name: m for owner in owners for m in functions(owner.body)}
        return [method for name, method in methods.items() if name.startswith("test")]
