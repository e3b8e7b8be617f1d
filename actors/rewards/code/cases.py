"""Runs a program once for each of several inputs, and writes a line of JSON for each: what the
program printed, or null unless it ended with success.

It runs in the sandbox as a program itself, if the sandbox may start processes; it reads a job as
JSON from standard input and imports only the standard library. Each run is a forked process that
starts out like a fresh interpreter, in an empty folder; what the run leaves behind is killed at its
end. A fork costs a hundredth of starting an interpreter.

Invariant: the job contains no expected output, so a program that reads it, or writes lines of its
own, gains nothing.
"""

import atexit
import contextlib
import gc
import json
import os
import signal
import sys
import time
from types import CodeType, ModuleType
from typing import Any

_FILE = "main.py"


def main() -> None:
    """Run the program on each input, until the job's budget is spent or a failure that stops it."""
    with os.fdopen(os.dup(0), "rb") as given:
        job: dict[str, Any] = json.loads(given.read())
    begin_s, report = time.monotonic(), os.dup(1)
    # The imports of every program are made once.
    exec(job["prelude"], {})
    try:
        code = compile(job["code"], _FILE, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        code = compile("raise SyntaxError", _FILE, "exec")
    gc.freeze()
    for number, given_text in enumerate(job["inputs"]):
        source, output = _file(given_text), _file("")
        child = os.fork()
        if not child:
            os.close(report)
            os._exit(_run(code, number, source, output))
        is_well = _ends_well(child, job["time_s"])
        text = os.pread(output, job["output_bytes"] + 1, 0)
        is_well = is_well and len(text) <= job["output_bytes"]
        said = text.decode(errors="replace") if is_well else None
        os.write(report, json.dumps(said).encode() + b"\n")
        for descriptor in (source, output):
            os.close(descriptor)
        is_over = time.monotonic() - begin_s > job["budget_s"]
        if is_over or (job["stops"] and not is_well):
            return


def _file(text: str) -> int:
    """An open, unnamed file with the text."""
    descriptor = os.open("unnamed", os.O_RDWR | os.O_CREAT | os.O_EXCL)
    os.unlink("unnamed")
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(text.encode(errors="replace"))
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _run(code: CodeType, number: int, source: int, output: int) -> int:
    """Run the program in this process, with these files as standard input and output; return its
    exit code. Waits for its threads and runs its exit functions."""
    os.setsid()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_WRONLY)
    for place, descriptor in enumerate((source, output, nothing)):
        os.dup2(descriptor, place)
        os.close(descriptor)
    os.mkdir(str(number))
    os.chdir(str(number))
    program = ModuleType("__main__")
    vars(program).update(__file__=_FILE, __builtins__=__builtins__)
    sys.modules["__main__"] = program
    try:
        exec(code, vars(program))
        failed = False
    except SystemExit as end:
        failed = end.code not in (None, 0)
    except BaseException:
        failed = True
    try:
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()
        atexit._run_exitfuncs()
        if not getattr(sys.stdout, "closed", False):
            sys.stdout.flush()
    except BaseException:
        failed = True
    return int(failed)


def _ends_well(child: int, time_s: float) -> bool:
    """Wait for the child's end and kill what it has started. The child is killed after `time_s`."""
    signal.signal(signal.SIGALRM, lambda *_: os.kill(child, signal.SIGKILL))
    signal.setitimer(signal.ITIMER_REAL, time_s)
    _, status = os.waitpid(child, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    return status == 0


if __name__ == "__main__":
    main()
