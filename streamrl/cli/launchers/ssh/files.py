"""What a run needs on its hosts, beside StreamRL itself: configuration, keys, model, data, code.

Invariant: a path of a setting means the same everywhere: relative to the working folder, where it
is copied to, or absolute, where it has to be. Secrets go by ssh only, into files that their owner
alone can read, and the key of the servers only to hosts that serve.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamrl.cli.launchers.ssh.agent.files import PRIVATE
from streamrl.cli.launchers.ssh.connection import Connection
from streamrl.cli.launchers.ssh.frames import (
    CHUNK_BYTES,
    Compare,
    Differing,
    Flush,
    Part,
    Stat,
    Written,
)
from streamrl.config import RunConfig
from streamrl.errors import ConfigError
from streamrl.placement.plan import Plan
from streamrl.user_code import is_user_code

_SERVERS_ONLY = "server.secret"
# What the launcher makes itself, or what names no file on the hosts.
_NOT_COPIED = ("run", "cluster", "buffer", "tracking")


@dataclass(frozen=True)
class Needed:
    """`relative` files are copied, `absolute` paths have to be there, `secrets` are private."""

    relative: Sequence[Path] = ()
    absolute: Sequence[str] = ()
    secrets: Sequence[Path] = ()


def needed(plan: Plan, host: str) -> Needed:
    """What the processes of this host read."""
    config, roles = plan.config, {process.role for process in plan.on(host)}
    keys = _keys(config, is_server=bool(roles & {"buffer", "learner"}))
    password = config.buffer.password_file
    secrets = [*keys, *([password] if password is not None else [])]
    if roles <= {"buffer"}:
        return Needed(secrets=secrets)
    resumed = config.run.resume if "learner" in roles else None
    checkpoint = [resumed] if isinstance(resumed, Path) and resumed.exists() else []
    named = (*_named(config.model_dump()), *checkpoint)
    return Needed(
        relative=sorted({file for path in named if _is_copied(path) for file in _files(path)}),
        absolute=sorted({str(path) for path in named if not _is_copied(path)}),
        secrets=secrets,
    )


async def copy(connection: Connection, plan: Plan, host: str, *, shares_folder: bool) -> None:
    """Bring to the host what it has not, or has otherwise. Waits until all is on its disk.

    Raises:
        ConfigError: an absolute path is not there.
        HostLostError: the host does not answer.
    """
    files = needed(plan, host)
    own = [] if shares_folder else [plan.config_file, *files.secrets]
    private = {str(path) for path in files.secrets}
    stats = {str(path): _stat(path) for path in (*files.relative, *own)}
    connection.send(Compare(files=tuple(stats.values()), required=tuple(files.absolute)))
    differing = await connection.answer(Differing)
    if differing.missing:
        raise ConfigError(
            f"host {host}: {differing.missing[0]} is not there; a relative path that stays below "
            "the working folder would be copied"
        )
    for path in dict.fromkeys((*differing.paths, *(str(path) for path in own))):
        mode = PRIVATE if path in private else 0o644
        for part, body in _parts_of(stats[path], mode):
            connection.send(part, body)
            await connection.drain()
    connection.send(Flush())
    await connection.answer(Written)


def _keys(config: RunConfig, *, is_server: bool) -> Sequence[Path]:
    folder = config.buffer.curve
    if folder is None:
        return ()
    names = ("server.public", "client.public", "client.secret", _SERVERS_ONLY)
    return tuple(folder / name for name in names if is_server or name != _SERVERS_ONLY)


def _named(settings: Mapping[str, Any]) -> Iterator[Path]:
    """The files and folders that exist here and that settings name, with code beside code."""
    for section, values in settings.items():
        if section in _NOT_COPIED:
            continue
        for text in _texts(values):
            file = text.rpartition(":")[0] if is_user_code(text) and ":" in text else text
            path = Path(file)
            if not file or path == Path(".") or not os.path.exists(path):
                continue
            yield path
            if path.suffix == ".py":
                yield from path.parent.glob("*.py")


def _texts(value: Any) -> Iterator[str]:
    match value:
        case str() | Path():
            yield str(value)
        case Mapping():
            for inner in value.values():
                yield from _texts(inner)
        case list() | tuple():
            for inner in value:
                yield from _texts(inner)


def _is_copied(path: Path) -> bool:
    return not path.is_absolute() and ".." not in path.parts


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
        return
    for folder, names, files in os.walk(path, followlinks=True):
        names[:] = [name for name in names if name != "__pycache__"]
        yield from (Path(folder) / name for name in files)


def _stat(path: Path) -> Stat:
    try:
        found = path.stat()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    return Stat(str(path), found.st_size, int(found.st_mtime))


def _parts_of(stat: Stat, mode: int) -> Iterator[tuple[Part, bytes]]:
    """The file in parts, of which the last is empty."""
    offset = 0
    with open(stat.path, "rb") as file:
        while body := file.read(CHUNK_BYTES):
            yield Part(path=stat.path, offset=offset, mode=mode), body
            offset += len(body)
    yield Part(path=stat.path, offset=offset, is_last=True, mode=mode, mtime_s=stat.mtime_s), b""
