"""The process between the daemon and a program, which `isolation.command` starts.

    supervisor      this file; ends with the daemon, and on SIGTERM
    first           with namespaces only: their process 1; when it ends, all others end
    program         Python with the code; without namespaces it starts no other process

Invariant: when the supervisor has ended, nothing that the program started is running. The outcome
is one line of JSON on the status pipe, which the program does not inherit. Signals are handled only
where they are waited for, so no signal is sent to a reaped process, whose id may have been reused.
"""

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from actors.sandbox import landlock, namespaces, privileges, seccomp

_LOOK_S = 0.05
_SIGNALS = {signal.SIGCHLD, signal.SIGTERM}


def main(job: dict[str, Any], status: int) -> None:
    """Run the program and wait until it ends; SIGTERM kills it. With namespaces, their first
    process also continues here and reports the outcome."""
    os.set_inheritable(status, False)
    privileges.end_with_parent(signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        if job["isolation"] == "namespaces":
            namespaces.leave()
            if first := os.fork():
                _wait(first, lambda: None)
                return
            privileges.end_with_parent(signal.SIGKILL)
        outcome = _outcome(job)
    except OSError as error:
        outcome = {"error": str(error)}
    os.write(status, json.dumps(outcome).encode())


def _outcome(job: dict[str, Any]) -> dict[str, Any]:
    """Start the program and wait until it ends."""
    folder, limits = Path(job["folder"]), job["limits"]
    code = None
    is_apart = job["isolation"] == "namespaces"
    if is_apart:
        code = folder.joinpath("main.py").read_bytes()
        namespaces.enter_files(job["folder"], job["readable"], job["links"], limits["folder_bytes"])
    program = os.fork()
    if not program:
        _become_program(job, folder, code)
    own = Path(f"/proc/{program}")
    return _wait(program, lambda: _excess(_all_processes() if is_apart else (own,), limits))


def _become_program(job: dict[str, Any], folder: Path, code: bytes | None) -> None:
    """Become the program; never returns. A set-up error ends the process with a message on its
    stderr. `code` is given if the folder is a new, empty one."""
    try:
        os.setsid()
        user, python = os.getuid(), map(Path, job["python"])
        if all(map(privileges.can_be_read_by_others, (*python, folder.parent))):
            privileges.stop_being_root(folder, job["seed"])
        limits = dict(job["limits"])
        if job["isolation"] != "namespaces" and os.getuid() == user:
            del limits["num_processes"]  # The kernel would count all of this user's processes.
        privileges.give_up_capabilities()
        privileges.end_with_parent(signal.SIGKILL)
        os.chdir(folder)
        if code is not None:
            Path("main.py").write_bytes(code)
        privileges.limit(limits)
        _hold(job, folder)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        os.execve(job["command"][0], job["command"], job["environment"])
    except (OSError, ValueError) as error:
        os.write(2, f"the sandbox cannot start the program: {error}\n".encode())
    finally:
        os._exit(127)


def _hold(job: dict[str, Any], folder: Path) -> None:
    """Restrict this process to what the program needs."""
    calls = bytes.fromhex(job["filter"])
    if job["isolation"] == "none":
        with contextlib.suppress(OSError):
            seccomp.load(calls)
        return
    if job["isolation"] == "landlock":
        readable = [Path(path) for path in (*job["readable"], f"/proc/{os.getpid()}")]
        landlock.restrict(readable, [folder, *map(Path, job["devices"])])
    seccomp.load(calls)


def _wait(child: int, excess: Callable[[], dict[str, Any] | None]) -> dict[str, Any]:
    """Wait for the child and return how it ended. SIGTERM kills it, and so does an excess, which is
    then the result. Reaps orphans that end meanwhile."""
    answer = None
    while True:
        process, status = os.waitpid(-1, os.WNOHANG)
        if process == child:
            return answer or {"exit_code": os.waitstatus_to_exitcode(status)}
        if process:
            continue
        if answer is None and (answer := excess()):
            os.kill(child, signal.SIGKILL)
        caught = signal.sigtimedwait(_SIGNALS, _LOOK_S)
        if caught and caught.si_signo == signal.SIGTERM:
            os.kill(child, signal.SIGKILL)


def _all_processes() -> Iterable[Path]:
    """All processes of the namespace except this one, its process 1."""
    return (path for path in Path("/proc").glob("[0-9]*") if path.name != "1")


def _excess(processes: Iterable[Path], limits: Mapping[str, int]) -> dict[str, Any] | None:
    """The outcome of a program whose processes use more memory together, or are more (with
    threads), than allowed; else None. The kernel limits neither root's processes nor their memory
    together."""
    num_tasks = num_bytes = 0
    for process in processes:
        with contextlib.suppress(OSError):
            for line in (process / "status").read_text().splitlines():
                name, _, value = line.partition(":")
                if name == "Threads":
                    num_tasks += int(value)
                elif name in ("RssAnon", "RssShmem"):
                    num_bytes += int(value.split()[0]) * 1024
    if num_bytes > limits["memory_bytes"]:
        return {"is_out_of_memory": True}
    return {"exit_code": -signal.SIGKILL} if num_tasks > limits["num_processes"] else None
