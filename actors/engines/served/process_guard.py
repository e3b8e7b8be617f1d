"""Runs a command that must not outlive whoever started it: `python process_guard.py COMMAND`.

Standard input is a pipe from the owner; nobody writes to it. When it closes, however the owner
ended, the command and all its children are told to end, and are killed if they don't.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading

_GRACE_S = 10.0


def main(command: list[str]) -> int:
    """The command's exit code. Waits for its end, or for the owner's."""
    # A group of its own, so that one signal reaches all that the command starts.
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    signal.signal(signal.SIGTERM, lambda *_: _tell(process, signal.SIGTERM))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_follow_owner, args=(process,), daemon=True).start()
    code = process.wait()
    _tell(process, signal.SIGKILL)
    return code


def _follow_owner(process: "subprocess.Popen[bytes]") -> None:
    """Waits for the pipe's end, then a while for the command's."""
    os.read(0, 1)
    _tell(process, signal.SIGTERM)
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        _tell(process, signal.SIGKILL)


def _tell(process: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
