"""The ssh command that starts the agent of a host.

Invariant: ssh asks for nothing (BatchMode), a host whose key is not known is refused, and nothing
of the run, its secrets least, stands on a command line.
"""

import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

ALIVE_S = 5
_MODULE = "streamrl.cli.launchers.ssh.agent"


def agent_command(
    ssh: str, folder: Path, python: str, silence_s: float, connect_s: float
) -> Sequence[str]:
    """What starts the agent; `ssh` is [user@]host[:port], or "" for this machine."""
    script = _script(folder, python)
    if not ssh:
        return ("sh", "-c", script)
    place, colon, port = ssh.rpartition(":")
    has_port = bool(colon) and port.isdecimal() and ":" not in place
    options = {
        "BatchMode": "yes",
        "ConnectTimeout": math.ceil(connect_s),
        "ServerAliveInterval": ALIVE_S,
        "ServerAliveCountMax": max(1, math.ceil(silence_s / ALIVE_S)),
        # Another's master connection would end by that one's rules.
        "ControlMaster": "no",
        "ControlPath": "none",
    }
    words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    port_words = ["-p", port] if has_port else []
    target = place if has_port else ssh
    return ("ssh", "-T", *words, *port_words, "--", target, f"exec sh -c {shlex.quote(script)}")


def _script(folder: Path, python: str) -> str:
    """In the working folder, by the Python that has StreamRL: the one of the setting, else that of
    this machine if the host has it too, else the first one on the host's PATH."""
    quoted = shlex.quote(str(folder))
    find = f"p={shlex.quote(python or sys.executable)}"
    if not python:
        find += '; [ -x "$p" ] || p=python3'
    return f'mkdir -p {quoted} && cd {quoted} && {find} && exec "$p" -P -m {_MODULE}'
