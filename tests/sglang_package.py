"""The source of the real SGLang, of the version that StreamRL is written against.

Its wheel needs no GPU to be read: it is downloaded once, without what it depends on, and kept in
`.sglang`. Where it can't be had a test says so; in CI that is a failure.
"""

import ast
import os
import subprocess
import sys
import types
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

VERSION = "0.5.23"
FOLDER = Path(__file__).parents[1] / ".sglang"


@cache
def _wheel() -> zipfile.ZipFile:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    if not (found := list(FOLDER.glob(f"sglang-{VERSION}-*.whl"))):
        words = [*pip, "--no-deps", "--only-binary=:all:", "-d", str(FOLDER), f"sglang=={VERSION}"]
        got = subprocess.run(words, capture_output=True, text=True, timeout=200, check=False)
        if got.returncode != 0:
            told = f"SGLang {VERSION} could not be downloaded: {got.stderr.strip()[-300:]}"
            pytest.fail(told) if os.environ.get("CI") else pytest.skip(told)
        found = list(FOLDER.glob(f"sglang-{VERSION}-*.whl"))
    return zipfile.ZipFile(found[0])


def source(path: str) -> str:
    """A file below `sglang/`."""
    return _wheel().read(f"sglang/{path}").decode()


def sources(folder: str) -> str:
    """All Python files of a folder below `sglang/`, one after the other."""
    names = [name for name in _wheel().namelist() if name.startswith(f"sglang/{folder}/")]
    return "\n".join(_wheel().read(name).decode() for name in names if name.endswith(".py"))


def module(path: str) -> Any:
    """A file that needs nothing else of SGLang, as a module."""
    made = types.ModuleType("sglang_" + Path(path).stem)
    sys.modules[made.__name__] = made
    exec(compile(source(path), path, "exec"), made.__dict__)
    return made


def function(path: str, name: str, **names: object) -> Any:
    """One function of a file, with the global names it needs."""
    (tree,) = [n for n in ast.parse(source(path)).body if getattr(n, "name", "") == name]
    scope: dict[str, Any] = dict(names)
    exec(compile(ast.Module([tree], []), path, "exec"), scope)
    return scope[name]


def fields(text: str, name: str) -> dict[str, ast.AnnAssign]:
    """The annotated fields of a class in this text, those of its bases there included."""
    classes = _classes(text)
    found = classes[name]
    inherited: dict[str, ast.AnnAssign] = {}
    for base in found.bases:
        if isinstance(base, ast.Name) and base.id in classes:
            inherited |= fields(text, base.id)
    own = [n for n in found.body if isinstance(n, ast.AnnAssign)]
    return inherited | {n.target.id: n for n in own if isinstance(n.target, ast.Name)}


@cache
def _classes(text: str) -> dict[str, ast.ClassDef]:
    return {n.name: n for n in ast.parse(text).body if isinstance(n, ast.ClassDef)}
