"""What the syntax of Python tests tells, without running them."""

import ast
import symtable
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

Function = ast.FunctionDef | ast.AsyncFunctionDef
CAN_FAIL = (ast.Assert, ast.Raise, ast.Call)
"""What ends a test that is not passed."""
_SET_UP = frozenset(
    f"{when}_{what}"
    for when in ("setup", "teardown")
    for what in ("module", "class", "function", "method")
)


def parsed(code: str) -> ast.Module:
    """
    Raises:
        ValueError: it is no Python, as a sentence about "it".
    """
    with _read_as_python():
        return ast.parse(code)


def beginning(code: str) -> ast.Module | None:
    """Of a program, which may end with the head of a function; None if it is no Python."""
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
    """Those among the nodes."""
    return [node for node in nodes if isinstance(node, Function)]


def run_at_once(statements: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """What is run by itself, other than what stands in functions and classes."""
    waiting = list(statements)
    while waiting:
        node = waiting.pop()
        if isinstance(node, Function | ast.ClassDef | ast.Lambda) or _is_display(node):
            continue
        yield node
        waiting += ast.iter_child_nodes(node)


def _is_display(node: ast.AST) -> bool:
    """Whether it is a statement of a value alone, such as the text of a record."""
    running = ast.Call | ast.Await | ast.ListComp | ast.SetComp | ast.BoolOp | ast.IfExp
    return isinstance(node, ast.Expr) and not isinstance(node.value, running)


def callee(node: ast.AST) -> str:
    """The name of the function that is called, without what it is an attribute of."""
    match node:
        case ast.Call(func=ast.Name(id=name)) | ast.Call(func=ast.Attribute(attr=name)):
            return name
    return ""


def called_in_assertion(node: ast.AST) -> Iterator[str]:
    """The functions whose results an assertion looks at; none if the node is none."""
    if isinstance(node, ast.Assert) or callee(node).lower().startswith("assert"):
        yield from map(callee, ast.walk(node))


def imported(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Packages, as they are imported."""
    for node in nodes:
        match node:
            case ast.Import(names=names):
                yield from (alias.name.partition(".")[0] for alias in names)
            case ast.ImportFrom(module=str(module), level=0) if module != "__future__":
                yield module.partition(".")[0]


def free_names(code: str) -> set[str]:
    """What it reads of the module's names without defining it.

    Raises:
        ValueError: it is no Python, as a sentence about "it".
    """
    with _read_as_python():
        table = symtable.symtable(code, "tests.py", "exec")
    own = {s.get_name() for s in table.get_symbols() if _is_bound(s)}
    tables: list[symtable.SymbolTable] = [table]
    used: set[str] = set()
    while tables:
        scope = tables.pop()
        is_module = scope is table
        used |= {
            symbol.get_name()
            for symbol in scope.get_symbols()
            if symbol.is_referenced() and (is_module or symbol.is_global())
        }
        tables += scope.get_children()
    return used - own


def _is_bound(symbol: symtable.Symbol) -> bool:
    return symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()


def needed(function: Function) -> list[str]:
    """Its arguments that have no default, but for `self` and `cls`."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    positional = positional[: len(positional) - len(arguments.defaults)]
    keywords = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    names = [*positional, *(argument for argument, default in keywords if default is None)]
    return [name.arg for name in names if name.arg not in ("self", "cls")]


def needs_pytest(own: list[Function], classes: list[ast.ClassDef]) -> bool:
    """Whether there are fixtures or a set-up, as pytest knows them."""
    found = [*own, *(method for node in classes for method in functions(node.body))]
    if any(node.name in _SET_UP for node in found):
        return True
    return any(needed(node) for node in found if node.name.startswith("test"))


def is_used(check: Function) -> bool:
    """Whether it fails by what it is given."""
    (given,) = needed(check)
    nodes = [node for statement in check.body for node in ast.walk(statement)]
    is_read = any(isinstance(node, ast.Name) and node.id == given for node in nodes)
    return is_read and any(isinstance(node, CAN_FAIL) for node in nodes)


def bases(node: ast.ClassDef) -> list[str]:
    """The names of the classes that it is derived from, without their packages."""
    return [ast.unparse(base).rpartition(".")[2] for base in node.bases]


def runs_all(statement: ast.stmt) -> bool:
    """Whether it is `unittest.main()` or `pytest.main()`, which end the process."""
    calls = (ast.unparse(node.func) for node in ast.walk(statement) if isinstance(node, ast.Call))
    is_plain = isinstance(statement, ast.Expr)
    return is_plain and any(call in ("unittest.main", "pytest.main") for call in calls)


def without(code: str, statements: Iterable[ast.stmt]) -> str:
    """The code with empty lines in place of the statements."""
    lines = code.splitlines()
    for statement in statements:
        end = statement.end_lineno or statement.lineno
        lines[statement.lineno - 1 : end] = [""] * (end - statement.lineno + 1)
    return "\n".join(lines)
