"""The process between the daemon and a program, which `isolation.command` starts.

    supervisor      this file; ends with the daemon, and on SIGTERM
    first           with namespaces: process 1 of its own, with whose end all others end
    program         Python with the code; without namespaces it starts no other process

Invariant: when the supervisor has ended, nothing that the program started runs; what became of the
program is one line of JSON on the status pipe, which the program does not inherit. Signals are
taken where they are waited for, so that none is sent to a process that has been reaped, whose id
may be another's.
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
    """Waits for the program to end; SIGTERM unblocks. With namespaces the first process of them
    goes on here, too, and says what became of the program."""
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
    """Waits for the program."""
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
    """Never returns; an error of the set-up ends the process with a sentence on its stderr. The
    code is given where the folder is a new one."""
    try:
        os.setsid()
        user, python = os.getuid(), map(Path, job["python"])
        if all(map(privileges.can_be_read_by_others, (*python, folder.parent))):
            privileges.stop_being_root(folder, job["seed"])
        limits = dict(job["limits"])
        if job["isolation"] != "namespaces" and os.getuid() == user:
            del limits["num_processes"]  # The kernel would count all of the daemon's user.
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
    """Takes from this process what it does not need as the program."""
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
    """How the child ended. Waits for it; SIGTERM, or an excess, which is then the answer, kills
    it. Reaps the orphans that end meanwhile."""
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
    """Of the namespace; this one, its process 1, is not the program's."""
    return (path for path in Path("/proc").glob("[0-9]*") if path.name != "1")


def _excess(processes: Iterable[Path], limits: Mapping[str, int]) -> dict[str, Any] | None:
    """What becomes of a program whose processes are more, threads included, or have more memory
    together than allowed: the kernel counts neither root's processes nor what they share."""
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
