"""The run's folder on a host, and the one agent that works there.

Invariant: an agent works for a run alone on its host, until its process ends; what an older run has
left in the folder is moved aside, never mixed with another one.
"""

import asyncio
import contextlib
import fcntl
import os
import shutil
import signal
import time
from pathlib import Path

from streamrl.cli.launchers.ssh.agent.processes import GRACE_PERIOD_S
from streamrl.cli.launchers.ssh.frames import Join
from streamrl.errors import StreamRLError

LAUNCH_FILE, HERE_FILE = "launch.id", "launch.here"
_LOCK_S = 2 * GRACE_PERIOD_S


def enter(folder: Path, join: Join) -> bool:
    """Whether the launcher sees this folder too; if not it is made ready for its run.

    Raises:
        StreamRLError: it cannot be written.
    """
    if _read(folder / LAUNCH_FILE) == join.launch_id:
        return True
    try:
        is_known = _read(folder / HERE_FILE) == join.launch_id
        if not (is_known or join.resume) and folder.exists():
            shutil.move(folder, folder.with_name(f"{folder.name}.{time.strftime('%Y%m%d-%H%M%S')}"))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / HERE_FILE).write_text(join.launch_id)
    except OSError as error:
        raise StreamRLError(f"run.folder: cannot write {folder}: {error.strerror}") from error
    return False


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


async def take_over(file: Path) -> None:
    """Be the only agent; one that is there is told to end its processes. The lock is kept until
    this process ends. Waits for the other one, _LOCK_S at most.

    Raises:
        StreamRLError: it does not end, or the file cannot be written.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise StreamRLError(f"cannot write {file}: {error.strerror}") from error
    deadline_s = time.monotonic() + _LOCK_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError:
            other = os.pread(descriptor, 20, 0).decode() or "0"
            if time.monotonic() > deadline_s:
                raise StreamRLError(
                    f"process {other} works for this run and does not end"
                ) from None
        with contextlib.suppress(ProcessLookupError, PermissionError, ValueError):
            if int(other) > 0:
                os.kill(int(other), signal.SIGTERM)
        await asyncio.sleep(0.2)
    os.truncate(descriptor, 0)
    os.pwrite(descriptor, str(os.getpid()).encode(), 0)
