"""The process between the daemon and a program: `python child.py JOB STATUS_FD`.

    supervisor      this file; ends with the daemon, and on SIGTERM
    first           with namespaces: process 1 of its own, with whose end all others end
    program         Python with the code; without namespaces it starts no other process

Invariant: when the supervisor has ended, nothing that the program started runs; what became of the
program is one line of JSON on the status pipe, which the program does not inherit.
"""

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from actors.sandbox import namespaces, privileges, seccomp

_LOOK_S = 0.05


def main(job: dict[str, Any], status: int) -> None:
    """Waits for the program to end; SIGTERM unblocks."""
    os.set_inheritable(status, False)
    privileges.end_with_parent(signal.SIGTERM)
    try:
        outcome = _supervise(job)
    except OSError as error:
        outcome = {"error": str(error)}
    if outcome is not None:
        os.write(status, json.dumps(outcome).encode())


def _supervise(job: dict[str, Any]) -> dict[str, Any] | None:
    """How the program ended; None if it was killed before that was known."""
    if not job["namespaces"]:
        return _run(job)
    namespaces.leave()
    read, write = os.pipe()
    first = os.fork()
    if not first:
        privileges.end_with_parent(signal.SIGKILL)
        os.write(write, json.dumps(_run(job)).encode())
        os._exit(0)
    os.close(write)
    _reap(first)
    said = os.read(read, 2**16)
    return dict(json.loads(said)) if said else None


def _run(job: dict[str, Any]) -> dict[str, Any]:
    """How the program ended, or why it did not start. Waits for it."""
    try:
        return _outcome(job)
    except OSError as error:
        return {"error": str(error)}


def _outcome(job: dict[str, Any]) -> dict[str, Any]:
    """Waits for the program."""
    folder = Path(job["folder"])
    files = namespaces.files_below(folder)
    kept = [Path(path) for path in job["kept"]]
    if job["namespaces"]:
        namespaces.hide_files(
            folder,
            hidden=[Path(path) for path in job["hidden"]],
            kept=kept,
            folder_bytes=job["limits"]["folder_bytes"],
        )
    program = os.fork()
    if not program:
        _become_program(job, folder, files, kept)
    if job["namespaces"]:
        return _wait(program, job["limits"])
    return {"exit_code": os.waitstatus_to_exitcode(_reap(program))}


def _reap(process: int) -> int:
    """Its status. Waits for its end; SIGTERM kills it, until it has ended: the id of one that is
    reaped may be another's."""
    signal.signal(signal.SIGTERM, lambda *_: os.kill(process, signal.SIGKILL))
    os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return os.waitpid(process, 0)[1]


def _become_program(
    job: dict[str, Any], folder: Path, files: Mapping[str, bytes], kept: list[Path]
) -> None:
    """Never returns; an error of the set-up ends the process with a sentence on its stderr."""
    try:
        os.setsid()
        if all(map(privileges.can_be_read_by_others, (*kept, folder.parent))):
            privileges.stop_being_root(folder, job["seed"])
        privileges.give_up_capabilities()
        privileges.end_with_parent(signal.SIGKILL)
        os.chdir(folder)
        if job["namespaces"]:
            for name, content in files.items():
                Path(name).parent.mkdir(parents=True, exist_ok=True)
                Path(name).write_bytes(content)
        privileges.limit(job["limits"])
        if seccomp.has_filter():
            seccomp.refuse_calls(with_processes=not job["namespaces"])
        os.execve(job["command"][0], job["command"], job["environment"])
    except (OSError, ValueError) as error:
        os.write(2, f"the sandbox cannot start the program: {error}\n".encode())
    finally:
        os._exit(127)


def _wait(program: int, limits: Mapping[str, int]) -> dict[str, Any]:
    """How the program ended. Waits for it, reaps the orphans that end meanwhile, and returns early,
    which ends them all, when they are more or have more memory together than allowed: the kernel
    counts no processes of root's."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    while True:
        process, status = os.waitpid(-1, os.WNOHANG)
        if process == program:
            return {"exit_code": os.waitstatus_to_exitcode(status)}
        if process:
            continue
        sizes = list(_sizes())
        if sum(sizes) > limits["memory_bytes"]:
            return {"is_out_of_memory": True}
        if len(sizes) > limits["num_processes"] + 1:
            return {"exit_code": -signal.SIGKILL}
        signal.sigtimedwait({signal.SIGCHLD}, _LOOK_S)


def _sizes() -> Iterator[int]:
    """Memory in bytes that is not shared, of each process of the namespace, this one included."""
    for statm in Path("/proc").glob("[0-9]*/statm"):
        with contextlib.suppress(OSError):
            _, resident, shared, *_ = map(int, statm.read_text().split())
            yield (resident - shared) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), int(sys.argv[2]))
