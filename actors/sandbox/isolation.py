"""How a program is isolated, and what it may use: everything that `child` is told about it.

    namespaces   its own network, processes and file system
    landlock     the machine's, but it can open, start and signal nothing there: Landlock restricts
                 it to its files, a filter of system calls to one process
    none         whatever of this the machine supports, which may be only the limits

Under the first two, a program that root starts runs as a separate user, and a filter allows only
the system calls that programs need.
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
"""`auto`: the first of `KINDS` that works on this machine."""

KINDS: tuple[Isolation, ...] = ("namespaces", "landlock")
"""The kinds that isolate a program, the best first."""


@dataclass(frozen=True)
class SandboxLimits:
    """Limits of one program; CPU time and open files are limited per process."""

    time_s: float = 10.0
    """Wall-clock time, from the start to the end of all its processes."""
    memory_bytes: int = 512 * 2**20
    """Address space of each process, and memory of all processes together."""
    num_processes: int = 16
    """Processes and threads at a time."""
    num_files: int = 64
    """Files that a process has open at a time."""
    folder_bytes: int = 64 * 2**20
    """Size of the working folder and of the longest file; without namespaces only of the longest
    file."""
    output_bytes: int = 64 * 2**10
    """Length of standard output and of standard error, each; a program that writes more is
    ended."""


# `child` is also imported by this module, so Python has compiled it.
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
    """The command that runs a job and writes the outcome to the file descriptor `status`."""
    return [sys.executable, "-I", "-S", "-B", "-c", _CHILD, json.dumps(job), str(status)]


def job(isolation: Isolation, folder: Path, limits: SandboxLimits) -> Mapping[str, Any]:
    """What `child` needs to know about the program in `main.py` of the folder.

    Raises:
        OSError: no system call filter can be made here, and the isolation needs one.
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
    """The paths that every program may read (outermost folders only), and the links to them: system
    software, Python, and what these read. Of a folder that contains Python only its parts are
    readable, since data may lie beside them."""
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
    """Add the real location of a path, if it exists, and the links on the way to it."""
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
    """Yield the path and every link target on the way to the file."""
    yield path
    while os.path.islink(path):
        path = os.path.normpath(os.path.join(os.path.dirname(path), os.readlink(path)))
        yield path
