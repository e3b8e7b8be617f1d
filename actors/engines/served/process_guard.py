"""Runs a command that must not outlive the process that started it: `python process_guard.py
COMMAND`.

Standard input is a pipe from that process, its owner; nothing is written to it. It closes when the
owner ends, in whatever way; the command and all its children then get SIGTERM, and SIGKILL
`_GRACE_S` later.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading

_GRACE_S = 4.0


def main(command: list[str]) -> int:
    """Run the command and return its exit code. Waits for its end, or for the owner's."""
    # Its own group, so that one signal reaches everything that the command starts.
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    signal.signal(signal.SIGTERM, lambda *_: _signal(process, signal.SIGTERM))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_wait_for_owner, args=(process,), daemon=True).start()
    code = process.wait()
    _signal(process, signal.SIGKILL)
    if code < 0:
        _end_by(-code)
    return code


def _wait_for_owner(process: "subprocess.Popen[bytes]") -> None:
    """Wait until the pipe closes, then end the command; wait at most `_GRACE_S` before killing
    it."""
    os.read(0, 1)
    _signal(process, signal.SIGTERM)
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        _signal(process, signal.SIGKILL)


def _signal(process: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _end_by(number: int) -> None:
    """End this process by the signal that ended the command, so that its owner sees the signal."""
    with contextlib.suppress(OSError):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
