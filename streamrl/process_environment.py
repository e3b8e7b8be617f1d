"""Which processes of this machine carry a variable in the environment that they were started with.

Reads /proc: it finds none on systems without one, none of other users, and not this process. The
buffer looks for the other daemons of its launcher, a soak for what it has left.
"""

import os
from collections.abc import Callable
from pathlib import Path

PARENT_VARIABLE = "STREAMRL_PARENT_PID"
"""Of a process that a launcher has started: the launcher's id."""
_PROC = Path("/proc")


def processes_with(variable: str, is_wanted: Callable[[str], bool]) -> list[int]:
    """The ids of the processes that have the variable with such a value."""
    others = {int(path.name) for path in _PROC.glob("[0-9]*")} - {os.getpid()}
    return [pid for pid in others if (v := _value(pid, variable)) and is_wanted(v)]


def _value(pid: int, variable: str) -> str:
    """Of the variable; "" without it, for another user's process, and for one that has ended."""
    try:
        variables = (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    prefix = f"{variable}=".encode()
    found = (os.fsdecode(v.removeprefix(prefix)) for v in variables if v.startswith(prefix))
    return next(found, "")
