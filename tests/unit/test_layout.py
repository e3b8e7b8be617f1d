"""The limits that keep the tree readable: lines of a file, lines of a function, files of a folder,
and a sentence that says what a folder is; that code which runs elsewhere imports what exists; and
that tables are whole.

The import floors are proven by import-linter, in `make check`.
"""

import ast
import csv
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("streamrl", "buffers", "actors", "learners")
MAX_FILE_LINES = 700
MAX_FUNCTION_LINES = 60
MAX_FILES = 15
MIN_FILE_LINES = 60
SHORT = {
    "a command": "cli/evaluate cli/keys cli/new",
    "a section of the configuration": "config/tracking",
    "an interface, or what messages hold, beside others of its kind": (
        "interfaces/tracking types/parity types/validation"
    ),
    "imported where torch or vLLM must not be, or run by a process of its own": (
        "engines/vllm/cpu engines/vllm/plugin served/process_guard"
    ),
    "one half of what actors and learners do, which don't see each other": (
        "actors/parity learners/parity"
    ),
    "where a plug-in is chosen": "buffers/connect",
}
"""Modules of fewer lines, by the reason; a path ends with one of these."""


@pytest.fixture(scope="module")
def sources() -> list[Path]:
    files = [path for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py"))]
    assert len(files) > 100
    return files


def test_no_file_is_longer_than_the_limit(sources: list[Path]):
    lua = sorted((ROOT / "buffers").rglob("*.lua"))
    lengths = {path: len(path.read_text().splitlines()) for path in (*sources, *lua)}
    assert not {str(p): n for p, n in lengths.items() if n > MAX_FILE_LINES}


def test_no_function_is_longer_than_the_limit(sources: list[Path]):
    long = [where for path in sources for where in long_functions(path)]
    assert not long


def test_no_folder_has_more_files_side_by_side_than_the_limit(sources: list[Path]):
    folders = Counter(path.parent for path in sources if path.name != "__init__.py")
    assert not {str(folder): n for folder, n in folders.items() if n > MAX_FILES}


def test_no_file_is_shorter_than_the_limit_without_a_reason(sources: list[Path]):
    short = {
        path.relative_to(ROOT).with_suffix("")
        for path in sources
        if not path.name.startswith("__") and len(path.read_text().splitlines()) < MIN_FILE_LINES
    }
    listed = {Path(name) for names in SHORT.values() for name in names.split()}
    named = {
        path: [name for name in listed if path.parts[-len(name.parts) :] == name.parts]
        for path in short
    }
    assert not [str(path) for path, names in named.items() if not names]
    assert listed == {name for names in named.values() for name in names}


def test_every_folder_says_what_it_is(sources: list[Path]):
    inits = {path.parent / "__init__.py" for path in sources}
    assert not [str(path) for path in inits if not ast.get_docstring(ast.parse(path.read_text()))]


@pytest.mark.parametrize("folder", ["benchmarks", "fuzz", "gpu", "research"])
def test_what_runs_on_a_gpu_or_by_hand_imports_what_there_is(folder: str):
    """Neither a type checker nor another test reads all of it."""
    trees = {p: ast.parse(p.read_text()) for p in (ROOT / "tests" / folder).rglob("*.py")}
    imports = [
        (path.name, node.module, alias.name)
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in PACKAGES
        for alias in node.names
    ]
    assert imports
    assert not [(path, module, name) for path, module, name in imports if not has(module, name)]


def has(module: str, name: str) -> bool:
    try:
        found = import_module(module)
    except ModuleNotFoundError as lacking:
        # A library that is not installed here.
        return str(lacking.name).split(".")[0] not in PACKAGES
    return hasattr(found, name) or (
        hasattr(found, "__path__") and find_spec(f"{module}.{name}") is not None
    )


def long_functions(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if num_lines > MAX_FUNCTION_LINES:
                yield f"{path}:{node.lineno} {node.name}: {num_lines} lines"


def test_every_line_of_a_table_has_a_cell_for_each_column():
    """A comma outside quotes would cut the cell before it."""
    tables = sorted((ROOT / "streamrl").rglob("*.csv"))
    assert len(tables) > 5
    for path in tables:
        with path.open(newline="") as file:
            heading, *lines = csv.reader(file)
        assert not [line for line in lines if len(line) != len(heading)], path
