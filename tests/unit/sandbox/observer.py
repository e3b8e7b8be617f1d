"""Runs every attempt under an isolation beside a process of its own: `observer.py ISOLATION`.

Prints JSON: what the machine lacks for it, or the outcomes, and what the process was before and
after. A process of its own, so that it can be run as another user; the standard library alone.
"""

import asyncio
import ctypes
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

from actors.sandbox.isolation import SandboxLimits
from actors.sandbox.sandbox import Sandbox, why_not
from tests.unit.sandbox.attempts import ATTEMPTS, CALLS, PROGRAM

BYSTANDER = """
import ctypes, json, os, resource, signal, sys
signals = []
for number in (signal.SIGCONT, signal.SIGUSR1, signal.SIGIO):
    signal.signal(number, lambda number, _: signals.append(number))
content = ctypes.create_string_buffer(b"harmless")
print(ctypes.addressof(content), flush=True)
for _ in sys.stdin:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    policy = os.sched_getscheduler(0), sorted(os.sched_getaffinity(0))
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    print(json.dumps([signals, content.value.decode(), limits, policy, nice]), flush=True)
"""


def main(isolation: Any) -> dict[str, Any]:
    if lacks := why_not(isolation):
        return {"lacks": lacks}
    with (
        tempfile.TemporaryDirectory() as name,
        tempfile.NamedTemporaryFile(dir="/dev/shm") as shared,
        subprocess.Popen(
            [sys.executable, "-c", BYSTANDER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"CONTENT": "harmless"},
            start_new_session=True,
        ) as bystander,
    ):
        assert bystander.stdin is not None
        assert bystander.stdout is not None
        given = {"pid": bystander.pid, "address": int(bystander.stdout.readline())}
        given |= {"shared": shared.name, **_files(Path(name))}
        try:
            before = _state(bystander)
            said = asyncio.run(_attempt(isolation, given))
            after = _state(bystander)
        finally:
            bystander.stdin.close()
            bystander.wait()
    return {**said, "before": before, "after": after}


def _files(folder: Path) -> dict[str, str]:
    """A file of another program's, one of the home folder, one of the run's."""
    found = {}
    for name in ("others", "home", "run"):
        folder.joinpath(name).mkdir(mode=0o700)
        folder.joinpath(name, "file").write_text("harmless")
        found[name] = str(folder / name / "file")
    os.environ["HOME"] = str(folder / "home")
    os.chdir(folder / "run")
    return found


def _state(bystander: subprocess.Popen[str]) -> Any:
    assert bystander.stdin is not None
    assert bystander.stdout is not None
    bystander.stdin.write("\n")
    bystander.stdin.flush()
    return json.loads(bystander.stdout.readline())


async def _attempt(isolation: Any, given: dict[str, Any]) -> dict[str, Any]:
    library = ctypes.CDLL("libseccomp.so.2")
    numbers = {name: library.seccomp_syscall_resolve_name(name.encode()) for name in CALLS}
    everything = {**given, "numbers": numbers, "attempts": [a.code for a in ATTEMPTS]}
    sandbox = Sandbox(SandboxLimits(time_s=60.0), isolation=isolation)
    result = await sandbox.run(PROGRAM, stdin=json.dumps(everything))
    if not result.is_success:
        raise SystemExit(f"{result.failure(sandbox.limits)}: {result.stderr}")
    return dict(json.loads(result.stdout))


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
