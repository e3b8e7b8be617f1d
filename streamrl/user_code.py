"""User code, named in a configuration as PATH.py:NAME.

Invariant: a file is run once per process, under its own name, so it may import modules beside it;
every error about it is one sentence that begins with the field that names it.
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

# A global in the user's files, by which traceback frames are recognized as user code.
_MARK = "__streamrl_user_code__"


def is_user_code(entry: str) -> bool:
    """Whether the entry names a user's file rather than something built in.

    >>> is_user_code("rewards.py:score"), is_user_code("exact_match")
    (True, False)
    """
    return re.search(r"\.py(:|$)", entry) is not None


def check_user_code(entry: str) -> str:
    """Return the entry, or raise ValueError if it does not have the form PATH.py:NAME."""
    file, _, name = entry.rpartition(":")
    if not file.endswith(".py") or not name.isidentifier():
        raise ValueError(f"was {entry!r}; code of your own is named PATH.py:NAME")
    return entry


def named(field: str, name: str, built_in: Mapping[str, Entry]) -> Entry:
    """What a setting names: an entry of the table, or user code at PATH.py:NAME.

    Raises:
        ConfigError: the user code cannot be loaded.
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
        field: the setting that names it, such as `data.reward`, with which errors begin.

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
    """Check for `load_user_code` without running the file: loading torch takes seconds.

    Raises:
        ConfigError: no such file, it is not Python, or nothing at its top level has the name.
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
    """Check that a function or class accepts the arguments in a setting and lacks none.

    Args:
        field: the setting with the arguments, such as `data.reward_kwargs`; errors begin with it.
        num_given: number of leading parameters that the caller passes itself.

    Raises:
        ConfigError: an argument is unknown, or one without a default is missing.
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
    """None for a class with only the constructor of `object`: `inspect` would touch every module to
    find that out, and so copy memory that a forked generator shares with others."""
    if type(function) is type:
        own = {name for base in function.__mro__[:-1] for name in vars(base)}
        if own.isdisjoint(("__init__", "__new__")):
            return ()
    return tuple(inspect.signature(function).parameters.values())


@contextmanager
def attributed_to(owner: str, kind: type[StreamRLError] = ConfigError) -> Iterator[None]:
    """For a block that runs user code, which may raise anything: the error says whose code it was.

    Raises:
        kind: for every exception in the block, including `exit()` and others that are not an
            `Exception`, as "owner: its type: its message (FILE:LINE)".
    """
    try:
        yield
    except BaseException as error:
        # Imported here, since the command line does without it.
        from asyncio import CancelledError

        if isinstance(error, CancelledError | GeneratorExit | KeyboardInterrupt):
            # These end the task or process in which the user code runs.
            raise
        raise kind(f"{owner}: {type(error).__name__}: {error}{_place(error)}") from error


def is_finite_number(value: Any) -> TypeGuard[SupportsFloat]:
    """Whether a value from user code is a single finite number, also of NumPy or torch.

    >>> is_finite_number(True), is_finite_number("1"), is_finite_number(10**400)
    (True, False, False)
    """
    try:
        return hasattr(value, "__float__") and math.isfinite(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        # An array, a tensor with several numbers, or an integer larger than any float.
        return False


def user_traceback(error: BaseException | None) -> TracebackType | None:
    """The error's frames from the first one in user code on; None if it was not raised there."""
    frame = error.__traceback__ if error is not None else None
    while frame is not None and _MARK not in frame.tb_frame.f_globals:
        frame = frame.tb_next
    return frame


def defined_at(function: Callable[..., Any]) -> str:
    """ " (FILE:LINE)" for a function in user code, "" for any other."""
    code = getattr(function, "__code__", None)
    if code is None or _MARK not in function.__globals__:
        return ""
    return f" ({Path(code.co_filename).name}:{code.co_firstlineno})"


def _place(error: BaseException) -> str:
    """ " (FILE:LINE)" of the innermost frame in user code; "" if there is none."""
    place, frame = "", user_traceback(error)
    while frame is not None:
        if _MARK in frame.tb_frame.f_globals:
            file = Path(frame.tb_frame.f_code.co_filename).name
            place = f" ({file}:{frame.tb_lineno})"
        frame = frame.tb_next
    return place


def _place_of(field: str, entry: str) -> tuple[Path, str]:
    """The file, which is checked to exist, and the name in it."""
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
    """The names that code binds at its top level, including those in branches."""
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
    # Dataclasses look up their module by name; a name that is taken stays with its owner.
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module
