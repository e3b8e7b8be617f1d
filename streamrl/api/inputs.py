"""What `streamrl.train` is given, as settings: rows become a file, a function PATH.py:NAME.

Invariant: a file that is written here is named after its content and never changes, so a run that
resumes finds what it was started with.
"""

import hashlib
import inspect
import json
import pickle
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from streamrl.durable_files import write_file
from streamrl.errors import ConfigError

Rows = Iterable[Mapping[str, Any]]

_LOADER = '''"""A function that was given to streamrl.train, as cloudpickle keeps it."""

from pathlib import Path

import cloudpickle

{name} = cloudpickle.loads(Path(__file__).with_suffix(".pkl").read_bytes())
'''


def function_setting(argument: str, function: Callable[..., Any] | str, folder: Path) -> str:
    """PATH.py:NAME of a function, for the daemons, which are other processes.

    A function of a module is named where it stands. One of a notebook or of the script itself,
    which must not be run again, or a local one, is kept by value in the folder.

    Raises:
        ConfigError: it is neither a function nor a name, or it cannot be kept.
    """
    if isinstance(function, str):
        return function
    if not callable(function):
        raise ConfigError(
            f"{argument}: was {type(function).__name__}; it must be a function or PATH.py:NAME"
        )
    module = inspect.getmodule(function)
    name, file = getattr(function, "__qualname__", ""), getattr(module, "__file__", None)
    if file is not None and getattr(module, "__name__", "") != "__main__" and name.isidentifier():
        return f"{Path(file).resolve()}:{name}"
    return _kept_by_value(argument, function, folder)


def dataset_setting(argument: str, dataset: Rows | str | Path, folder: Path) -> str:
    """The path of a dataset: as it is given, or of a new JSONL file of its rows.

    Raises:
        ConfigError: a row is no mapping, or holds what JSON cannot; or there is none.
    """
    if isinstance(dataset, str | Path):
        return str(dataset)
    lines = []
    for number, row in enumerate(dataset):
        if not isinstance(row, Mapping):
            raise ConfigError(
                f"{argument}: row {number} was {type(row).__name__}; it must be a mapping"
            )
        try:
            lines.append(json.dumps(dict(row), ensure_ascii=False))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{argument}: row {number} is no JSON: {error}") from error
    if not lines:
        raise ConfigError(f"{argument}: has no rows")
    data = "".join(f"{line}\n" for line in lines).encode()
    return str(_written(folder, data, ".jsonl"))


def _kept_by_value(argument: str, function: Callable[..., Any], folder: Path) -> str:
    try:
        import cloudpickle
    except ImportError as error:
        raise ConfigError(
            f"{argument}: a function of a notebook or of the script itself needs the extra "
            "notebook: pip install 'streamrl[notebook]'; or put it into a file of its own"
        ) from error
    try:
        data: bytes = cloudpickle.dumps(function)
    except (pickle.PicklingError, TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{argument}: {function!r} cannot be kept: {error}") from error
    path = _written(folder, data, ".pkl")
    name = getattr(function, "__name__", "")
    name = name if name.isidentifier() else "function"
    write_file(path.with_suffix(".py"), _LOADER.format(name=name))
    return f"{path.with_suffix('.py')}:{name}"


def _written(folder: Path, data: bytes, suffix: str) -> Path:
    # A module's name begins with a letter.
    path = folder.resolve() / f"input_{hashlib.sha256(data).hexdigest()[:16]}{suffix}"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_bytes(data)
        unfinished.replace(path)
    return path
