"""How far this machine can keep a program apart, found out by a program that tries to connect.

    namespaces   its own network, processes and file system; sockets refused
    seccomp      sockets, new processes and signals refused; it sees the machine's files, with the
                 rights of the daemon

Invariant: an isolation is what a program was seen to be held by; nothing is run without one.
"""

import json
import os
import random
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, Literal

from actors.sandbox.limits import SandboxLimits

Isolation = Literal["namespaces", "seccomp"]

_CHILD = Path(__file__).with_name("child.py")
_PROBE = """
import socket, sys
try:
    socket.create_connection(("127.0.0.1", int(sys.stdin.read())), timeout=5)
except OSError:
    print("refused")
"""
_PROBE_LIMITS = SandboxLimits(time_s=30.0)


@cache
def find_isolation() -> Isolation | None:
    """The best that this machine has; None if a program could reach the network in every way.

    Waits for one or two programs, a fraction of a second each.
    """
    if sys.platform != "linux":
        return None
    kinds: tuple[Isolation, ...] = ("namespaces", "seccomp")
    return next((kind for kind in kinds if _refuses_network(kind)), None)


def command(job: Mapping[str, Any], status: int) -> list[str]:
    """That runs a job; what became of it is written to this file descriptor."""
    return [sys.executable, "-I", "-S", "-B", str(_CHILD), json.dumps(job), str(status)]


def job(
    isolation: Isolation, folder: Path, limits: SandboxLimits, arguments: tuple[str, ...]
) -> Mapping[str, Any]:
    """What `child` needs to know of a program, which is in `main.py` of the folder."""
    numbers = {**asdict(limits), "cpu_s": limits.cpu_s}
    if isolation == "seccomp":
        del numbers["num_processes"]  # It has one, and the limit would count all of the user's.
    return {
        "namespaces": isolation == "namespaces",
        "folder": str(folder),
        "hidden": [os.path.expanduser("~"), str(Path.cwd())],
        "kept": [sys.prefix, sys.base_prefix],
        "limits": numbers,
        "command": [sys.executable, "-B", "-E", "-s", "-u", "main.py", *arguments],
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


def _refuses_network(kind: Isolation) -> bool:
    with socket.create_server(("127.0.0.1", 0)) as server, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.joinpath("main.py").write_text(_PROBE, encoding="utf-8")
        status, written = os.pipe()
        try:
            done = subprocess.run(
                command(job(kind, folder, _PROBE_LIMITS, ()), written),
                input=str(server.getsockname()[1]),
                capture_output=True,
                text=True,
                pass_fds=(written,),
                timeout=_PROBE_LIMITS.time_s,
            )
        except (OSError, subprocess.TimeoutExpired):
            return False
        finally:
            os.close(status)
            os.close(written)
    return done.stdout == "refused\n"
