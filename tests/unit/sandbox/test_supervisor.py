"""The process between the daemon and a program, when the daemon ends it at a bad moment."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from actors.sandbox.isolation import Isolation, SandboxLimits, job
from tests.isolation import find_isolation

pytestmark = pytest.mark.skipif(find_isolation() is None, reason="no isolation on this machine")

# A process that has just been reaped no longer has its id, which another one may get.
SIGNALED_AFTER_THE_END = """
import json, os, signal, sys
from actors.sandbox import child

reap, supervisor = os.waitpid, os.getpid()

def reap_and_signal(*arguments):
    done = reap(*arguments)
    if done[0] and os.getpid() == supervisor:
        os.kill(supervisor, signal.SIGTERM)
    return done

os.waitpid = reap_and_signal
child.main(json.loads(sys.argv[1]), int(sys.argv[2]))
"""


def test_ended_after_its_program_it_still_says_how_that_ended(
    isolation: Isolation, tmp_path: Path
) -> None:
    tmp_path.joinpath("main.py").write_text("raise SystemExit(3)")
    limits = SandboxLimits(time_s=120.0)
    status, written = os.pipe()
    try:
        what = json.dumps(job(isolation, tmp_path, limits))
        done = subprocess.run(
            [sys.executable, "-c", SIGNALED_AFTER_THE_END, what, str(written)],
            pass_fds=(written,),
            capture_output=True,
            timeout=limits.time_s,
        )
        assert done.returncode == 0, done.stderr
        os.set_blocking(status, False)
        assert json.loads(os.read(status, 2**16)) == {"exit_code": 3}
    finally:
        os.close(status)
        os.close(written)
