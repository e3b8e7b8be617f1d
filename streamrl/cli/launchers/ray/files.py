"""The files that a node gets from the driver if it does not see its folders: configuration, keys,
data, code.

Invariant: a path in a setting means the same everywhere. A relative one is below the working
folder, and its file is sent; a file with an absolute path must be there already. The servers'
secret key goes only to nodes that serve.
"""

import io
import os
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from streamrl.config import RunConfig
from streamrl.config.secrets import REDIS_PASSWORD
from streamrl.curve import make_keys
from streamrl.durable_files import write_file
from streamrl.errors import ConfigError, reading
from streamrl.placement.plan import Plan, gib
from streamrl.run_folder import DATA_FILE
from streamrl.user_code import is_user_code

MAX_BYTES = 500 * 2**20
"""The most bytes of all sent files, as Ray itself limits a working folder."""
_KEYS, _PASSWORD, _SERVERS_ONLY = "keys", "redis", "server.secret"
_OF_SERVICES = ("WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_ENTITY", "HF_TOKEN", "HF_ENDPOINT")
# Settings of servers, teachers, judges and agents that name the environment variable of a key.
_NAME_VARIABLES = ("api_key_env", "token_env")
# Sections whose files the launcher makes itself, or that name no files on the nodes.
_NOT_SENT = ("run", "cluster", "buffer", "tracking")


def with_keys(config: RunConfig) -> RunConfig:
    """The configuration with keys and password in the run's folder, where the processes find
    them."""
    folder = config.run.path / _KEYS
    password = folder / _PASSWORD if config.buffer.password_file else None
    return config.with_values(buffer={"curve": folder, "password_file": password})


def write_secrets(given: RunConfig) -> None:
    """Fill the folder of `with_keys` with the files that the configuration names, or with new keys.
    Raises ConfigError if a file that it names cannot be read."""
    folder, curve = given.run.path / _KEYS, given.buffer.curve
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    password = given.buffer.password_file
    names = ("server.public", "server.secret", "client.public", "client.secret")
    copied = {folder / name: curve / name for name in names} if curve not in (None, folder) else {}
    if password is not None:
        copied[folder / _PASSWORD] = password
    for target, source in copied.items():
        write_file(target, _content(source), is_private=True)
    if curve is None and not (folder / _SERVERS_ONLY).exists():
        make_keys(folder)


def handed_on(config: RunConfig) -> Mapping[str, str]:
    """Environment variables that the run's processes get from this one: keys, and what belongs to
    them."""
    named = (text for key, text in _texts(config.model_dump()) if key in _NAME_VARIABLES)
    names = (REDIS_PASSWORD, *_OF_SERVICES, *named)
    return {name: os.environ[name] for name in names if name in os.environ}


def private_files(plan: Plan, host: str) -> Mapping[str, bytes]:
    """Return the configuration and the secrets for the processes of one host, by their paths."""
    is_server = any(process.role in ("buffer", "learner") for process in plan.on(host))
    keys, data = sorted((plan.config.run.path / _KEYS).iterdir()), plan.config.run.path / DATA_FILE
    paths = [plan.config_file, data, *(k for k in keys if is_server or k.name != _SERVERS_ONLY)]
    return {str(path): _content(path) for path in paths}


def required(config: RunConfig) -> tuple[str, ...]:
    """The paths in settings that every node must already have."""
    return tuple(sorted({str(p) for p in _named(config.model_dump()) if not _is_sent(p)}))


def archive(config: RunConfig) -> bytes:
    """Return a tar archive of the files below the working folder that settings name. Raise
    ConfigError if they are larger than MAX_BYTES together."""
    files = sorted({f for p in _named(config.model_dump()) if _is_sent(p) for f in _files(p)})
    size = sum(file.stat().st_size for file in files)
    if size > MAX_BYTES:
        largest = max(files, key=lambda file: file.stat().st_size)
        raise ConfigError(
            f"--ray: the files that settings name below {Path.cwd()} have {gib(size)}, and the "
            f"nodes, which do not see it, are sent {gib(MAX_BYTES)} at most; the largest is "
            f"{largest}: put it where every node sees it and name it by its absolute path, or "
            "name a model of the Hugging Face hub"
        )
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w") as tar:
        for file in files:
            tar.add(file, recursive=False)
    return output.getvalue()


def _content(path: Path) -> bytes:
    with reading(path):
        return path.read_bytes()


def _named(settings: Mapping[str, Any]) -> Iterator[Path]:
    """Yield existing files and folders that settings name; for a Python file also the Python files
    beside it."""
    for section, values in settings.items():
        for _, text in () if section in _NOT_SENT else _texts(values):
            file = text.rpartition(":")[0] if is_user_code(text) and ":" in text else text
            path = Path(file)
            if not file or path == Path(".") or not os.path.exists(path):
                continue
            yield path
            if path.suffix == ".py":
                yield from path.parent.glob("*.py")


def _texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield every text and path in settings, each with the innermost key above it."""
    match value:
        case str() | Path():
            yield key, str(value)
        case Mapping():
            for name, inner in value.items():
                yield from _texts(inner, name)
        case list() | tuple():
            for inner in value:
                yield from _texts(inner, key)


def _is_sent(path: Path) -> bool:
    return not path.is_absolute() and ".." not in path.parts


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
        return
    for folder, names, files in os.walk(path, followlinks=True):
        names[:] = [name for name in names if name != "__pycache__"]
        yield from (Path(folder) / name for name in files)
