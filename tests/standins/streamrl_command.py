"""Stands in for the `streamrl` command: each role does what the test's script says.

    write_command(folder, {"learner": "fail(2, 'run.x: is wrong')"})

A role's script is Python; it may call `fail` and `wait_for` the files of others (ROLE.ready), and
knows `starts`, the number of its starts so far.
"""

import sys
from collections.abc import Mapping
from pathlib import Path

_COMMAND = """#!{python} -S
import json, os, signal, sys, time
folder = {folder!r}
role = sys.argv[1]
with open(os.path.join(folder, role + ".starts"), "a") as file:
    print(*sys.argv[1:], file=file)
with open(os.path.join(folder, role + ".starts")) as file:
    starts = len(file.readlines())

def fail(exit_code, sentence, origin="x.py:1"):
    record = dict(exit_code=exit_code, sentence=sentence, origin=origin)
    with open(os.environ["STREAMRL_ERROR_FILE"], "w") as file:
        json.dump(record, file)
    print("+------------------------------------", file=sys.stderr)
    sys.exit(exit_code)

def wait_for(*files):
    while not all(os.path.exists(os.path.join(folder, file)) for file in files):
        time.sleep(0.01)

def ended(*_):
    open(os.path.join(folder, role + ".ended"), "w").close()
    sys.exit(0)

signal.signal(signal.SIGTERM, ended)
open(os.path.join(folder, role + ".ready"), "w").close()
exec({scripts!r}[role])
"""

WAIT = "time.sleep(600)"
DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def write_command(folder: Path, scripts: Mapping[str, str]) -> Path:
    """The file to start in place of `streamrl`."""
    file = folder / "streamrl"
    text = _COMMAND.format(python=sys.executable, folder=str(folder), scripts=dict(scripts))
    file.write_text(text)
    file.chmod(0o755)
    return file


def starts_of(folder: Path, role: str) -> list[str]:
    """The command lines with which the role was started."""
    file = folder / f"{role}.starts"
    return file.read_text().splitlines() if file.exists() else []
