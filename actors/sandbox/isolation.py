"""How far this machine can keep a program apart, found out by a program that tries what it may not.

    namespaces   its own network, processes and file system
    landlock     the machine's, of which it can open, start and signal nothing: Landlock holds it
                 to its files, a filter of system calls to one process
    none         whatever of it the machine has, which may be the limits alone

Under the first two, root's programs run as a user of their own and a filter allows the system calls
that programs need. Invariant: an isolation is what a program was seen to be held by; `none` is used
only where the configuration says so.
"""

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from actors.sandbox import child, landlock
from actors.sandbox.limits import SandboxLimits
from actors.sandbox.seccomp import make_filter
from streamrl.errors import ConfigError

Isolation = Literal["namespaces", "landlock", "none"]
IsolationChoice = Literal["auto", "namespaces", "landlock", "none"]
"""`auto`: the first of the two that this machine has."""

KINDS: tuple[Isolation, ...] = ("namespaces", "landlock")
"""That hold a program, the best first."""

# Imported here, too, so that Python has it compiled.
_CHILD = f"""
import json, sys
sys.path.insert(0, {str(Path(child.__file__).parents[2])!r})
from actors.sandbox import child
child.main(json.loads(sys.argv[1]), int(sys.argv[2]))
"""
_PROBE = """
import os, socket, sys
port, process, outside = sys.stdin.read().split(maxsplit=2)
for name, attempt in (
    ("the network", lambda: socket.create_connection(("127.0.0.1", int(port)), timeout=5)),
    ("other processes", lambda: os.kill(int(process), 0)),
    ("other processes' memory", lambda: open(f"/proc/{process}/environ")),
    ("files outside its folder", lambda: open(outside)),
):
    try:
        attempt()
    except OSError:
        continue
    sys.exit(f"a program reaches {name}")
print("held")
"""
_PROBE_LIMITS = SandboxLimits(time_s=30.0)
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
    **{
        f"/dev/{name}": f"/proc/self/fd/{i}" for i, name in enumerate(("stdin", "stdout", "stderr"))
    },
}


def choose(wanted: IsolationChoice = "auto") -> Isolation:
    """The isolation that programs get. Waits for one or two programs the first time, a fraction of
    a second each.

    Raises:
        ConfigError: this machine does not have it, with what is missing.
    """
    if sys.platform != "linux":
        raise ConfigError("code that a model wrote is run on Linux only")
    if wanted == "none":
        return wanted
    kinds = KINDS if wanted == "auto" else (wanted,)
    if found := next((kind for kind in kinds if not why_not(kind)), None):
        return found
    reasons = "; ".join(f"{kind}: {why_not(kind)}" for kind in kinds)
    raise ConfigError(
        f"this machine cannot keep code that a model wrote apart ({reasons}); `isolation: none` in "
        "kwargs runs it all the same, with the files, processes and network of this user in reach"
    )


@cache
def why_not(kind: Isolation) -> str:
    """What this machine lacks for an isolation; "" if it holds programs. Waits for a program."""
    if kind == "landlock" and not landlock.version():
        return "the kernel has no Landlock, or the container forbids it"
    with socket.create_server(("127.0.0.1", 0)) as server, tempfile.TemporaryDirectory() as name:
        folder = Path(name, "program")
        folder.mkdir()
        outside = Path(name, "outside")
        outside.touch()
        folder.joinpath("main.py").write_text(_PROBE, encoding="utf-8")
        given = f"{server.getsockname()[1]} {os.getpid()} {outside}"
        try:
            return _probe(job(kind, folder, _PROBE_LIMITS), given)
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)


def command(job: Mapping[str, Any], status: int) -> list[str]:
    """That runs a job; what became of it is written to this file descriptor."""
    return [sys.executable, "-I", "-S", "-B", "-c", _CHILD, json.dumps(job), str(status)]


def job(isolation: Isolation, folder: Path, limits: SandboxLimits) -> Mapping[str, Any]:
    """What `child` needs to know of a program, which is in `main.py` of the folder.

    Raises:
        OSError: no filter of system calls can be made here, and the isolation needs one.
    """
    return {
        "isolation": isolation,
        "folder": str(folder),
        "readable": _files().readable,
        "links": _files().links,
        "devices": _DEVICES,
        "python": [*{os.path.dirname(path) for path in (os.__file__, *_links(sys.executable))}],
        "limits": {**asdict(limits), "cpu_s": limits.cpu_s},
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


@dataclass
class _Files:
    """What every program may read: where it really is, the outermost alone, and the links to it."""

    readable: list[str] = field(default_factory=list)
    links: dict[str, str] = field(default_factory=dict)

    def add(self, path: str) -> None:
        """Adds a path, if there is such a one, after all that are above it."""
        above = [str(folder) for folder in reversed(Path(path).parents)]
        if not os.path.exists(path) or any(folder in self.readable for folder in above):
            return
        for part in (*above, path):
            if os.path.islink(part):
                self.links[part] = os.readlink(part)
                target = os.path.join(os.path.dirname(part), self.links[part])
                return self.add(os.path.normpath(target + path.removeprefix(part)))
        if path not in self.readable:
            self.readable.append(path)


@cache
def _files() -> _Files:
    """Software, Python and what both read. Of a folder that has Python only its parts: data may lie
    beside them."""
    roots = {*_SYSTEM, sys.prefix, sys.base_prefix}
    roots |= {os.path.dirname(os.path.dirname(path)) for path in _links(sys.executable)}
    paths = [*_FILES, *_DEVICES, *(os.path.join(root, part) for root in roots for part in _PARTS)]
    files = _Files(links=dict(_STREAMS))
    for path in sorted(map(os.path.abspath, paths)):
        files.add(path)
    found = set(files.readable)
    outermost = [path for path in files.readable if not found & {*map(str, Path(path).parents)}]
    return replace(files, readable=outermost)


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


def _probe(job: Mapping[str, Any], given: str) -> str:
    """Waits for a program that tries what it may not."""
    status, written = os.pipe()
    try:
        done = subprocess.run(
            command(job, written),
            input=given,
            capture_output=True,
            text=True,
            pass_fds=(written,),
            timeout=_PROBE_LIMITS.time_s,
        )
        os.set_blocking(status, False)
        with contextlib.suppress(BlockingIOError):
            outcome = json.loads(os.read(status, 2**16))
    finally:
        os.close(status)
        os.close(written)
    if done.stdout == "held\n":
        return ""
    return str(outcome.get("error") or done.stderr.strip()[-500:] or "a program did not end")
