"""The check before a launch, in a process of its own."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

HELPER_S = 120


# In the user's file, to start a helper.
PROCESS = f"subprocess.Popen(['sleep', '{HELPER_S}']).pid"
FORKED = f"start(multiprocessing.Process(target=time.sleep, args=({HELPER_S},))).pid"
THREAD = f"start(threading.Thread(target=time.sleep, args=({HELPER_S},))) and os.getpid()"


@pytest.mark.parametrize("helper", [PROCESS, FORKED, THREAD])
def test_what_a_users_file_starts_is_not_waited_for_and_ends_with_the_check(
    tmp_path: Path, helper: str
):
    pid_file = tmp_path / "pid"
    reward = tmp_path / "reward.py"
    reward.write_text(
        "import multiprocessing, os, pathlib, subprocess, threading, time\n"
        "def start(helper):\n    helper.start()\n    return helper\n"
        f"pathlib.Path({str(pid_file)!r}).write_text(str({helper}))\n"
        "def score(prompt, response, answer):\n    return 1.0\n"
    )
    config = tmp_path / "run.yaml"
    config.write_text(
        f"run: {{name: run, folder: {tmp_path}}}\nmodel: {{path: {tmp_path}/none}}\n"
        f"data: {{source: copy, reward: '{reward}:score'}}\n"
    )
    start_s = time.monotonic()
    # A fork of a process with threads may hang, and pytest may have some.
    code = (
        "import sys; from streamrl.cli.check import before_launch; "
        "print(before_launch._run(sys.argv[1], []))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(config)],
        capture_output=True,
        text=True,
    )
    assert "streamrl check: " in done.stdout, done.stderr
    assert time.monotonic() - start_s < HELPER_S
    assert not _is_running(int(pid_file.read_text()))


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z" and os.getpgid(pid) > 0
