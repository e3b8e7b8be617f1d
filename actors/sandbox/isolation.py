"""How a program is kept apart, and what it may use: all that `child` is told of it.

    namespaces   its own network, processes and file system
    landlock     the machine's, of which it can open, start and signal nothing: Landlock holds it
                 to its files, a filter of system calls to one process
    none         whatever of it the machine has, which may be the limits alone

Under the first two, root's programs run as a user of their own and a filter allows the system calls
that programs need.
"""

import contextlib
import json
import os
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from actors.sandbox import child
from actors.sandbox.seccomp import make_filter

Isolation = Literal["namespaces", "landlock", "none"]
IsolationChoice = Literal["auto", "namespaces", "landlock", "none"]
"""`auto`: the first of the two that this machine has."""

KINDS: tuple[Isolation, ...] = ("namespaces", "landlock")
"""That hold a program, the best first."""


@dataclass(frozen=True)
class SandboxLimits:
    """Of one program; CPU time and open files are each process's."""

    time_s: float = 10.0
    """Wall-clock time, from the start to the end of all its processes."""
    memory_bytes: int = 512 * 2**20
    """Address space of each process, and memory of all together."""
    num_processes: int = 16
    """Processes and threads at a time."""
    num_files: int = 64
    """Files that a process has open at a time."""
    folder_bytes: int = 64 * 2**20
    """The working folder, and the longest file; without namespaces the longest file alone."""
    output_bytes: int = 64 * 2**10
    """Of standard output, and again of standard error; who writes more is ended."""


# Imported here, too, so that Python has it compiled.
_CHILD = f"""
import json, sys
sys.path.insert(0, {str(Path(child.__file__).parents[2])!r})
from actors.sandbox import child
child.main(json.loads(sys.argv[1]), int(sys.argv[2]))
"""
_PARTS = ("bin", "sbin", "lib", "lib32", "lib64", "libexec", "share", "include", "pyvenv.cfg")
_SYSTEM = ("/", "/usr", "/usr/local")
_FILES = (
    *("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives"),
    *("/etc/localtime", "/etc/passwd", "/etc/group", "/etc/nsswitch.conf", "/etc/mime.types"),
    *("/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/nix/store"),
    *("/sys/devices/system/cpu", "/sys/devices/system/node"),
)
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_STREAMS = {
    "/dev/fd": "/proc/self/fd",
    "/dev/stdin": "/proc/self/fd/0",
    "/dev/stdout": "/proc/self/fd/1",
    "/dev/stderr": "/proc/self/fd/2",
}


def command(job: Mapping[str, Any], status: int) -> list[str]:
    """That runs a job; what became of it is written to this file descriptor."""
    return [sys.executable, "-I", "-S", "-B", "-c", _CHILD, json.dumps(job), str(status)]


def job(isolation: Isolation, folder: Path, limits: SandboxLimits) -> Mapping[str, Any]:
    """What `child` needs to know of a program, which is in `main.py` of the folder.

    Raises:
        OSError: no filter of system calls can be made here, and the isolation needs one.
    """
    readable, links = _files()
    return {
        "isolation": isolation,
        "folder": str(folder),
        "readable": readable,
        "links": links,
        "devices": _DEVICES,
        "python": [*{os.path.dirname(path) for path in (os.__file__, *_links(sys.executable))}],
        "limits": {**asdict(limits), "cpu_s": int(limits.time_s) + 1},
        "filter": _filter(isolation),
        "command": [sys.executable, "-B", "-E", "-s", "-u", "main.py"],
        "environment": {
            "PATH": "/usr/bin:/bin",
            "HOME": str(folder),
            "TMPDIR": str(folder),
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        },
        "seed": random.SystemRandom().randrange(2**31),
    }


@cache
def _files() -> tuple[list[str], dict[str, str]]:
    """What every program may read, the outermost alone, and the links to it: software, Python and
    what both read. Of a folder that has Python only its parts: data may lie beside them."""
    roots = {*_SYSTEM, sys.prefix, sys.base_prefix}
    roots |= {os.path.dirname(os.path.dirname(path)) for path in _links(sys.executable)}
    paths = [*_FILES, *_DEVICES, *(os.path.join(root, part) for root in roots for part in _PARTS)]
    readable: list[str] = []
    links = dict(_STREAMS)
    for path in sorted(map(os.path.abspath, paths)):
        _add(path, readable, links)
    found = set(readable)
    return [path for path in readable if not found & {*map(str, Path(path).parents)}], links


def _add(path: str, readable: list[str], links: dict[str, str]) -> None:
    """Adds where the path really is, if there is such a one, after all that are above it."""
    above = [str(folder) for folder in reversed(Path(path).parents)]
    if not os.path.exists(path) or any(folder in readable for folder in above):
        return
    for part in (*above, path):
        if os.path.islink(part):
            links[part] = os.readlink(part)
            target = os.path.join(os.path.dirname(part), links[part])
            return _add(os.path.normpath(target + path.removeprefix(part)), readable, links)
    if path not in readable:
        readable.append(path)


@cache
def _filter(isolation: Isolation) -> str:
    with contextlib.suppress(OSError) if isolation == "none" else contextlib.nullcontext():
        return make_filter(is_apart=isolation == "namespaces").hex()
    return ""


def _links(path: str) -> Iterator[str]:
    """The path, where it leads, and so on to the file."""
    yield path
    while os.path.islink(path):
        path = os.path.normpath(os.path.join(os.path.dirname(path), os.readlink(path)))
        yield path
