"""Code of the user's own, named in a configuration as PATH.py:NAME.

Invariant: a file is run once per process, under its own name, so it may import what stands beside
it; whatever is wrong with it is one sentence that begins with the field that names it.
"""

import ast
import importlib.util
import inspect
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, SupportsFloat, TypeGuard, TypeVar, cast

from streamrl.errors import ConfigError, StreamRLError, did_you_mean, similar_path

Entry = TypeVar("Entry", bound=Callable[..., Any])

# A global of the user's files, by which a frame of a traceback is recognized as theirs.
_MARK = "__streamrl_user_code__"


def is_user_code(entry: str) -> bool:
    """Whether the entry names a file of the user's rather than something built in.

    >>> is_user_code("rewards.py:score"), is_user_code("exact_match")
    (True, False)
    """
    return re.search(r"\.py(:|$)", entry) is not None


def check_user_code(entry: str) -> str:
    """The entry. Raises ValueError if it is not of the form PATH.py:NAME."""
    file, _, name = entry.rpartition(":")
    if not file.endswith(".py") or not name.isidentifier():
        raise ValueError(f"was {entry!r}; code of your own is named PATH.py:NAME")
    return entry


def named(field: str, name: str, built_in: Mapping[str, Entry]) -> Entry:
    """What a setting names: an entry of the table, or the user's own at PATH.py:NAME.

    Raises:
        ConfigError: a user's own that cannot be loaded.
        ValueError: the name is unknown.
    """
    if is_user_code(name):
        return cast(Entry, load_user_code(field, name))
    if name not in built_in:
        kind = field.rpartition(".")[2]
        raise ValueError(f"{kind}: {name!r} is unknown; {did_you_mean(name, built_in)}")
    return built_in[name]


def load_user_code(field: str, entry: str) -> Callable[..., Any]:
    """The function or class at PATH.py:NAME.

    Args:
        field: the setting that names it, such as `data.reward`; errors begin with it.

    Raises:
        ConfigError: no such file or name, or the file cannot be run.
    """
    path, name = _place_of(field, entry)
    with attributed_to(f"{field}: {path}"):
        module = _run(path.resolve())
    function = getattr(module, name, None)
    if not callable(function):
        own = [
            n
            for n, value in vars(module).items()
            if (inspect.isfunction(value) or inspect.isclass(value))
            and value.__module__ == module.__name__
        ]
        raise ConfigError(f"{field}: {path} has no function {name!r}; {did_you_mean(name, own)}")
    loaded: Callable[..., Any] = function
    return loaded


def find_user_code(field: str, entry: str) -> None:
    """As `load_user_code`, without running the file: what needs torch takes seconds to load.

    Raises:
        ConfigError: no such file, it is no Python, or nothing at its top level has the name.
    """
    path, name = _place_of(field, entry)
    with attributed_to(f"{field}: {path}"):
        own = [*_names_bound_in(ast.parse(path.read_bytes(), str(path)))]
    if name not in own and "*" not in own:
        raise ConfigError(f"{field}: {path} has no function {name!r}; {did_you_mean(name, own)}")


def check_kwargs(
    field: str,
    name: str,
    function: Callable[..., Any],
    kwargs: Mapping[str, Any],
    *,
    num_given: int = 0,
) -> None:
    """Whether a function or class takes the arguments of a setting, and has all that it needs.

    Args:
        field: the setting that has them, such as `data.reward_kwargs`; errors begin with it.
        num_given: its first parameters, which others give.

    Raises:
        ConfigError: an argument is unknown, or one that has no default is missing.
    """
    parameters = _parameters(function)[num_given:]
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    allowed = [p.name for p in named]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    for key in kwargs:
        if key not in allowed and not takes_any:
            hint = did_you_mean(key, allowed) if allowed else "it takes none"
            raise ConfigError(f"{field}: {name} takes no {key!r}; {hint}")
    for parameter in named:
        if parameter.default is parameter.empty and parameter.name not in kwargs:
            raise ConfigError(f"{field}: {name} needs {parameter.name!r}")


def _parameters(function: Callable[..., Any]) -> tuple[inspect.Parameter, ...]:
    """Of a class that has only what it gets of `object` there are none; `inspect` would touch every
    module to say so, whose memory a forked generator shares with others."""
    if type(function) is type:
        own = {name for base in function.__mro__[:-1] for name in vars(base)}
        if own.isdisjoint(("__init__", "__new__")):
            return ()
    return tuple(inspect.signature(function).parameters.values())


@contextmanager
def attributed_to(owner: str, kind: type[StreamRLError] = ConfigError) -> Iterator[None]:
    """Around code of the user's, which may raise anything: the error says whose code it was.

    Raises:
        kind: for every exception in the block, `exit()` and others that are no `Exception`
            included, as "owner: its type: its message (FILE:LINE)".
    """
    try:
        yield
    except BaseException as error:
        # Not above: the command line does without it.
        from asyncio import CancelledError

        if isinstance(error, CancelledError | GeneratorExit | KeyboardInterrupt):
            # It ends the task or the process that the user's code runs in.
            raise
        raise kind(f"{owner}: {type(error).__name__}: {error}{_place(error)}") from error


def is_finite_number(value: Any) -> TypeGuard[SupportsFloat]:
    """Whether what the user's code gave is one number, also of NumPy or torch, and finite.

    >>> is_finite_number(True), is_finite_number("1"), is_finite_number(10**400)
    (True, False, False)
    """
    try:
        return hasattr(value, "__float__") and math.isfinite(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        # An array, a tensor of several numbers, an integer above all floats.
        return False


def user_traceback(error: BaseException | None) -> TracebackType | None:
    """The frames of the error from the user's own code on; None if it was not raised there."""
    frame = error.__traceback__ if error is not None else None
    while frame is not None and _MARK not in frame.tb_frame.f_globals:
        frame = frame.tb_next
    return frame


def defined_at(function: Callable[..., Any]) -> str:
    """ " (FILE:LINE)" of a function of the user's own, "" of any other."""
    code = getattr(function, "__code__", None)
    if code is None or _MARK not in function.__globals__:
        return ""
    return f" ({Path(code.co_filename).name}:{code.co_firstlineno})"


def _place(error: BaseException) -> str:
    """As `defined_at`, of the innermost frame in the user's own files."""
    place, frame = "", user_traceback(error)
    while frame is not None:
        if _MARK in frame.tb_frame.f_globals:
            file = Path(frame.tb_frame.f_code.co_filename).name
            place = f" ({file}:{frame.tb_lineno})"
        frame = frame.tb_next
    return place


def _place_of(field: str, entry: str) -> tuple[Path, str]:
    """The file, which exists, and the name in it."""
    try:
        check_user_code(entry)
    except ValueError as error:
        raise ConfigError(f"{field}: {error}") from error
    file, _, name = entry.rpartition(":")
    path = Path(file)
    if not path.is_file():
        remedy = similar_path(path) or f"; give the path of one that has {name}"
        raise ConfigError(f"{field}: there is no file {path}{remedy}")
    return path, name


def _names_bound_in(node: ast.AST) -> Iterator[str]:
    """The names that code binds at its own level, also in its branches."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            yield node.name
        case ast.Import() | ast.ImportFrom():
            yield from (alias.asname or alias.name for alias in node.names)
        case ast.Name(ctx=ast.Store()):
            yield node.id
        case _:
            for child in ast.iter_child_nodes(node):
                yield from _names_bound_in(child)


@cache
def _run(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None, "a .py file has a loader"
    assert spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    setattr(module, _MARK, True)
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    # Dataclasses look their module up by name; a name that is taken stays with its owner.
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module
